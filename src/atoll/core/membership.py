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

Rounds count on those that are not set aside and have *proven* themselves: a contribution of theirs was once accepted.
Ids are free, and a hundred of them that never answer must raise no quorum and hold no clock. When a run begins nobody
has proven anything: those who are there then count until PROOF_NS after the first of them has. So do the others where
too few have.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.core.config import SECOND_NS
from atoll.core.messages import PROTOCOL_OLDEST

MERGED_KEPT = 4
"""Merged contributions remembered per learner and fragment, to tell their fate to one that was away: a learner never
has more than two in the air."""
CLAIMED_MAX = 2**40
"""A generation that a learner may claim to have been given. Nobody restarts that often, and from here on the syncer can
count up for ever without leaving the wire's range."""
PROOF_NS = 30 * SECOND_NS
"""How long those who were there at the beginning may take for their first contribution once somebody's has come. Later
ones count from theirs on."""
MEMBERS_MAX = 100_000
"""Learner ids remembered, present or gone, of a model of few fragments."""
MEMBER_FRAGMENTS_MAX = 4_000_000
"""And times the run's fragments: each member has some hundred bytes for each."""
MEMBERS_MIN = 1000
"""Whatever the fragments, so many."""


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
    """As it says."""
    step_counted: int = 0
    """Of that, what it can have reached: the clock goes by this."""
    credit: float = 0.0
    """Steps beyond that which the time that has passed allows for."""
    credit_ns: int = 0
    """When that was worked out."""
    newcomer: bool = True
    """It came without a past: it begins at the step that it was told."""
    start_step: int = -1
    """The step that it was last told; -1: none."""
    steps_before: int = -1
    """Its step less its own steps, which never changes while its process lives; -1: not known yet."""
    launch_step: int = 0
    """Where it was, as far as that counts, when the last round was launched."""
    moved_far: bool = False
    """It has gone far since then."""
    proven: bool = False
    """A contribution under its id was accepted in this run."""
    trial_ns: int = -1
    """Since when it counts without having proven anything, because nobody had or too few; -1: it does not."""
    size_confirmed: float = 0.0
    """Tokens per step that count because it has shown them for long enough; see `sizes`."""
    size_seen: float = math.inf
    """The least that it has claimed since that was last looked at."""
    size_merges: int = 0
    """Contributions of it that were merged since then."""
    reports: float = 0.0
    """How many reports on data it may send now."""
    reports_ns: int = -(10**12)
    steps: int = 0
    tokens: int = 0
    step_ns: float = 0.0
    loss: float = math.nan
    bases: tuple[int, ...] = ()
    upcoming: tuple[int, ...] = ()
    seq_seen: list[int] = field(default_factory=list)
    """Highest contribution number accepted, per fragment: lower or equal ones are duplicates."""
    given: dict[int, int] = field(default_factory=dict)
    """By fragment, the run's round for which it made its last contribution that this syncer has seen."""
    merged: list[list[tuple[int, int]]] = field(default_factory=list)
    """(seq, version) of the last merged contributions, per fragment."""
    aside: str = ""
    """Why rounds neither wait for it nor count it although it is active; empty: they do."""
    quiet: bool = False
    """It is set aside only because nothing was heard of it for a while."""
    doubt: float = 0.0
    """How often of late it was left out of a merge (`agreement`)."""
    missed: int = 0
    """Rounds that others' contributions have closed since it last answered one."""
    dismissed: str = ""
    """Why it was asked to leave, alone; said again when it comes back."""
    protocol: int = PROTOCOL_OLDEST
    """What its session speaks."""
    codec_up: str = ""
    """What its Welcome said of its contributions: the run's codec, or one that its build knows."""
    codecs: frozenset[str] = frozenset()
    """What its build knows, without parameters; empty: it is older than this list, or is not heard of yet."""
    any_update: bool = False
    """It reads updates in other codecs than the run's (`Hello.any_update`)."""
    secret: str = field(default="", repr=False)
    """What its pushes and fetches must carry; empty: nothing, because its session's protocol is older."""
    revoked: str = ""
    """Why nothing more is taken from it or given to it."""
    tokens_per_step_declared: int = 0
    """With its key, by the operator; 0: not declared."""
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
        self._ids: list[str] = []
        """Of the members, in order: a thousand that join at once must not have them sorted a thousand times."""
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
        self._counted: frozenset[str] = frozenset()
        self._proven = 0
        self._moved_far = 0
        self.far_steps = 1
        """From how many steps since the last launch on a member has gone far."""
        self.first_proof_ns = -1
        """When the first contribution of all was accepted; -1: none was."""
        self._states: frozenset[MemberState] = frozenset()
        self._steps: list[int] = []
        self._paces: list[float] = []

    # ------------------------------------------------------------ questions that every message raises

    def _look(self) -> None:
        """Work out anew what depends on who is in which state. In between, steps are kept sorted as they change, so
        that a progress report costs the same whether there are four learners or thousands. Whoever asks looks at the
        stamp first: every message asks several times."""
        self._known_at = self.stamp
        if len(self._ids) != len(self.members):
            self._ids = sorted(self.members)
        self._active = [m for m in map(self.members.__getitem__, self._ids) if m.state is MemberState.ACTIVE]
        self._states = frozenset(m.state for m in self.members.values())
        present = [m for m in self._active if not m.aside]
        counted = [m for m in present if m.proven or m.trial_ns >= 0] or present
        self._counted = frozenset(m.learner for m in counted)
        self._steps = sorted(m.step_counted for m in counted)
        self._paces = sorted(m.step_ns for m in counted if m.step_ns > 0)
        self._proven = sum(m.proven for m in self._active)
        self._moved_far = sum(m.moved_far for m in self._active if m.proven or m.learner in self._counted)

    def active(self) -> list[Member]:
        """Active members in learner-id order."""
        if self._known_at != self.stamp:
            self._look()
        return self._active

    def states(self) -> frozenset[MemberState]:
        """The states that there are."""
        if self._known_at != self.stamp:
            self._look()
        return self._states

    def counted(self) -> int:
        """How many rounds count on."""
        if self._known_at != self.stamp:
            self._look()
        return len(self._counted)

    def counts(self, learner: str) -> bool:
        """True if rounds count on this member."""
        if self._known_at != self.stamp:
            self._look()
        return learner in self._counted

    def proven(self) -> int:
        """How many of the active members have answered a round."""
        if self._known_at != self.stamp:
            self._look()
        return self._proven

    def moved_far(self) -> int:
        """How many have gone far since the last round was launched: of those, and of those who once answered and were
        set aside."""
        if self._known_at != self.stamp:
            self._look()
        return self._moved_far

    def counted_steps(self) -> list[int]:
        """The steps of those members, smallest first."""
        if self._known_at != self.stamp:
            self._look()
        return self._steps

    def counted_paces(self) -> list[float]:
        """The step times of those of them that have one, shortest first."""
        if self._known_at != self.stamp:
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

    def moved(self, member: Member, step: int, counted: int, step_ns: float) -> None:
        """A member is at another step, of which so much counts, and its steps take so long."""
        far = counted - member.launch_step >= self.far_steps
        known = self._known_at == self.stamp and member.state is MemberState.ACTIVE
        if known and (member.proven or member.learner in self._counted):
            self._moved_far += far - member.moved_far
        if known and member.learner in self._counted:
            if counted != member.step_counted:
                del self._steps[bisect_left(self._steps, member.step_counted)]
                insort(self._steps, counted)
            if step_ns != member.step_ns:
                if member.step_ns > 0:
                    del self._paces[bisect_left(self._paces, member.step_ns)]
                if step_ns > 0:
                    insort(self._paces, step_ns)
        member.step, member.step_counted, member.step_ns, member.moved_far = step, counted, step_ns, far

    def launched(self, far_steps: int) -> None:
        """A round was launched: from here on it is watched who goes far."""
        self.far_steps, self._moved_far = far_steps, 0
        for member in self.active():
            member.launch_step, member.moved_far = member.step_counted, False

    def prove(self, member: Member, now_ns: int) -> None:
        """A contribution of this member was accepted."""
        if not member.proven:
            member.proven = True
            self.first_proof_ns = now_ns if self.first_proof_ns < 0 else self.first_proof_ns
            self.stamp += 1

    def begin_patience(self, now_ns: int) -> None:
        """Too few have proven themselves: the others count as well, for a while."""
        for member in self.active():
            if not member.proven and member.trial_ns < 0:
                member.trial_ns = now_ns
                self.stamp += 1

    def end_patience(self, member: Member) -> None:
        """It has answered nothing in all the time that it had."""
        member.trial_ns = -1
        self.stamp += 1

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
        member.proven = old is not None and old.proven
        if old is None and len(self._ids) == len(self.members):
            insort(self._ids, learner)
        self.members[learner] = member
        self._by_session[session] = learner
        self.stamp += 1
        return member, old

    def prune(self, fragments: int) -> list[Member]:
        """Forget the longest gone once there are very many, so that memory does not grow with the number of ids.
        Returns who was forgotten."""
        most = min(MEMBERS_MAX, max(MEMBERS_MIN, MEMBER_FRAGMENTS_MAX // max(1, fragments)))
        if len(self.members) <= most:
            return []
        gone = [m for m in self.members.values() if m.state in (MemberState.LEFT, MemberState.LOST)]
        # Some more than must be: else every new one would have all of them sorted again.
        forgotten = sorted(gone, key=lambda m: m.heard_ns)[: len(self.members) - most + most // 10]
        for member in forgotten:
            del self.members[member.learner]
        self._ids = sorted(self.members)
        self.stamp += 1
        return forgotten

    def activate(self, member: Member, now_ns: int, *, trusted: bool = False) -> None:
        """A member trains. `trusted`: what it did before may count, which nobody here can know."""
        self.mark(member, MemberState.ACTIVE)
        member.joined_ns = now_ns
        if self.first_proof_ns < 0 or trusted:
            member.trial_ns = now_ns
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
