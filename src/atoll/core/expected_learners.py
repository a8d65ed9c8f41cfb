"""Too few learners have come for a round: say so, and after a while go on without the others."""

from __future__ import annotations

from atoll.core.config import SECOND_NS, parse_quorum
from atoll.core.effects import SyncerEffect
from atoll.core.syncer_state import SyncerState, warned

SHORT_SAY_NS = 10 * SECOND_NS
"""Too few learners for a round, for longer than it takes to start some: a person should know."""
SHORT_WAIT_NS = 60 * SECOND_NS
"""From then on those who are here go on without those who were expected (unless everybody's answer is asked for)."""


class ExpectedLearners:
    """A run that waits for learners that never come must say whom it waits for, and end the wait by itself."""

    def __init__(self, state: SyncerState) -> None:
        self._state = state
        self._short_ns = -1
        """Since when there are learners, but too few of those who are expected for a round; -1: there are enough."""
        self._said = 0

    def watch(self, now_ns: int, out: list[SyncerEffect]) -> None:
        book, config = self._state.book, self._state.config
        if not book.waits_for_expected():
            self._short_ns, self._said = -1, 0
            return
        self._short_ns = now_ns if self._short_ns < 0 else self._short_ns
        wake_ns = self.next_wake_ns()
        if wake_ns is None or now_ns < wake_ns:
            return
        text = (
            f"{self._state.membership.counted()} of {config.learners_expected} expected learners are here, and a round "
            f"needs {book.quorum()} (quorum {config.quorum}): nothing is merged yet"
        )
        self._said += 1
        share = parse_quorum(config.quorum)[1]
        if self._said == 2 and 0.0 < share < 1.0:
            book.waive_expected()
            text += "; the run goes on with those who are here, and takes the others in when they come"
        else:
            text += "; start the others, or a syncer that expects fewer (--learners, --quorum)"
        out.append(warned(text))

    def no_round_is_wanted(self) -> None:
        """There is no run to merge into: a wait that nobody looks after must not wake the syncer for ever."""
        self._short_ns = -1

    def next_wake_ns(self) -> int | None:
        if self._short_ns < 0 or self._said >= 2:
            return None
        return self._short_ns + (SHORT_WAIT_NS if self._said else SHORT_SAY_NS)
