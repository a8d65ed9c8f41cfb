"""Who is silent, and for how long is that all right.

A learner says something every 2 s, whatever the length of its step. The longer it does not, the less it is counted on:

    QUIET_NS        rounds go on without it, if they can spare it
    lease_ns        it is away: rounds no longer wait for it
    lost_after_ns   after that it is lost: its unmerged tokens count as lost until it comes back

One that was there when the run began, and has answered nothing PROOF_NS after another did, is no longer counted on,
if there are enough others.
One that is heard but adopts nothing is deaf: its session is ended, so that it says hello again over a new connection.
"""

from __future__ import annotations

from enum import Enum, auto

from atoll.core.config import SECOND_NS
from atoll.core.membership import PROOF_NS, Member, MemberState
from atoll.core.seed_intake import SeedIntake
from atoll.core.syncer_state import SyncerState

SEED_SILENCE_NS = 600 * SECOND_NS
"""How long one fragment of the seed may take: 750 MB at 10 Mbit/s. A dead connection is noticed much earlier."""
QUIET_NS = 6 * SECOND_NS
"""One that has missed three of its reports is no longer counted on: a step that it reported long ago must not hold the
clock until its lease is over."""
DEAF_STEPS = 4
"""A learner adopts at step boundaries: one that takes this many of them past a published version does not hear."""
THIN_LINK_NS = 3200
"""What one parameter (fp32) takes at 10 Mbit/s: a learner that fetches everything whole adopts nothing for so long."""
THINNEST_LINK_NS = 2_000_000
"""The same at 16 kbit/s, below which a link is called dead: for the fragment that a learner is known to be fetching."""


class Silence(Enum):
    """What follows from a member's silence now."""

    NOTHING = auto()
    QUIET = auto()
    AWAY = auto()
    LOST = auto()
    UNPROVEN = auto()
    DEAF = auto()


class SilenceWatch:
    """To be away costs a learner nothing and frees the rounds. To be lost moves its tokens; that takes longer."""

    def __init__(self, state: SyncerState, seeding: SeedIntake) -> None:
        self._state = state
        self._seeding = seeding
        self._wake_ns = -1
        self._wake_at = -1

    def judge(self, member: Member, now_ns: int) -> Silence:
        """The gravest thing first: a member that is away is no longer quiet."""
        if self._on_lease(member) and now_ns - member.heard_ns >= self.lease_ns(member):
            return Silence.AWAY
        if self._may_be_quiet(member) and now_ns - member.heard_ns >= QUIET_NS:
            return Silence.QUIET
        proof_ns = self._proof_due_ns(member)
        if proof_ns is not None and now_ns >= proof_ns:
            return Silence.UNPROVEN
        if self._is_deaf(member, now_ns):
            return Silence.DEAF
        away = member.state is MemberState.AWAY
        return Silence.LOST if away and now_ns - member.away_ns >= self._state.config.lost_after_ns else Silence.NOTHING

    def next_wake_ns(self) -> int | None:
        """When the first member's time runs out, if nothing is heard. Whoever is heard meanwhile has more time, so this
        stays good (if early) until somebody's state changes or a Tick has looked at everybody."""
        membership = self._state.membership
        if self._wake_at != membership.stamp:
            self._wake_at = membership.stamp
            leased = [m.heard_ns + self._silence_ns(m) for m in membership.members.values() if self._on_lease(m)]
            away = [m.away_ns for m in membership.members.values() if m.state is MemberState.AWAY]
            lost = [away_ns + self._state.config.lost_after_ns for away_ns in away]
            proofs = [self._proof_due_ns(m) for m in membership.members.values()]
            self._wake_ns = min([*leased, *lost, *(due_ns for due_ns in proofs if due_ns is not None)], default=-1)
        return self._wake_ns if self._wake_ns >= 0 else None

    def look_again(self) -> None:
        """A Tick looks at everybody: what was worked out before is out of date."""
        self._wake_at = -1

    def lease_ns(self, member: Member) -> int:
        """A seeding learner is silent while one fragment of the first parameters is on a thin link."""
        return self._state.config.lease_ns if member.state is MemberState.ACTIVE else SEED_SILENCE_NS

    def _silence_ns(self, member: Member) -> int:
        """The next length of its silence that matters."""
        return QUIET_NS if self._may_be_quiet(member) else self.lease_ns(member)

    def _on_lease(self, member: Member) -> bool:
        """Silence matters for learners that rounds wait for, and for the one that gives the first parameters."""
        joining = member.state is MemberState.JOINING
        seeding = joining and member.learner == self._seeding.seeder and not self._state.committed
        return member.state is MemberState.ACTIVE or seeding

    def _may_be_quiet(self, member: Member) -> bool:
        """True if this member is set aside once it was silent for QUIET_NS."""
        counted = member.state is MemberState.ACTIVE and not member.aside
        return counted and self._state.config.lease_ns > QUIET_NS and self._state.book.spares_one()

    def _proof_due_ns(self, member: Member) -> int | None:
        """Until when a member that counts for the time being may take to answer a round; None: it has, or others have
        not either."""
        first_ns = self._state.membership.first_proof_ns
        waits = member.trial_ns >= 0 and not member.proven and first_ns >= 0
        return max(first_ns, member.trial_ns) + PROOF_NS if waits and member.state is MemberState.ACTIVE else None

    def _is_deaf(self, member: Member, now_ns: int) -> bool:
        """A learner that reports steps but has adopted nothing for long: what we send does not reach it."""
        if member.state is not MemberState.ACTIVE or not member.connected or not member.bases:
            return False
        tracks, layout = self._state.book.tracks, self._state.layout
        behind = bool([base for track, base in zip(tracks, member.bases, strict=True) if track.version > base])
        if not behind or not member.behind_ns:
            member.behind_ns, member.behind_steps = now_ns if behind else 0, member.steps
            return False
        assert layout is not None
        fetches = member.fetch_ns >= member.behind_ns  # it has heard of something, and may be long in getting it
        largest = max(fragment.parameters for fragment in layout.fragments)
        thin_ns = THIN_LINK_NS * layout.parameters + (THINNEST_LINK_NS * largest if fetches else 0)
        waited_ns, steps = now_ns - max(member.behind_ns, member.fetch_ns), member.steps - member.behind_steps
        return waited_ns >= self._state.config.lost_after_ns + thin_ns and steps >= DEAF_STEPS
