"""What a learner's machine knows of the run, of its own place in it, and of its tokens.

The parts of the `LearnerMachine` work on this one object. Every token that was processed is, for each fragment, in
exactly one place: local, in a contribution, merged, or discarded for a cause. The syncer's ledger adds up only if the
learner reports all of them.
"""

from __future__ import annotations

import math

from atoll.core.config import SyncConfig
from atoll.core.effects import Closing, LearnerEffect, Note
from atoll.core.events import LearnerDiscarded
from atoll.core.messages import PROTOCOL_VERSION, Discard, DiscardCount, Progress
from atoll.core.progress import FragmentProgress, Total


class LearnerState:
    """Shared by the machine's parts. It holds facts and decides nothing."""

    def __init__(self, learner: str) -> None:
        self.learner = learner
        self.generation = 0
        self.config = SyncConfig()
        self.fragments: list[FragmentProgress] = []
        self.step = 0
        """The learner's place in the run: its own steps, counted from where the run was when it joined."""
        self.total = Total()
        self.step_ns = 0
        """What the last step took."""
        self.joined = False
        self.protocol = PROTOCOL_VERSION
        """What the session speaks."""
        self.secret = ""
        """What the session's pushes and fetches carry."""
        self.away: frozenset[int] = frozenset()
        """Fragments whose shard was away when the run last went on for this learner."""
        self.sharded = False
        """Shards serve the fragments: one of them may be away while the others are not."""
        self.linked = False
        """A session is open."""
        self.started = False
        """And the run goes on in it."""
        self.closing: Closing | None = None
        self._loss = math.nan
        self._discarded: dict[tuple[int, str], int] = {}
        self._told_discarded: tuple[DiscardCount, ...] = ()
        self._discards_new = False

    def stepped(self, tokens: int, step_ns: int, loss: float) -> None:
        """A step counts for every fragment: each is trained in every step, whenever it is merged."""
        self.step += 1
        self.total.steps += 1
        self.total.tokens += tokens
        self.step_ns, self._loss = step_ns, loss

    def correct_tokens(self, tokens: int) -> None:
        """For every fragment or for none: each of them counts all tokens."""
        if not tokens or any(p.local.steps == 0 or p.local.tokens + tokens < p.local.steps for p in self.fragments):
            return
        self.total.tokens += tokens

    def bases(self) -> tuple[int, ...]:
        return tuple([p.base for p in self.fragments])

    def discard(self, progress: FragmentProgress, tokens: int, cause: str, out: list[LearnerEffect]) -> None:
        """These tokens will never be merged."""
        if tokens:
            key = (progress.index, str(cause))
            self._discarded[key] = self._discarded.get(key, 0) + tokens
            self._discards_new = True
            out.append(Note(LearnerDiscarded(self.learner, progress.index, tokens, str(cause))))

    def discarded(self, fragment: int) -> int:
        return sum(n for (p, _), n in self._discarded.items() if p == fragment)

    def leave_to_earlier_run(self, progress: FragmentProgress) -> None:
        """What is neither local nor discarded was merged by the earlier run; its ledger is gone, ours adds up."""
        earlier = (progress.index, str(Discard.EARLIER_RUN))
        rest = self.total.tokens - progress.local.tokens - self.discarded(progress.index)
        self._discarded[earlier] = self._discarded.get(earlier, 0) + rest
        self._discards_new = True

    def report(self) -> Progress:
        """Where this learner is, for the syncer."""
        if self._discards_new:
            self._told_discarded = tuple(DiscardCount(f, c, n) for (f, c), n in sorted(self._discarded.items()))
            self._discards_new = False
        discarded = self._told_discarded
        pending: tuple[int, ...] = ()
        if self.protocol > 1:
            tokens = self.total.tokens  # of most fragments nothing is on its way
            pending = tuple([p.pending_tokens if p.outstanding else tokens - p.settled_tokens for p in self.fragments])
        total, bases = self.total, tuple([p.base for p in self.fragments])
        return Progress(self.step, total.steps, total.tokens, self.step_ns, self._loss, bases, discarded, pending)
