"""Machine inputs in one line, for traces: names and numbers, never payloads."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

HIDDEN = frozenset(
    (
        *("payload", "update", "tensors", "config", "loss", "detail", "step_ns", "merge_ns", "size", "frozen"),
        *("due_step", "secret", "fingerprint"),
    )
)
"""Fields that are large, or say nothing to a reader of a trace."""


def describe_event(event: Any) -> str:
    """Such as `FromLearner session=3 Progress step=7 steps=7 tokens=112`."""
    parts = [type(event).__name__]
    for entry in fields(event):
        value = getattr(event, entry.name)
        if entry.name in HIDDEN:
            continue
        if is_dataclass(value) and not isinstance(value, type):
            parts.append(describe_event(value))
        elif isinstance(value, float):
            parts.append(f"{entry.name}={value:.6g}")
        elif not (isinstance(value, (str, tuple, bytes)) and not value):
            parts.append(f"{entry.name}={_short(value)}")
    return " ".join(parts)


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ",".join(_short(item) for item in value) + ")"
    if is_dataclass(value) and not isinstance(value, type):
        return "/".join(str(getattr(value, entry.name)) for entry in fields(value))
    return str(value)
