"""Reading plain data: what may be missing is dropped and counted, what is wrong is refused with a remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from atoll.errors import ConfigError

VALUE_MAX = 1e18
"""Larger than any count or time that we draw (100 trillion tokens are 1e14): a larger number is in a wrong unit."""

NAME_CHARS_MAX = 200
"""A name longer than this is a sentence, and would fill the figure."""

ROWS_MAX = 200_000
"""Rows of one figure. At 300 dpi a page-wide figure has 2,100 columns of pixels: more rows cannot be seen."""

LINES_MAX = 24
"""Lines of one figure; past that nobody can tell them apart."""


class Tally:
    """Counts what was dropped, so that the caption can say it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.total = 0
        self.dropped = 0

    def keep(self, *values: float | None) -> bool:
        """Whether all values are there; counts the row either way."""
        self.total += 1
        whole = all(value is not None for value in values)
        self.dropped += not whole
        return whole

    def notes(self) -> list[str]:
        if not self.dropped:
            return []
        verb = "is" if self.dropped == 1 else "are"
        return [f"{self.dropped} of {self.total} {self.what} {verb} not drawn: a value is missing or not finite."]

    def require_some(self, remedy: str) -> None:
        if self.dropped == self.total:
            raise ConfigError(
                f"Nothing to draw: of {self.total} {self.what} none has all its values as finite numbers. {remedy}"
            )


def rows_of(value: object, what: str, remedy: str) -> list[Mapping[str, Any]]:
    """A non-empty list of dicts."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ConfigError(f"{what} must be a list of dicts, not {type(value).__name__}. {remedy}")
    if not value:
        raise ConfigError(f"Nothing to draw: {what} is empty. {remedy}")
    if len(value) > ROWS_MAX:
        raise ConfigError(f"{what} has {len(value)} entries; at most {ROWS_MAX} can be drawn. Thin them out first.")
    for i, row in enumerate(value):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{what}[{i}] must be a dict, not {type(row).__name__}. {remedy}")
    return list(value)


def number(
    row: Mapping[str, Any], key: str, where: str, *, low: float = -VALUE_MAX, high: float = VALUE_MAX
) -> float | None:
    """The number under `key`; None if it is missing, None or not finite."""
    return as_number(row.get(key), f"{where}: {key!r}", low=low, high=high)


def as_number(value: object, where: str, *, low: float = -VALUE_MAX, high: float = VALUE_MAX) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{where} is {value!r}, not a number. Give a number, or None if there is none.")
    result = float(value)
    if not math.isfinite(result):
        return None
    if not low <= result <= high:
        raise ConfigError(f"{where} is {result:g}; it must be between {low:g} and {high:g}. Check its unit.")
    return result


def positive(row: Mapping[str, Any], key: str, where: str) -> float | None:
    """For logarithmic axes and counts."""
    value = number(row, key, where)
    if value is not None and value <= 0:
        raise ConfigError(
            f"{where}: {key!r} is {value:g}; it must be greater than zero. Correct or leave out this entry."
        )
    return value


def name(row: Mapping[str, Any], key: str, where: str) -> str:
    """A label, with its white space made plain."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f"{where}: {key!r} is {value!r}, not a name. Give a short text.")
    text = " ".join(str(value).split())
    if not text or len(text) > NAME_CHARS_MAX:
        raise ConfigError(
            f"{where}: {key!r} has {len(text)} characters; a name needs 1 to {NAME_CHARS_MAX}. Choose another one."
        )
    if not text.isprintable():
        raise ConfigError(f"{where}: {key!r} has characters that cannot be printed. Choose another name.")
    return text


def optional_name(row: Mapping[str, Any], key: str, where: str) -> str:
    return name(row, key, where) if row.get(key) not in (None, "") else ""


def pairs(row: Mapping[str, Any], key: str, where: str, columns: tuple[int, ...] = (2,)) -> list[Sequence[Any]]:
    """A list of points, each a list of so many numbers."""
    value = row.get(key)
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ConfigError(f"{where}: {key!r} must be a list of points, not {type(value).__name__}.")
    if len(value) > ROWS_MAX:
        raise ConfigError(f"{where}: {key!r} has {len(value)} points; at most {ROWS_MAX} can be drawn. Thin them out.")
    for i, point in enumerate(value):
        if isinstance(point, (str, bytes)) or not isinstance(point, Sequence) or len(point) not in columns:
            wanted = " or ".join(str(n) for n in columns)
            raise ConfigError(f"{where}: {key}[{i}] is {point!r}; give a list of {wanted} numbers.")
    return list(value)


def limit_lines(count: int, what: str) -> None:
    if count > LINES_MAX:
        raise ConfigError(f"{count} {what} in one figure; at most {LINES_MAX} can be told apart. Draw several figures.")
