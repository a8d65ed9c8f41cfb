"""What a learner knows about one fragment: its base, its unmerged progress, and the contributions it has made of it.

    local         steps and tokens since the base that are in no contribution
    snapshot      a copy taken at a step boundary, with the counters as they were then
    outstanding   contributions whose fate is open, oldest first; normally none or one, two only while leaving

A contribution takes the snapshot's counters out of `local`. If it is merged they are gone; if it is dropped they
come back to `local`, unless the progress itself was overwritten in the meantime, in which case they are discarded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.core.messages import NO_VERSION, Request


@dataclass(slots=True)
class Total:
    """All that a learner has done, whatever became of it. Its fragments share it: a step counts for each of them."""

    steps: int = 0
    tokens: int = 0


class Counters(NamedTuple):
    steps: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Sent:
    """One contribution on its way. `merged_version` is set when the syncer says that it is inside that version."""

    seq: int
    round: int
    counters: Counters
    pushed: bool = False
    merged_version: int = NO_VERSION
    discarded: bool = False
    """Its tokens are discarded already: nobody knows whether it is inside `merged_version`, or it was quarantined. In
    both cases the parameters go on without it."""
    overwritten: bool = False
    """The local progress behind it was overwritten by an adopt, so a drop cannot give it back."""
    stuck: bool = False
    """Its shard could not be reached: it is tried again and again, and does not take the uplink from other shards'."""


@dataclass(slots=True)
class FragmentProgress:
    """One fragment, as its learner sees it; see the table above."""

    index: int
    base: int = NO_VERSION
    based: bool = False
    """True once some published version is in the parameters; from then on progress is kept apart from it."""
    base_checksum: int = 0
    """Of the base, 0 while unknown: what proves it to a syncer that lost it."""
    due_step: int = 0
    period: int = 0
    """Steps between the fragment's last two rounds, as far as is known here; the run's `sync_every` at first."""
    total: Total = field(default_factory=Total)
    """Of its learner."""
    settled_steps: int = 0
    settled_tokens: int = 0
    """Of the total, what is not local any more: it was contributed or overwritten."""
    snapshot: Counters | None = None
    outstanding: list[Sent] = field(default_factory=list)
    request: Request | None = None
    """A request that could not be answered yet."""
    announced: int = NO_VERSION
    """Newest version that the syncer has told us of."""
    checksums: dict[int, int] = field(default_factory=dict)
    """Checksums of announced versions that are not adopted yet."""
    fetching: int = NO_VERSION
    """Version being fetched; NO_VERSION when none is."""
    whole: bool = False
    """The next version must be fetched whole."""
    prepared: list[int] = field(default_factory=list)
    """Versions on this host, in order, ready to be adopted."""
    reseed: str = ""
    """Discard cause while this fragment must be overwritten with published state."""
    given_up: bool = False
    """While leaving: the syncer refused the last progress for a reason that trying again will not mend."""
    too_old: bool = False
    """The last contribution was refused because its base is: there must be a newer one before the next."""
    passed: bool = False
    """Asked since the last contribution, and there was nothing to give."""
    next_seq: int = 0
    contributed_step: int = 0
    """The learner's step at the last contribution: on a thin uplink the fragment that has waited longest goes first."""

    @property
    def local(self) -> Counters:
        """Steps and tokens since the base that are in no contribution."""
        return Counters(self.total.steps - self.settled_steps, self.total.tokens - self.settled_tokens)

    @property
    def local_steps(self) -> int:
        return self.total.steps - self.settled_steps

    def settle(self, counters: Counters) -> None:
        """So much of what is local is so no longer."""
        self.settled_steps += counters.steps
        self.settled_tokens += counters.tokens

    def unsettle(self, counters: Counters) -> None:
        """So much is local again."""
        self.settled_steps -= counters.steps
        self.settled_tokens -= counters.tokens

    @property
    def newest(self) -> int:
        """The newest version that is on this host."""
        return self.prepared[-1] if self.prepared else self.base

    @property
    def newest_checksum(self) -> int:
        return self.checksums.get(self.prepared[-1], 0) if self.prepared else self.base_checksum

    @property
    def pending_tokens(self) -> int:
        """Tokens that are neither merged, as far as is known here, nor discarded."""
        local = self.total.tokens - self.settled_tokens
        return local + sum(s.counters.tokens for s in self.outstanding if s.merged_version == NO_VERSION)

    @property
    def unanswered_tokens(self) -> int:
        """Tokens of which the syncer has not said that it has them."""
        return self.local.tokens + sum(sent.counters.tokens for sent in self.outstanding if not sent.pushed)

    @property
    def answered(self) -> int:
        """Contributions that the syncer has answered, ever."""
        return self.next_seq - sum(not sent.pushed for sent in self.outstanding)

    @property
    def to_give(self) -> int:
        """Contributions that it has not: those on their way, and one of what is left."""
        return self.next_seq - self.answered + (self.local_steps > 0)

    @property
    def may_contribute(self) -> bool:
        """One contribution at a time, and none while a version that contains the last one is still to be adopted."""
        return not self.outstanding and not self.reseed and self.base != NO_VERSION and not self.prepared

    def knows_beyond(self, version: int) -> bool:
        """True if the syncer has spoken of newer versions than this: announced one, or merged something into one."""
        return self.announced > version or any(sent.merged_version > version for sent in self.outstanding)

    def merged_in(self, version: int) -> list[Sent]:
        """Contributions that are known to be inside this version."""
        return [sent for sent in self.outstanding if NO_VERSION < sent.merged_version <= version]

    def find(self, seq: int) -> Sent | None:
        return next((sent for sent in self.outstanding if sent.seq == seq), None)
