"""What was looked at and what came of it: one verdict for each clause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from atoll.instruments.conform.clauses import Clause


class Keeping(StrEnum):
    KEPT = "kept"
    BROKEN = "not kept"
    UNTRIED = "not tried"


@dataclass(slots=True)
class ClauseFinding:
    """What is known of one clause so far."""

    clause: Clause
    verdict: Keeping = Keeping.UNTRIED
    detail: str = ""
    """Why it is not kept: the first thing that was seen. Or why it was not tried."""

    def to_dict(self) -> dict[str, str]:
        clause = self.clause
        return {
            "clause": clause.name,
            "section": clause.section,
            "text": clause.text,
            "verdict": self.verdict,
            "detail": self.detail,
        }


@dataclass(slots=True)
class Report:
    """Every clause of one side of the contract. A clause that was broken once stays broken."""

    clauses: Mapping[str, Clause]
    heard: Callable[[ClauseFinding], None] = lambda _finding: None
    """Told of each clause when its verdict changes."""
    findings: dict[str, ClauseFinding] = field(init=False)

    def __post_init__(self) -> None:
        self.findings = {name: ClauseFinding(clause) for name, clause in self.clauses.items()}

    def kept(self, name: str) -> None:
        self._tell(name, Keeping.KEPT, "")

    def broken(self, name: str, detail: str) -> None:
        self._tell(name, Keeping.BROKEN, detail)

    def check(self, name: str, truth: object, detail: str) -> bool:
        """One look at a clause; `detail` says what was seen instead."""
        if truth:
            self.kept(name)
        else:
            self.broken(name, detail)
        return bool(truth)

    def untried(self, name: str, why: str) -> None:
        finding = self.findings[name]
        if finding.verdict is Keeping.UNTRIED:
            finding.detail = finding.detail or why

    def _tell(self, name: str, verdict: Keeping, detail: str) -> None:
        finding = self.findings[name]
        if finding.verdict in (Keeping.BROKEN, verdict):
            return
        finding.verdict, finding.detail = verdict, detail
        self.heard(finding)

    def count(self, verdict: Keeping) -> int:
        return sum(finding.verdict is verdict for finding in self.findings.values())

    @property
    def conforms(self) -> bool:
        """True if something was looked at and nothing was found broken."""
        return self.count(Keeping.BROKEN) == 0 and self.count(Keeping.KEPT) > 0

    def to_dict(self) -> dict[str, Any]:
        counts = {verdict.name.lower(): self.count(verdict) for verdict in Keeping}
        return {"conforms": self.conforms, **counts, "clauses": [f.to_dict() for f in self.findings.values()]}
