"""Nothing is merged, and somebody is the cause: say who is waited for, and when it is over.

Whether a run may leave somebody out is the operator's word: with quorum=all, quorum=N or in a synchronous run one
learner can hold everybody. That it does must not be a secret.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.core.config import SECOND_NS
from atoll.core.effects import SyncerEffect
from atoll.core.membership import MemberState
from atoll.core.syncer_state import SyncerState, warned

STALL_SAY_NS = 20 * SECOND_NS
"""Longer than a lease and than most transfers, and far below the 120 s after which a round is given up."""
LOOK_NS = SECOND_NS
"""Every message asks; nobody reads faster."""
NAMED_MAX = 10
SAID_MAX = 10
"""Sentences about one stall, however often those who are waited for change."""


class MergeWatch:
    def __init__(self, state: SyncerState) -> None:
        self._state = state
        self._look_ns = -1
        self._since_ns = -1
        """Since when nothing is merged and somebody is waited for; -1: nobody is."""
        self._seen: tuple[int, int] = (-1, -1)
        self._said = 0
        self.text = ""
        """What holds the run up now, once it was said."""

    def watch(self, now_ns: int, out: list[SyncerEffect]) -> None:
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + LOOK_NS
        why, mark = self._why()
        seen = (self._state.book.commits, mark)
        if not why or seen != self._seen or self._since_ns < 0:
            if self.text and (not why or seen[0] != self._seen[0]):
                waited_s = (now_ns - self._since_ns) / 1e9
                out.append(warned(f"rounds go on, after {waited_s:.0f} s in which nothing was merged"))
            self.text = ""
            self._seen, self._since_ns, self._said = seen, now_ns if why else -1, 0
        elif now_ns >= self._since_ns + self._say_ns() and why != self.text and self._said < SAID_MAX:
            self._said, self.text = self._said + 1, why
            out.append(warned(why))

    def no_round_is_wanted(self) -> None:
        """There is no run to merge into, or it ends."""
        self._since_ns, self.text = -1, ""

    def next_wake_ns(self) -> int | None:
        waits = self._since_ns >= 0 and not self._said
        return max(self._look_ns, self._since_ns + self._say_ns()) if waits else None

    def _say_ns(self) -> int:
        return self._state.book.at_least_usual_ns(STALL_SAY_NS)

    def _why(self) -> tuple[str, int]:
        """What keeps rounds from closing, in words, and a number that changes when something moves after all."""
        book, membership, config = self._state.book, self._state.membership, self._state.config
        if waiting := book.unanswered():
            return self._sentence("a round waits for the answers of", waiting), 0
        counted, quorum = membership.counted(), book.quorum()
        if counted < quorum:
            if book.waits_for_expected() or not counted:
                return "", 0  # others say so
            gone = [m.learner for m in membership.members.values() if m.state in (MemberState.AWAY, MemberState.LOST)]
            here = f"{counted} learners are here and a round needs {quorum} (quorum {config.quorum}); away:"
            return self._sentence(here, sorted(gone)), 0
        return self._sentence("rounds wait for the steps of", book.behind()), book.clock_last

    def _sentence(self, what: str, learners: Sequence[str]) -> str:
        if not learners:
            return ""
        more = f" and {len(learners) - NAMED_MAX} more" if len(learners) > NAMED_MAX else ""
        return (
            f"nothing is merged: {what} {', '.join(learners[:NAMED_MAX])}{more}. See their logs and links; `atoll "
            "leave` takes one out, and a syncer started again with --quorum 50% goes on without those who do not answer"
        )
