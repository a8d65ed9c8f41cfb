"""Who is in the run, under which generation, and in which state.

States and what moves between them:

    joining --Ready--> active --silence or link loss--> away --lost_after--> lost
       ^                 ^  \\                            |                    |
       |                 |   +--------Leave-----> left    +---same instance----+--> active again
       +--- a new instance of the same id always starts here, with the next generation, and fences the old one

Liveness is by anything heard, not by one timer (reliability lesson 2). `away` only means that rounds no longer wait;
what the learner has already contributed stays valid until a newer instance fences it.

An active member may be *set aside*: it is connected and asked, but rounds neither wait for it nor count it, because it
does not answer them or is silent for longer than its heartbeat. What it sends is merged all the same.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.core.messages import PROTOCOL_OLDEST

MERGED_KEPT = 4
"""Merged contributions remembered per learner and fragment, to tell their fate to one that was away: a learner never
has more than two in the air."""
CLAIMED_MAX = 2**40
"""A generation that a learner may claim to have been given. Nobody restarts that often, and from here on the syncer can
count up for ever without leaving the wire's range."""
MEMBERS_MAX = 100_000
"""Learner ids remembered, present or gone."""


class MemberState(StrEnum):
    """A member is away when nothing is heard of it, and lost after a while; from both it comes back. Who has left does
    not."""

    JOINING = "joining"
    ACTIVE = "active"
    AWAY = "away"
    LOST = "lost"
    LEFT = "left"


@dataclass(slots=True)
class Member:
    """One learner id, with what its newest generation has told us."""

    learner: str
    generation: int
    instance: str
    session: int
    state: MemberState
    heard_ns: int
    away_ns: int = 0
    behind_ns: int = 0
    """Since when there is a published version that it has not adopted, while it adopts nothing; 0: there is none."""
    behind_steps: int = 0
    """Its steps then."""
    fetch_ns: int = -1
    """When it last began to fetch a version."""
    joined_ns: int = 0
    step: int = 0
    steps: int = 0
    tokens: int = 0
    step_ns: float = 0.0
    loss: float = math.nan
    bases: tuple[int, ...] = ()
    upcoming: tuple[int, ...] = ()
    seq_seen: list[int] = field(default_factory=list)
    """Highest contribution number accepted, per fragment: lower or equal ones are duplicates."""
    merged: list[list[tuple[int, int]]] = field(default_factory=list)
    """(seq, version) of the last merged contributions, per fragment."""
    aside: str = ""
    """Why rounds neither wait for it nor count it although it is active; empty: they do."""
    quiet: bool = False
    """It is set aside only because nothing was heard of it for a while."""
    missed: int = 0
    """Rounds that others' contributions have closed since it last answered one."""
    dismissed: str = ""
    """Why it was asked to leave, alone; said again when it comes back."""
    protocol: int = PROTOCOL_OLDEST
    """What its session speaks."""
    rank: int = -1
    """Its number among the learners (see `ranks`); -1 before it has one."""
    wants_inner: bool = False
    """It joined without inner optimizer state and has not been given any yet."""
    recovered: bool = False
    """Known from the durable record only: the syncer restarted and this learner has not come back yet."""
    unbalanced: bool = False
    """Back after a restart of the syncer, and its counters have not been compared with the record yet."""

    @property
    def connected(self) -> bool:
        return self.session >= 0


