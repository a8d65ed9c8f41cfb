"""What the checkers are told: plain facts about a run, in the order in which they happened.

The simulator states them as it performs effects; for a run of real processes they are read from its events and tape.
A fact says what was observed at one place, never what it means: that is the checkers' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from atoll.core import values

Identity = tuple[str, int, int]
"""learner, generation, seq: with the fragment it names one contribution for ever."""


@values.dataclass(frozen=True, slots=True)
class Opened:
    """A syncer has opened the run's state under this epoch."""

    epoch: int


@values.dataclass(frozen=True, slots=True)
class Restored:
    """A syncer begins from what an earlier one left: a version and checksum for every fragment it found."""

    epoch: int
    fragments: Mapping[int, tuple[int, int]]
    exact: bool
    """True if the disk did all that it promised: no write failed, no byte was lost."""


@values.dataclass(frozen=True, slots=True)
class Committed:
    """A syncer has merged these contributions into a version. Version 0 is the seed."""

    epoch: int
    fragment: int
    version: int
    checksum: int
    contributions: tuple[Identity, ...] = ()
    tokens: tuple[int, ...] = ()
    norms: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    finite: bool = True
    """Whether every value of the parameters is finite."""
    weights: tuple[float, ...] = ()
    """Of the contributions; they add up to 1."""
    share: float = 1.0
    """How much of the merged step was taken, of what these contributions by themselves would give."""
    moved: float = 0.0
    """The norm of what was merged; 0: not known."""
    steps_true: tuple[int, ...] = ()
    """The steps that went into the contributions, where somebody lies about them."""
    liar_weight: float = 0.0
    """Of the weights, what a learner that lies has."""
    liar_weight_max: float = 1.0
    """And what it may have by its true size, the others' and the time that it has claimed more."""
    at_relays: tuple[Identity, ...] = ()
    """Of the contributions that weigh anything, those whose bytes were at a relay."""


@values.dataclass(frozen=True, slots=True)
class Durable:
    """This version is on disk."""

    epoch: int
    fragment: int
    version: int


@values.dataclass(frozen=True, slots=True)
class Copied:
    """This version is on the disk of a standby."""

    fragment: int
    version: int
    checksum: int


@values.dataclass(frozen=True, slots=True)
class Owned:
    """A shard has put a version of this fragment on its disk, led by a syncer of this epoch."""

    epoch: int
    fragment: int
    shard: str
    version: int = -1
    checksum: int = 0


@values.dataclass(frozen=True, slots=True)
class Arrived:
    """A shard has put a copy of a fragment that is another's on its disk: it is about to move there."""

    fragment: int
    shard: str
    version: int
    checksum: int


@values.dataclass(frozen=True, slots=True)
class Moved:
    """The coordinator's tape gives this fragment to this shard, from here on."""

    fragment: int
    shard: str
    whole: bool = False
    """No disk of the run has lost anything so far, and no shard was given up."""


@values.dataclass(frozen=True, slots=True)
class Dropped:
    """A shard has deleted what it had of this fragment."""

    fragment: int
    shard: str


@values.dataclass(frozen=True, slots=True)
class NotMoved:
    """A move of this fragment did not go through: who had it before, who has it now, and whether that one still has it
    on its disk."""

    fragment: int
    before: str
    shard: str
    there: bool


@values.dataclass(frozen=True, slots=True)
class RelayMerged:
    """A relay has made one payload of these contributions, for this version."""

    relay: str
    fragment: int
    version: int
    contributions: tuple[Identity, ...]


@values.dataclass(frozen=True, slots=True)
class Healed:
    """A learner has brought a lost version back, and it is the run's again. `undecidable`: it was never made, and
    nobody could tell, so that the run's line goes on from it."""

    epoch: int
    fragment: int
    version: int
    checksum: int
    undecidable: bool = False


@values.dataclass(frozen=True, slots=True)
class Told:
    """Word of this version has left the syncer's process. `promised`: its level of durability holds at the moment."""

    epoch: int
    fragment: int
    version: int
    checksum: int
    promised: bool = True
    copied: bool = False
    """A standby with a disk of its own is promised to have it, too."""


@values.dataclass(frozen=True, slots=True)
class Adopted:
    """A learner's process has brought its parameters to this version; `checksum` is of what it holds (0: unknown)."""

    learner: str
    instance: str
    fragment: int
    version: int
    checksum: int = 0


@values.dataclass(frozen=True, slots=True)
class WentBack:
    """The run told this process that the versions it holds are lost, so that it may adopt older ones."""

    learner: str
    instance: str
    fragment: int


