"""One event <-> one line of JSON.

A line that is torn, of an unknown kind or with a field of the wrong type decodes to None: a reader skips it. Unknown
fields are ignored and missing ones take their defaults, so old readers read new runs and new readers old runs. JSON
has no NaN or infinity: both are written as null, and null is read back as NaN, alone and in a list.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_args

from atoll.observe.events import Event


def snake_case(name: str) -> str:
    """ "LearnerSteps" -> "learner_steps"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


INT_MAX = 2**64
"""No counter, time or checksum is larger. One that is comes from a damaged line, and nothing could be computed with it:
not even a float holds an integer of 400 digits."""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -INT_MAX <= value <= INT_MAX


def _is_float(value: Any) -> bool:
    return value is None or isinstance(value, float) or _is_int(value)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": _is_float,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "list[int]": lambda value: isinstance(value, list) and all(map(_is_int, value)),
    "list[float]": lambda value: isinstance(value, list) and all(map(_is_float, value)),
    "list[str]": lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value),
    "dict[str, int]": lambda value: isinstance(value, dict) and all(map(_is_int, value.values())),
}

_CLASSES: dict[str, type[Any]] = {snake_case(cls.__name__): cls for cls in get_args(Event)}
_NAMES: dict[type[Any], str] = {cls: kind for kind, cls in _CLASSES.items()}
_FIELDS: dict[str, list[tuple[str, str, bool]]] = {
    kind: [(f.name, str(f.type), f.default is MISSING and f.default_factory is MISSING) for f in fields(cls)]
    for kind, cls in _CLASSES.items()
}
# An event with a field of a type that is not in the table above could be written and never read: refuse it at import.
_UNKNOWN = {type_name for entries in _FIELDS.values() for _, type_name, _ in entries} - set(_CHECKS)
assert not _UNKNOWN, f"no check for fields of type {_UNKNOWN}; add one to _CHECKS"


def _to_json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _from_json(value: float | None) -> float:
    return math.nan if value is None else float(value)


def encode(t_ns: int, event: Event) -> bytes:
    """The line of an event, with its newline."""
    kind = _NAMES[type(event)]
    line: dict[str, Any] = {"t_ns": t_ns, "kind": kind}
    for name, type_name, _ in _FIELDS[kind]:
        value = getattr(event, name)
        if type_name == "float":
            value = _to_json(value)
        elif type_name == "list[float]":
            value = [_to_json(item) for item in value]
        line[name] = value
    return json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> tuple[int, Event] | None:
    """(t_ns, event), or None for a line that this version cannot use."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or not _is_int(raw.get("t_ns")):
        return None
    kind = raw.get("kind")
    if not isinstance(kind, str) or kind not in _CLASSES:
        return None
    values: dict[str, Any] = {}
    for name, type_name, required in _FIELDS[kind]:
        if name not in raw:
            if required:
                return None
            continue
        value = raw[name]
        if not _CHECKS[type_name](value):
            return None
        if type_name == "float":
            value = _from_json(value)
        elif type_name == "list[float]":
            value = [_from_json(item) for item in value]
        values[name] = value
    return raw["t_ns"], _CLASSES[kind](**values)
