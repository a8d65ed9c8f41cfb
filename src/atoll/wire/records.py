"""Dataclasses of `core` <-> protobuf messages that have the same fields.

Encoding trusts our own objects. Parsing trusts nothing: a record is a list of fields, each with the check (of `checks`
or of here) that its value must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from atoll.core import FetchKind, PushKind
from atoll.errors import RemoteProtocolError
from atoll.wire import checks

T = TypeVar("T")
Parse = Callable[[Any], T]
"""Of a protobuf message."""
Check = Callable[[str, Any], Any]
"""Of the value of a field, by its name; raises RemoteProtocolError."""

TEXTS = ("reason", "detail")
"""Fields with words for a person."""


def plain(record: Any) -> dict[str, Any]:
    """The fields of one of our objects in the form that protobuf's constructors take."""
    return {name: _plain(name, getattr(record, name)) for name in _names(record.__class__)}


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _plain(name: str, value: Any) -> Any:
    if name in TEXTS:
        return checks.cut(value)
    if type(value) in (int, str, bytes):
        return value
    if isinstance(value, PushKind):
        return f"PUSH_{value.name}"
    if isinstance(value, FetchKind):
        return f"FETCH_{value.name}"
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [plain(item) for item in value]
    return plain(value) if is_dataclass(value) else value


def parse_bytes(message_class: Any, data: bytes | memoryview) -> Any:
    """Bytes -> protobuf message, with one kind of error. ValueError covers text that is not UTF-8 in the pure-Python
    implementation of protobuf."""
    try:
        return message_class.FromString(bytes(data))
    except (DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"bytes that are no {message_class.DESCRIPTOR.name}: {error}") from None


def record(kind: Callable[..., T], /, **checked: Check) -> Parse[T]:
    """Reads a message with these fields as an object of that kind."""

    def parse(message: Any) -> T:
        of = message.DESCRIPTOR.name
        return kind(**{name: check(f"{of}.{name}", getattr(message, name)) for name, check in checked.items()})

    return parse


def inside(parse: Parse[T]) -> Callable[[str, Any], T]:
    """A field that is a message itself, and names its own fields."""
    return lambda _name, message: parse(message)


def many(check: Check, length_max: int) -> Callable[[str, Sequence[Any]], tuple[Any, ...]]:
    """A repeated field. Its length is checked before any of its values."""

    def check_all(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
        checks.length(name, len(values), length_max)
        return tuple(check(name, value) for value in values)

    return check_all


def free(_name: str, value: T) -> T:
    """A field of which every value is a good one, such as a checksum."""
    return value


def payload(bytes_max: int) -> Check:
    def check(name: str, value: bytes) -> bytes:
        checks.length(name, len(value), bytes_max)
        return value

    return check
