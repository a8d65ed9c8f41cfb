"""Who does not deliver: learners that rounds go on without, until they answer again.

A learner that was asked and did not answer has missed a round. One that has missed those of several periods is set
aside: it is asked all the same, but nobody waits for it nor counts it, and what it sends late is merged when it comes.
"""

from __future__ import annotations

from collections.abc import Iterator

from atoll.core.config import SyncConfig
from atoll.core.effects import Note, SyncerEffect
from atoll.core.events import MemberAside
from atoll.core.membership import Member, Membership, MemberState
from atoll.core.policy import rounds_missed_max
from atoll.core.rounds import FragmentTrack, Round


class DeliveryWatch:
    """Watches answers, not links: a learner that steps and reports and never answers looks healthy otherwise."""

    def __init__(self, config: SyncConfig, membership: Membership) -> None:
        self._config = config
        self._membership = membership

    def missed(self, track: FragmentTrack, opened: Round) -> Iterator[tuple[Member, str]]:
        """Others have closed this round: whoever was asked and did not answer has missed it. Yields, one by one because
        each changes what rounds count on, those who are to be set aside, and why."""
        answered = opened.contributors() | (opened.nothing - opened.unusable)
        for learner in opened.asked:
            member = self._membership.members.get(learner)
            if member is None or member.state is not MemberState.ACTIVE or learner in answered:
                continue
            member.missed += 1
            track.missed[learner] = track.missed.get(learner, 0) + 1
            if member.missed >= rounds_missed_max(self._config) and (not member.aside or member.quiet):
                what = "brought only what was too old" if learner in opened.unusable else "answered none"
                yield member, f"{what} in the last {member.missed} rounds"

    def answered(self, learner: str, late: bool, fresh: bool, out: list[SyncerEffect]) -> None:
        """A learner's answer is of use: it enters a merge, or there is nothing to give. One that was set aside is
        counted again when it answers in time, or late but no more seldom than those do who are not set aside; and with
        something that is not too old."""
        member = self._membership.members.get(learner)
        if member is None or member.state is not MemberState.ACTIVE:
            return
        soon = not late or member.missed < rounds_missed_max(self._config)
        member.missed = 0
        if member.aside and soon and fresh:
            self.take_in(member, "answers again", out)

    def set_aside(self, member: Member, reason: str, out: list[SyncerEffect], *, quiet: bool) -> None:
        """Rounds no longer wait for this member nor count it."""
        self._membership.set_aside(member, reason, quiet=quiet)
        out.append(_aside(member, True, reason))

    def take_in(self, member: Member, reason: str, out: list[SyncerEffect]) -> None:
        """Rounds count on this member again."""
        self._membership.set_aside(member, "")
        out.append(_aside(member, False, reason))

    def take_all_in(self, reason: str, out: list[SyncerEffect]) -> None:
        for member in [m for m in self._membership.active() if m.aside]:
            self.take_in(member, reason, out)


def _aside(member: Member, aside: bool, reason: str) -> Note:
    return Note(MemberAside(member.learner, member.generation, aside, reason))
