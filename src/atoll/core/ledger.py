"""The token ledger: processed = merged + pending + discarded(by cause), to the token, for every fragment.

One token trains every fragment, and each fragment merges on its own, so the identity holds per fragment. `totals` folds
the fragments into one line, apportioned by parameters with the largest-remainder rule, so that the line adds up too.

What the syncer knows of a learner's processed tokens is the newest progress report or, when a contribution overtakes
it, the least count that the contribution implies. Steps that a killed process took after its last report are unknown to
everybody and so are in no record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from atoll.core.messages import Discard, DiscardCount


@dataclass(slots=True)
class Spend:
    """What one generation of a learner has been seen to do, for the run's budget (`spending`)."""

    looked_ns: int = -1
    """When this was last worked out; -1: never."""
    steps: float = 0.0
    """Steps that the usual learner has taken since this one is here."""
    unasked: float = 0.0
    """Tokens of those."""
    shown: float = 0.0
    """Tokens that its contributions have shown, in windows that are over."""
    rate: float = 0.0
    """Tokens per usual step that the last window showed and that counted."""
    limit: float = 0.0
    """As many may be shown; 0: as many as anybody may."""
    window_steps: float = 0.0
    window_merged: int = -1
    """Where `steps` was when the window began, and what was merged; -1: none has begun."""
    merged_before: int = 0
    """What was merged before this syncer looked for the first time."""
    before: int = 0
    """What it had processed by the record that this syncer continues from."""
    with_past: bool = False
    """It was in the run before this syncer was."""
    past: int = -1
    """Tokens that it came with and that no record knows; -1: it has not said."""


@dataclass(slots=True)
class Account:
    """One learner generation: cumulative tokens processed, and per fragment merged, held and discarded tokens."""

    fragments: int
    processed: int = 0
    merged: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    """Tokens of contributions that the syncer has and has not merged yet."""
    discarded: list[dict[str, int]] = field(default_factory=list)
    excess: int = 0
    """Of the processed tokens, what its learner cannot have processed: claimed, and not counted for the budget."""
    spend: Spend = field(default_factory=Spend)

    def __post_init__(self) -> None:
        self.merged = [0] * self.fragments
        self.held = [0] * self.fragments
        self.discarded = [{} for _ in range(self.fragments)]

    def report(self, processed: int, discarded: Sequence[DiscardCount]) -> None:
        """Take a progress report; counts are cumulative and never go back."""
        if processed > self.processed:
            self.processed = processed
        for count in discarded:
            fragment_record = self.discarded[count.fragment]
            if count.tokens > fragment_record.get(count.cause, 0):
                fragment_record[count.cause] = count.tokens
                self._imply(count.fragment)

    def hold(self, fragment: int, tokens: int) -> None:
        self.held[fragment] += tokens
        self._imply(fragment)

    def merge(self, fragment: int, tokens: int) -> None:
        self.held[fragment] -= tokens
        self.merged[fragment] += tokens
        assert self.held[fragment] >= 0, "I3: more tokens were merged than were held"

    def release(self, fragment: int, tokens: int) -> None:
        """A held contribution was dropped: its tokens are the learner's again (or are lost with it)."""
        self.held[fragment] -= tokens
        assert self.held[fragment] >= 0, "I3: more tokens were dropped than were held"

    def rest(self, fragment: int) -> int:
        """Processed tokens that are neither merged, held by the syncer nor discarded: still with the learner."""
        known = self.merged[fragment] + self.held[fragment] + sum(self.discarded[fragment].values())
        return self.processed - known

    def _imply(self, fragment: int) -> None:
        self.processed -= min(0, self.rest(fragment))

    def balance(self, fragment: int, pending: int, merged: bool) -> None:
        """Of what is not known to be merged or discarded only `pending` is still with the learner or in the syncer's
        hands: the difference was merged by an earlier syncer, or was rolled back with it."""
        gap = self.rest(fragment) + self.held[fragment] - pending
        if gap > 0 and merged:
            self.merged[fragment] += gap
        elif gap > 0:
            fragment_record = self.discarded[fragment]
            fragment_record[Discard.ROLLED_BACK] = fragment_record.get(Discard.ROLLED_BACK, 0) + gap

    def restore(self, fragment: int, processed: int, merged: int, discarded: Mapping[str, int]) -> None:
        """Take one fragment's line from a durable record. What the syncer held died with it: the tokens are with the
        learner again. Raises ValueError for counts that are none: with them nothing would add up any more."""
        if any(type(tokens) is not int or tokens < 0 for tokens in (processed, merged, *discarded.values())):
            raise ValueError(f"token counts of fragment {fragment} that are no counts")
        self.processed = max(self.processed, processed)
        self.merged[fragment] += merged
        for cause, tokens in discarded.items():
            self.discarded[fragment][cause] = self.discarded[fragment].get(cause, 0) + tokens
        self._imply(fragment)


