"""What a checker is, and the group of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from atoll.instruments.check.facts import Fact

PROBLEMS_MAX = 100
"""Violations kept per checker: the first one tells the story, and a broken run may have millions."""


@dataclass(frozen=True, slots=True)
class Violation:
    invariant: str
    """I1 to I13."""
    text: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"


class Checker:
    """One invariant. A method `on_committed` is called with every `Committed` fact, and so on."""

    invariant = ""
    statement = ""
    """What must be true, in one line."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.group: Checkers | None = None

    def complain(self, text: str) -> None:
        if self.group is not None:
            self.group.broken = True
        if len(self.violations) < PROBLEMS_MAX:
            self.violations.append(Violation(self.invariant, text))

    def handlers(self) -> dict[str, Callable[[Any], None]]:
        """Fact name in lower case -> method."""
        return {name[3:]: getattr(self, name) for name in dir(self) if name.startswith("on_")}


class Checkers:
    """Feeds every fact to the checkers that want it."""

    def __init__(self, checkers: Iterable[Checker]) -> None:
        self.checkers = list(checkers)
        self.fed = 0
        self.broken = False
        """True once any of them has complained."""
        self._handlers: dict[str, list[Callable[[Any], None]]] = {}
        for checker in self.checkers:
            checker.group = self
            for name, method in checker.handlers().items():
                self._handlers.setdefault(name, []).append(method)
        self._by_type: dict[type, list[Callable[[Any], None]]] = {}

    def feed(self, fact: Fact) -> None:
        self.fed += 1
        kind = type(fact)
        handlers = self._by_type.get(kind)
        if handlers is None:
            handlers = self._by_type[kind] = self._handlers.get(kind.__name__.lower(), [])
        for handler in handlers:
            handler(fact)

    @property
    def violations(self) -> list[Violation]:
        return [violation for checker in self.checkers for violation in checker.violations]
