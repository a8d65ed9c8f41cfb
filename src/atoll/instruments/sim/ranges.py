"""Numbers that may come from anybody: in their range, or one message that says so."""

from __future__ import annotations

import math
from typing import Any

from atoll.errors import ConfigError


def whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, not {_shown(value)}")
    return value


def real(name: str, value: Any, low: float, high: float) -> float:
    try:
        good = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        good = False
    if not good or not low <= value <= high:
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, not {_shown(value)}")
    return float(value)


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {_shown(value)}")


def _shown(value: Any) -> str:
    """Never a megabyte, and never the digits of a number that Python refuses to write."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 256 bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
