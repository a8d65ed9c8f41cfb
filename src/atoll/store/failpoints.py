"""Places where this room can be made to die or to meet a broken disk.

`hit(name)` stands before every write, sync, rename and header flip. It does nothing until somebody installs what shall
happen there: tests and storms do (`atoll.instruments.chaos.failpoints`, which lists the names), the product never does.

Points that end in "mid" write the first half of their bytes before they are hit, which is how torn writes are made.
"""

from __future__ import annotations

from typing import Protocol


class Failpoints(Protocol):
    """What happens at the points."""

    def hit(self, name: str) -> None:
        """Die, raise OSError, or do nothing."""

    def armed(self, name: str) -> bool:
        """Whether anything may happen there, so that a write has to be done in two halves."""


_installed: Failpoints | None = None


def install(failpoints: Failpoints | None) -> Failpoints | None:
    """Put these in place of those that were there, which are returned; None: nothing happens anywhere."""
    global _installed
    before, _installed = _installed, failpoints
    return before


def hit(name: str) -> None:
    """Die or raise here if somebody wants it so."""
    if _installed is not None:
        _installed.hit(name)


def armed(name: str) -> bool:
    """Whether anything may happen here."""
    return _installed is not None and _installed.armed(name)