@dataclass(frozen=True, slots=True)
class Totals:
    processed: int
    merged: int
    pending: int
    discarded: dict[str, int]


class Ledger:
    """Accounts by (learner, generation), and the folded sums of generations that are over."""

    def __init__(self, parameters: Sequence[int]) -> None:
        self._parameters = list(parameters)
        self._accounts: dict[tuple[str, int], Account] = {}
        self._gone: set[tuple[str, int]] = set()
        self._retired: set[tuple[str, int]] = set()
        self._folded = Account(len(parameters))

    def account(self, learner: str, generation: int) -> Account:
        key = (learner, generation)
        if key not in self._accounts:
            self._accounts[key] = Account(len(self._parameters))
        return self._accounts[key]

    def set_gone(self, learner: str, generation: int, gone: bool) -> None:
        """A generation that is gone (lost or fenced) keeps only what the syncer holds; the rest counts as lost.
        A lost learner that comes back under the same generation brings its tokens back."""
        key = (learner, generation)
        if gone:
            self._gone.add(key)
        else:
            self._gone.discard(key)

    def hold(self, learner: str, generation: int, fragment: int, tokens: int) -> None:
        self.account(learner, generation).hold(fragment, tokens)

    def merge(self, learner: str, generation: int, fragment: int, tokens: int) -> None:
        self.account(learner, generation).merge(fragment, tokens)
        self._fold(learner, generation)

    def release(self, learner: str, generation: int, fragment: int, tokens: int, cause: str = "") -> None:
        """A held contribution was dropped. `cause` counts where its learner is gone for good and cannot say it."""
        account = self.account(learner, generation)
        account.release(fragment, tokens)
        if cause and (learner, generation) in self._retired:
            account.discarded[fragment][cause] = account.discarded[fragment].get(cause, 0) + tokens
        self._fold(learner, generation)

    def retire(self, learner: str, generation: int) -> None:
        """This generation can never come back: fold it into the sums as soon as the syncer holds nothing of it, so
        that memory does not grow with restarts."""
        self.account(learner, generation)
        self._gone.add((learner, generation))
        self._retired.add((learner, generation))
        self._fold(learner, generation)

    def _fold(self, learner: str, generation: int) -> None:
        key = (learner, generation)
        account = self._accounts[key]
        if key not in self._retired or any(account.held):
            return
        self._folded.processed += account.processed
        self._folded.excess += account.excess
        for fragment in range(len(self._parameters)):
            self._folded.merged[fragment] += account.merged[fragment]
            fragment_records = self._folded.discarded[fragment]
            for cause, tokens in account.discarded[fragment].items():
                fragment_records[cause] = fragment_records.get(cause, 0) + tokens
        del self._accounts[key]
        self._gone.discard(key)
        self._retired.discard(key)

    # ------------------------------------------------------------ what survives a restart of the syncer

    @property
    def gone_processed(self) -> int:
        """Tokens processed by all generations that can never come back."""
        return self._folded.processed + sum(self._accounts[key].processed for key in self._retired)

    def fragment_record(self, fragment: int) -> tuple[dict[str, Any], list[list[Any]]]:
        """One fragment's share of the books: the folded sums, and a line for every account that has anything.

        It is written together with the fragment's parameters, so each record is exact for its own version however old
        the other records are. What is lost is never written: it is what remains of the processed tokens."""
        folded = {"merged": self._folded.merged[fragment], "discarded": dict(self._folded.discarded[fragment])}
        lines = [
            [learner, generation, account.processed, account.merged[fragment], dict(account.discarded[fragment])]
            for (learner, generation), account in sorted(self._accounts.items())
            if account.processed or account.held[fragment]
        ]
        return folded, lines

    def restore_column(
        self, fragment: int, folded: Mapping[str, Any], lines: Iterable[Sequence[Any]], live: Set[tuple[str, int]]
    ) -> None:
        """Put a record back. `live` says which (learner, generation) may still come back or has something waiting to be
        merged; lines of any other are folded into the sums."""
        self._folded.restore(fragment, 0, int(folded["merged"]), folded["discarded"])
        for learner, generation, processed, merged, discarded in lines:
            if (learner, generation) in live:
                self.account(learner, generation).restore(fragment, processed, merged, discarded)
            else:
                self._folded.restore(fragment, 0, merged, discarded)

    def restore_gone(self, processed: int, excess: int = 0) -> None:
        """After all records: the tokens of the generations that are over (at least what the records imply), and those
        that did not count."""
        self._folded.excess = excess
        waiting = sum(self._accounts[key].processed for key in self._retired)
        self._folded.processed = max(self._folded.processed, processed - waiting)

    @property
    def excess(self) -> int:
        """Tokens that were claimed and cannot have been processed."""
        return self._folded.excess + sum(account.excess for account in self._accounts.values())

    @property
    def spent(self) -> int:
        """What counts of the processed tokens for the run's budget."""
        return self.processed - self.excess

    @property
    def processed(self) -> int:
        return self._folded.processed + sum(account.processed for account in self._accounts.values())

    def fragment_totals(self, fragment: int) -> Totals:
        """The exact line of one fragment."""
        merged = self._folded.merged[fragment]
        pending = 0
        discarded = dict(self._folded.discarded[fragment])
        discarded[Discard.LOST] = discarded.get(Discard.LOST, 0) + self._folded.rest(fragment)
        for key, account in self._accounts.items():
            merged += account.merged[fragment]
            pending += account.held[fragment]
            for cause, tokens in account.discarded[fragment].items():
                discarded[cause] = discarded.get(cause, 0) + tokens
            if key in self._gone:
                discarded[Discard.LOST] = discarded.get(Discard.LOST, 0) + account.rest(fragment)
            else:
                pending += account.rest(fragment)
        named = {str(cause): tokens for cause, tokens in sorted(discarded.items()) if tokens}
        return Totals(self.processed, merged, pending, named)

    def totals(self) -> Totals:
        """All fragments in one line that adds up to the token."""
        lines = [self.fragment_totals(fragment) for fragment in range(len(self._parameters))]
        sums: dict[str, int] = {"merged": 0, "pending": 0}
        for line, parameters in zip(lines, self._parameters, strict=True):
            sums["merged"] += line.merged * parameters
            sums["pending"] += line.pending * parameters
            for cause, tokens in line.discarded.items():
                sums[f"discarded {cause}"] = sums.get(f"discarded {cause}", 0) + tokens * parameters
        shares = apportion(sums, self.processed, sum(self._parameters))
        discarded = {name[10:]: tokens for name, tokens in shares.items() if name.startswith("discarded ") and tokens}
        return Totals(self.processed, shares["merged"], shares["pending"], discarded)


def apportion(columns: Mapping[str, int], total: int, divisor: int) -> dict[str, int]:
    """Divide each column by `divisor` so that the whole parts sum to `total` (largest remainder, ties by name)."""
    shares = {name: value // divisor for name, value in columns.items()} if divisor else dict.fromkeys(columns, 0)
    missing = total - sum(shares.values())
    by_remainder = sorted(columns, key=lambda name: (-(columns[name] % divisor) if divisor else 0, name))
    for name in by_remainder[: max(0, missing)]:
        shares[name] += 1
    return shares
