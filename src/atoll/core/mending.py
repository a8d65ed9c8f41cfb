"""A shard is back without what was published: learners bring just that, while every other fragment goes on.

Unlike after a restart (core.healing) nothing is in doubt: the syncer knows which version is the newest, and its
checksum. So the first learner that says it has adopted it is asked for it, whole. Momentum is what the disk has.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.core.config import SECOND_NS
from atoll.core.healing import HEAL_PUSH_NS
from atoll.core.membership import Member, MemberState
from atoll.core.rounds import FragmentTrack

MEND_WAIT_NS = 20 * SECOND_NS
"""How long a version may be held by nobody who is there: learners that lost their link come back within ten seconds."""


class Mending:
    """Which fragments are wanted, and who was asked for each."""

    def __init__(self) -> None:
        self._wanted: dict[int, int] = {}
        """By fragment: since when."""
        self._asked: dict[int, tuple[str, int]] = {}
        """By fragment: whom, and when."""
        self._passed_over: dict[int, set[str]] = {}
        """By fragment: who was asked and did not deliver."""

    @property
    def fragments(self) -> frozenset[int]:
        return frozenset(self._wanted)

    def want(self, fragment: int, now_ns: int) -> None:
        self._wanted[fragment] = now_ns
        self._asked.pop(fragment, None)
        self._passed_over.pop(fragment, None)

    def done(self, fragment: int) -> bool:
        """This fragment is in place, or wanted no more; False if it was not wanted."""
        self._asked.pop(fragment, None)
        self._passed_over.pop(fragment, None)
        return self._wanted.pop(fragment, None) is not None

    def is_asked(self, fragment: int, learner: str) -> bool:
        return self._asked.get(fragment, ("", 0))[0] == learner

    def giver(self, fragment: int) -> str:
        return self._asked.get(fragment, ("", 0))[0]

    def reject(self, fragment: int, learner: str) -> None:
        """What it gave cannot be used, or it is gone."""
        if self.is_asked(fragment, learner):
            del self._asked[fragment]
            self._passed_over.setdefault(fragment, set()).add(learner)

    def gone(self, learner: str) -> None:
        for fragment in [f for f, (name, _) in self._asked.items() if name == learner]:
            del self._asked[fragment]

    def ask(self, tracks: Sequence[FragmentTrack], members: Sequence[Member], now_ns: int) -> dict[int, Member]:
        """Whom to ask for what now."""
        for fragment, (learner, since_ns) in list(self._asked.items()):
            if now_ns - since_ns >= HEAL_PUSH_NS:
                self.reject(fragment, learner)
        chosen = {}
        for fragment in self._wanted.keys() - self._asked.keys():
            for member in members:
                if self._can_give(member, tracks[fragment]):
                    chosen[fragment] = member
                    self._asked[fragment] = (member.learner, now_ns)
                    break
        return chosen

    def _can_give(self, member: Member, track: FragmentTrack) -> bool:
        holds = len(member.bases) > track.index and member.bases[track.index] == track.version
        return (
            member.state is MemberState.ACTIVE
            and holds
            and member.learner not in self._passed_over.get(track.index, ())
        )

    def in_vain(self, now_ns: int) -> bool:
        """True if something is wanted that nobody who is there has held for long."""
        return any(now_ns - since_ns >= MEND_WAIT_NS for f, since_ns in self._wanted.items() if f not in self._asked)

    def next_wake_ns(self) -> int | None:
        late = [since_ns + HEAL_PUSH_NS for _, since_ns in self._asked.values()]
        return min(late, default=None)