class Membership:
    """The table of members. Every method is a plain state change; the machine decides what to tell whom."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._by_session: dict[int, str] = {}
        self.joined_max = 0
        """The most learners that were active at once."""
        self.generations_skipped = 0
        """After a restart of the syncer: generations left out for a process that the record does not know, because a
        disk that failed may have missed some that were given, and a generation must never be given twice."""
        self.stamp = 0
        """Grows whenever somebody's state changes; what was worked out before is then out of date."""
        self._known_at = -1
        self._active: list[Member] = []
        self._counted = 0
        self._states: frozenset[MemberState] = frozenset()
        self._steps: list[int] = []
        self._paces: list[float] = []

    # ------------------------------------------------------------ questions that every message raises

    def _look(self) -> None:
        """Work out anew what depends on who is in which state. In between, steps are kept sorted as they change, so
        that a progress report costs the same whether there are four learners or thousands."""
        if self._known_at == self.stamp:
            return
        self._known_at = self.stamp
        self._active = [m for _, m in sorted(self.members.items()) if m.state is MemberState.ACTIVE]
        self._states = frozenset(m.state for m in self.members.values())
        counted = [m for m in self._active if not m.aside]
        self._counted = len(counted)
        self._steps = sorted(m.step for m in counted)
        self._paces = sorted(m.step_ns for m in counted if m.step_ns > 0)

    def active(self) -> list[Member]:
        """Active members in learner-id order."""
        self._look()
        return self._active

    def states(self) -> frozenset[MemberState]:
        """The states that there are."""
        self._look()
        return self._states

    def counted(self) -> int:
        """How many rounds count on: the active members less those that are set aside."""
        self._look()
        return self._counted

    def counted_steps(self) -> list[int]:
        """The steps of those members, smallest first."""
        self._look()
        return self._steps

    def counted_paces(self) -> list[float]:
        """The step times of those of them that have one, shortest first."""
        self._look()
        return self._paces

    def mark(self, member: Member, state: MemberState) -> None:
        """Whoever is not active is not set aside either: it begins anew when it is back."""
        member.state = state
        if state is not MemberState.ACTIVE:
            member.aside, member.quiet, member.missed = "", False, 0
        self.stamp += 1

    def set_aside(self, member: Member, reason: str, *, quiet: bool = False) -> None:
        """Count on this member no longer, or (without a reason) again."""
        member.aside, member.quiet = reason, quiet
        self.stamp += 1

    def moved(self, member: Member, step: int, step_ns: float) -> None:
        """A member is at another step, and its steps take so long."""
        if self._known_at == self.stamp and member.state is MemberState.ACTIVE and not member.aside:
            if step != member.step:
                del self._steps[bisect_left(self._steps, member.step)]
                insort(self._steps, step)
            if step_ns != member.step_ns:
                if member.step_ns > 0:
                    del self._paces[bisect_left(self._paces, member.step_ns)]
                if step_ns > 0:
                    insort(self._paces, step_ns)
        member.step, member.step_ns = step, step_ns

    # ------------------------------------------------------------ changes

    def by_session(self, session: int) -> Member | None:
        learner = self._by_session.get(session)
        return self.members[learner] if learner is not None else None

    def admit(
        self, learner: str, instance: str, session: int, now_ns: int, fragments: int, claimed: int = 0
    ) -> tuple[Member, Member | None]:
        """Take a learner in. Returns its member and, if a newer instance took over, the member that is fenced out.
        `claimed` is the generation that this process was given earlier in this run: a syncer whose record is older
        than that believes it."""
        old = self.members.get(learner)
        # A record that knows the generation only from a record does not know the process: it says so itself.
        same = old is not None and (old.instance == instance or (not old.instance and claimed == old.generation))
        if old is not None and same and old.state is not MemberState.LEFT:
            old.instance = instance
            self._by_session.pop(old.session, None)
            old.session, old.heard_ns = session, now_ns
            self.mark(old, MemberState.JOINING)
            old.upcoming = ()
            if len(old.seq_seen) != fragments:  # it was here before the run had a layout, with another model
                old.seq_seen, old.merged, old.bases = [-1] * fragments, [[] for _ in range(fragments)], ()
            self._by_session[session] = learner
            return old, None
        generation = (old.generation if old is not None else 0) + 1
        if old is None or old.recovered:
            generation += self.generations_skipped
        generation = max(generation, claimed)
        if old is not None:
            self._by_session.pop(old.session, None)
        member = Member(learner, generation, instance, session, MemberState.JOINING, now_ns)
        member.seq_seen = [-1] * fragments
        member.merged = [[] for _ in range(fragments)]
        self.members[learner] = member
        self._by_session[session] = learner
        self.stamp += 1
        return member, old

    def prune(self) -> list[Member]:
        """Forget the longest gone once there are very many, so that memory does not grow with the number of ids.
        Returns who was forgotten."""
        if len(self.members) <= MEMBERS_MAX:
            return []
        gone = [m for m in self.members.values() if m.state in (MemberState.LEFT, MemberState.LOST)]
        forgotten = sorted(gone, key=lambda m: m.heard_ns)[: len(self.members) - MEMBERS_MAX]
        for member in forgotten:
            del self.members[member.learner]
        self.stamp += 1
        return forgotten

    def activate(self, member: Member, now_ns: int) -> None:
        self.mark(member, MemberState.ACTIVE)
        member.joined_ns = now_ns
        self.joined_max = max(self.joined_max, len(self.active()))

    def disconnect(self, session: int, now_ns: int) -> Member | None:
        """A session is over. Its member is away, unless it had left."""
        learner = self._by_session.pop(session, None)
        if learner is None:
            return None
        member = self.members[learner]
        member.session = -1
        if member.state in (MemberState.ACTIVE, MemberState.JOINING):
            self.mark(member, MemberState.AWAY)
            member.away_ns = now_ns
        return member

    def connected(self) -> list[Member]:
        return [m for _, m in sorted(self.members.items()) if m.connected]
