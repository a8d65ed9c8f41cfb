from __future__ import annotations

from atoll.instruments.check.facts import Books, Processed, Rested
from atoll.instruments.check.lineage import FollowsLines


class LedgerAddsUp(FollowsLines):
    """I3. The identity holds at every look; what is processed lies between what learners reported and what they did;
    and at rest the merged tokens are those of the contributions inside the parameters."""

    invariant = "I3"
    statement = "processed = merged + pending + discarded, to the token, after every fault"

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, Books] = {}

    def on_books(self, fact: Books) -> None:
        self._lines[fact.fragment] = fact
        parts = fact.merged + fact.pending + sum(fact.discarded.values())
        if parts != fact.processed:
            self.complain(f"fragment {fact.fragment}: {fact.processed} tokens processed, {parts} accounted for: {fact}")
        if min(fact.merged, fact.pending, 0, *fact.discarded.values()) < 0:
            self.complain(f"fragment {fact.fragment}: a negative number of tokens: {fact}")

    def on_processed(self, fact: Processed) -> None:
        for line in self._lines.values():
            if not fact.known <= line.processed <= fact.total:
                self.complain(
                    f"fragment {line.fragment}: the ledger knows of {line.processed} processed tokens; learners did "
                    f"{fact.total}, of which {fact.known} were reported"
                )
                return

    def on_rested(self, fact: Rested) -> None:
        for fragment, line in sorted(self._lines.items()):
            inside = sum(version.tokens for version in self.lineages[fragment].line())
            if fact.whole and line.merged != inside:
                self.complain(f"fragment {fragment}: {inside} tokens are in the parameters, merged says {line.merged}")
            if line.pending:
                self.complain(f"fragment {fragment}: {line.pending} tokens are pending with nobody left to merge them")
