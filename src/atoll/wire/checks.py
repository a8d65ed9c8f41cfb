"""Checks on values from the other side. Each returns the value or raises RemoteProtocolError naming the field."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.core import FRAGMENTS_MAX, INNER_SLOTS_MAX, NO_VERSION, Refused
from atoll.errors import RefusedError, RemoteProtocolError
from atoll.wire.limits import COUNT_MAX, ID_CHARS_MAX, LEARNER_CHARS_MAX, SECRET_CHARS_MAX, TEXT_CHARS_MAX

SHOWN = {"\n": " / ", "\t": " ", "\r": ""}
"""What stands for characters that would move a terminal's cursor."""


def identifier(name: str, value: str, chars_max: int = ID_CHARS_MAX) -> str:
    """A non-empty printable name: it will appear in logs, file names and terminals."""
    if not value or len(value) > chars_max or not value.isprintable():
        raise RemoteProtocolError(f"{name} must be 1 to {chars_max} printable characters; got {_shown(value)}")
    return value


def learner_id(name: str, value: str) -> str:
    """An id that a learner may have: plain ASCII, so that no two look alike."""
    if not value.isascii():
        raise RemoteProtocolError(f"{name} must be 1 to {LEARNER_CHARS_MAX} ASCII characters; got {_shown(value)}")
    return identifier(name, value, LEARNER_CHARS_MAX)


def secret(name: str, value: str) -> str:
    """The value itself is in no message: it would end in logs."""
    if len(value) > SECRET_CHARS_MAX or not value.isascii():
        raise RemoteProtocolError(f"{name} must be at most {SECRET_CHARS_MAX} ASCII characters; got {len(value)}")
    return value


def optional_identifier(name: str, value: str) -> str:
    return identifier(name, value) if value else ""


def text(name: str, value: str) -> str:
    """Words for a person: bounded, and on one line that any terminal can show. What somebody else wrote is printed
    beside what we say ourselves: it must neither steer the terminal nor look like a line of ours."""
    if len(value) > TEXT_CHARS_MAX:
        raise RemoteProtocolError(f"{name} must be at most {TEXT_CHARS_MAX} characters; got {len(value)}")
    if value.isprintable():
        return value
    return "".join(char if char.isprintable() else SHOWN.get(char, "\N{REPLACEMENT CHARACTER}") for char in value)


def cut(value: str) -> str:
    """Our own long texts (an exception's, say) are cut here rather than refused by the other side."""
    return value if len(value) <= TEXT_CHARS_MAX else value[: TEXT_CHARS_MAX - 1] + "…"


def choice(name: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise RemoteProtocolError(f"{name} must be one of {', '.join(choices)}; got {_shown(value)}")
    return value


def count(name: str, value: int, low: int = 0, high: int = COUNT_MAX) -> int:
    if not low <= value <= high:
        raise RemoteProtocolError(f"{name} must be from {low} to {high}; got {value}")
    return int(value)


def fragment(name: str, value: int) -> int:
    return count(name, value, high=FRAGMENTS_MAX - 1)


def slot(name: str, value: int) -> int:
    """An inner slot of inner state."""
    return count(name, value, high=INNER_SLOTS_MAX - 1)


def version(name: str, value: int) -> int:
    """-1 where there is none."""
    return count(name, value, low=NO_VERSION)


def length(name: str, actual: int, length_max: int) -> None:
    if actual > length_max:
        raise RemoteProtocolError(f"{name} must have at most {length_max} entries; got {actual}")


def raise_refusal(refusal: Refused | None) -> None:
    """What core says no to, as an error."""
    if refusal is not None:
        raise RefusedError(refusal.code, refusal.detail)


def _shown(value: str) -> str:
    return repr(value) if len(value) <= 80 else f"{len(value)} characters starting with {value[:80]!r}"