@values.dataclass(frozen=True, slots=True)
class Books:
    """One fragment's line of the token ledger."""

    fragment: int
    processed: int
    merged: int
    pending: int
    discarded: Mapping[str, int] = field(default_factory=dict)


@values.dataclass(frozen=True, slots=True)
class Processed:
    """What learners have really done, counted where it was done: `known` is the least that the ledger must know,
    `total` the most that it can."""

    known: int
    total: int


@values.dataclass(frozen=True, slots=True)
class Rested:
    """Everything has been handed over and merged: what the ledger calls merged must be what is in the parameters.
    `whole`: no record of a merge was ever lost on a disk."""

    whole: bool


@values.dataclass(frozen=True, slots=True)
class Calm:
    """From here on nothing is wrong in the world; by `until_ns` the run must show progress."""

    at_ns: int
    until_ns: int
    fragments: int
    learners: tuple[str, ...]


@values.dataclass(frozen=True, slots=True)
class Progressed:
    """A version was committed (fragment set), or a contribution of this learner was merged (learner set)."""

    at_ns: int
    fragment: int = -1
    learner: str = ""


@values.dataclass(frozen=True, slots=True)
class Ended:
    """There is nothing more to come."""

    at_ns: int = 0


@values.dataclass(frozen=True, slots=True)
class Lived:
    """How one process of a learner spent its time: `able_ns` is when it was up, joined and not deliberately held, and
    `step_ns` what its steps took by themselves."""

    learner: str
    instance: str
    steps: int
    able_ns: int
    step_ns: int
    waits: bool = False
    """A synchronous run: waiting for the merge is what was asked for."""


@values.dataclass(frozen=True, slots=True)
class Refused:
    """A push or session was refused or a contribution dropped; `told` says that an event names it."""

    learner: str
    code: str
    told: bool


@values.dataclass(frozen=True, slots=True)
class Replayed:
    """The merges on the tape, done again: the checksum that came out for a fragment, and the one on record."""

    fragment: int
    version: int
    expected: int
    found: int


@values.dataclass(frozen=True, slots=True)
class GuardReset:
    """The syncer's guard against outliers of this fragment has begun anew, and said so."""

    fragment: int


@values.dataclass(frozen=True, slots=True)
class Overtaken:
    """A syncer of this epoch has ended for a newer one; `newest` is the newest that has opened the run."""

    epoch: int
    newest: int


@values.dataclass(frozen=True, slots=True)
class TurnedAway:
    """A process of an honest learner was refused for good."""

    learner: str
    code: str


@values.dataclass(frozen=True, slots=True)
class Charged:
    """Of one process of an honest learner: the tokens that the ledger has it process, and those that it did."""

    learner: str
    known: int
    did: int


@values.dataclass(frozen=True, slots=True)
class Kept:
    """All is over: the tokens that one process of an honest learner has processed, and those of one fragment that it
    has discarded. `overwritten` of them the run's own settings cost."""

    learner: str
    generation: int
    fragment: int
    processed: int
    discarded: int
    overwritten: int = 0
    refused: int = 0
    """Tokens of its contributions that the syncer has refused. It gives them again, unless it was about to leave."""


@values.dataclass(frozen=True, slots=True)
class Unlied:
    """A run and its twins, in which the liar is honest, or is not there: the share of honest tokens that were merged,
    and the versions that were made until the world was healed."""

    merged: float
    versions: int
    merged_there: tuple[float, ...]
    versions_there: tuple[int, ...]
    robust: bool = False
    """Learners that point against the others are left out."""
    spread: float = 1.0
    """How many times as fast as the slowest honest learner the fastest is."""


@values.dataclass(frozen=True, slots=True)
class Spent:
    """A run has ended by its budget of tokens; `most` is what can count for it: all that honest learners did, and what
    may be believed of a liar."""

    budget: int
    most: float


@values.dataclass(frozen=True, slots=True)
class Sizes:
    """How much of something there is, and the most that there may be."""

    what: str
    count: int
    most: int


Fact = (
    Opened
    | Restored
    | Committed
    | Durable
    | Copied
    | Owned
    | Arrived
    | Moved
    | Dropped
    | NotMoved
    | RelayMerged
    | Healed
    | Told
    | Adopted
    | WentBack
    | Books
    | Processed
    | Rested
    | Calm
    | Progressed
    | Ended
    | Lived
    | Refused
    | Replayed
    | GuardReset
    | Overtaken
    | TurnedAway
    | Charged
    | Kept
    | Unlied
    | Spent
    | Sizes
)
