"""A whole run as data: who takes part, how fast, over which links, with which settings, and what goes wrong when.

`drawing.draw` makes one from a number. A scenario can be written down as JSON and read again, which is how a failing
one is kept, shrunk and made a test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from atoll.core import LATER_SETTINGS, SECOND_NS, SyncConfig, meant, one_of
from atoll.errors import ConfigError
from atoll.instruments.chaos import DIRECTIONS, KINDS, LIES, Fault
from atoll.instruments.sim.ranges import flag, real, whole

SCENARIO_FORMAT = 1
SIM_KINDS: Mapping[str, tuple[str, bool]] = {
    **{name: (kind.targets[0], kind.lasting) for name, kind in KINDS.items()},
    "power": ("syncer", False),
    "rot": ("syncer", False),
    "disk_slow": ("syncer", True),
    "takeover": ("syncer", False),
    "wipe": ("syncer", False),
    "lose": ("learner", True),
    "break": ("learner", True),
    "mute": ("learner", True),
    "dismiss": ("learner", True),
    "revoke": ("learner", False),
    "lie": ("learner", True),
    **dict.fromkeys(("move", "add", "remove", "give-up"), ("shard", False)),
}
"""Every kind of fault that this world knows -> (what it hits, whether it lasts). Besides those of `chaos`:
power: the syncer's machine loses its power, and what was not synced is gone; rot: a slot on its disk becomes
unreadable, and it restarts; disk_slow: writes take `amount` times as long; takeover: a second syncer opens the run
while the first one still lives; wipe: its machine is lost with all that was on its disk; lose: `amount` of all packets
must be sent again; break: `amount` of all calls are broken off, before or after they did their work; mute: the
learner's reports arrive, its contributions do not (an uplink that is too thin for them); dismiss: the operator asks the
syncer to let it leave; revoke: the operator revokes its key, and its next process has a new one; lie: the learner tells
a lie, whose name is the `variant` (`lies.LIES`), and goes on telling it when the world is healed; move, add, remove,
give-up: the operator asks for it, as `atoll shards` does; the `variant` of a move is the fragments, such as `0,3`."""
CHANGES = frozenset({"move", "add", "remove", "give-up"})
"""What is asked of a coordinator of shards."""
AT_ANY_PLACE = frozenset({"kill", "freeze"})
"""What may hit a learner and the syncer alike."""
LINK_KINDS = frozenset({"partition", "stall", "delay", "limit", "corrupt", "cut", "lose", "break"})
"""What hits links: a learner's, those of a place of the fabric, or (`syncer~shard-0`) the one between two of them."""
AMOUNTS: Mapping[str, tuple[float, float]] = {
    **{name: kind.amount_allowed for name, kind in KINDS.items() if kind.amount is not None},
    "disk_slow": (1.0, 1000.0),
    "lose": (0.0, 1.0),
    "break": (0.0, 1.0),
    "lie": (0.0, 2.0**60),
}
"""Least and greatest amount of the kinds that have one."""
TARGET_CHARS_MAX = 200
"""As for a plan of `atoll.instruments.chaos`."""
LEARNERS_WITH_LIAR = 3
"""As few honest learners as outvote a liar, and the liar."""
SHARDS_MAX = 64
DURABILITIES = ("commit", "interval", "none")
LEARNERS_MAX = 1_000_000
FAULTS_MAX = 10_000
SEED_MAX = 2**64 - 1
SECONDS_MAX = 366 * 86_400.0
"""As for a plan of `atoll.instruments.chaos`: a year."""
TOOK_NS_MAX = 86_400 * SECOND_NS
"""Nothing that a process does takes longer than a day."""
TOKENS_MAX = 10**9
"""Of one step: a thousand times the largest batches."""
BITS_PER_S_MIN, BITS_PER_S_MAX = 1.0, 1e15
SCENARIO_BYTES_MAX = 64_000_000
"""Room for hundreds of thousands of learners; those that `atoll sim` draws are 5 kB."""


@dataclass(frozen=True, slots=True)
class SimFault:
    kind: str
    target: str
    at_s: float
    lasts_s: float = 0.0
    """0 for an instant. A learner that is killed stays down so long (0: for the usual pause of a supervisor)."""
    amount: float = 0.0
    direction: str = "both"
    variant: str = ""

    def __post_init__(self) -> None:
        if self.kind not in SIM_KINDS:
            raise ConfigError(f"unknown fault {self.kind!r}; the simulator knows {', '.join(sorted(SIM_KINDS))}")
        if not isinstance(self.target, str) or not 1 <= len(self.target) <= TARGET_CHARS_MAX:
            raise ConfigError(f"fault {self.kind}: its target must be syncer or the name of a learner")
        hits, lasts = SIM_KINDS[self.kind]
        what = f"fault {self.kind} on {self.target}"
        real(f"{what}: at_s", self.at_s, 0.0, SECONDS_MAX)
        real(f"{what}: lasts_s", self.lasts_s, 0.0, SECONDS_MAX)
        if bool(self.lasts_s) != lasts and self.kind != "kill":
            raise ConfigError(f"{what} {'lasts: give lasts_s' if lasts else 'is an instant: leave out lasts_s'}")
        if self.kind in AMOUNTS:
            real(f"{what}: amount", self.amount, *AMOUNTS[self.kind])
        one_of(f"{what}: direction", self.direction, DIRECTIONS)
        if self.kind == "poison":
            one_of(f"{what}: variant", self.variant, KINDS["poison"].variants)
        if self.kind == "lie":
            one_of(f"{what}: variant", self.variant, tuple(LIES))
        if self.kind in CHANGES and not self.target.startswith("shard-"):
            raise ConfigError(f"fault {self.kind} is about a shard, not {self.target!r}; name one, such as shard-0")
        if self.kind == "move" and not all(part.isdecimal() for part in self.variant.split(",")):
            raise ConfigError(f"{what}: its variant says which fragments move, such as 0,3; not {self.variant!r}")
        if self.target == "syncer" and hits != "syncer" and self.kind not in AT_ANY_PLACE | LINK_KINDS:
            raise ConfigError(f"fault {self.kind} cannot hit the syncer; name a learner, such as learner-0")
        if self.target.startswith(("learner-", "guest-")) and hits == "syncer":
            raise ConfigError(f"fault {self.kind} hits the syncer, not {self.target!r}; use syncer as its target")

    @classmethod
    def of_plan(cls, fault: Fault, seconds: float) -> SimFault:
        """A fault of a chaos plan; shares of the run become seconds."""
        at_s = fault.at_s if fault.at_s >= 0 else fault.at_progress * seconds
        until_s = fault.until_progress * seconds - at_s if fault.until_progress else fault.lasts_s
        return cls(fault.kind, fault.target, at_s, max(0.0, until_s), fault.amount, fault.direction, fault.variant)


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    step_ns: int = 200_000_000
    tokens: int = 16
    """Of one step."""
    jitter: float = 0.0
    """A step takes between 1 - jitter/2 and 1 + jitter/2 times `step_ns`."""
    latency_ns: int = 1_000_000
    link_jitter_ns: int = 0
    up_bits_per_s: float = 0.0
    down_bits_per_s: float = 0.0
    loss: float = 0.0
    encode_ns: int = 1_000_000
    lies: str = ""
    """What it makes of all its contributions: a variant of the fault `poison`; empty: it is honest."""

    def __post_init__(self) -> None:
        whole("a learner's step_ns", self.step_ns, 1, TOOK_NS_MAX)
        whole("a learner's tokens", self.tokens, 1, TOKENS_MAX)
        real("a learner's jitter", self.jitter, 0.0, 1.0)
        for name in ("latency_ns", "link_jitter_ns", "encode_ns"):
            whole(f"a learner's {name}", getattr(self, name), 0, TOOK_NS_MAX)
        for name in ("up_bits_per_s", "down_bits_per_s"):
            if getattr(self, name) != 0.0:
                real(f"a learner's {name}", getattr(self, name), BITS_PER_S_MIN, BITS_PER_S_MAX)
        real("a learner's loss", self.loss, 0.0, 1.0)
        one_of("a learner's lies", self.lies, ("", *KINDS["poison"].variants))


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    config: SyncConfig
    learners: tuple[LearnerSpec, ...]
    """learner-0, learner-1, ..."""
    seconds: float = 60.0
    """How long faults may begin; then the world is healed."""
    faults: tuple[SimFault, ...] = ()
    arrays: bool = True
    """Real small arrays, or only references to payloads."""
    inline: bool = True
    """Payloads travel inside control messages (small fragments), or in calls of their own."""
    inner: bool = False
    """Restarted learners ask a peer for inner state."""
    keys: bool = False
    """Each learner has a key of its own, with its size; or all of them share one token."""
    durability: str = "commit"
    merge_ns: int = 2_000_000
    sync_ns: int = 3_000_000
    commit_ns: int = 10_000_000
    standby: str = ""
    """A second syncer that takes over: `folder` shares the run folder, `replicate` has a copy on a disk of its own."""
    standby_after_s: float = 15.0
    shards: int = 0
    """Processes that serve the fragments; 0: the syncer does."""
    spares: int = 0
    """Shards that the run begins without: they may be added."""
    lost_after_s: float = 0.0
    """A shard that is away for so long is given up; 0: only if the operator says so."""
    follows: bool = True
    """Learners follow a fragment that moves; or they are older, and have to say hello again."""
    relayed: int = 0
    """How many of the learners, from the first on, are behind a relay."""
    relay_merges: bool = True
    """Or it passes contributions on, one by one."""
    draw: int = 0
    """The version of `drawing.draw` that made it of its seed, and of which it is what the shrinker left. 0: none."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.learners) <= LEARNERS_MAX:
            raise ConfigError(f"a scenario has 1 to {LEARNERS_MAX} learners, not {len(self.learners)}")
        if len(self.faults) > FAULTS_MAX:
            raise ConfigError(f"a scenario has at most {FAULTS_MAX} faults, not {len(self.faults)}")
        whole("seed", self.seed, 0, SEED_MAX)
        whole("draw", self.draw, 0, SEED_MAX)
        real("seconds", self.seconds, 0.001, SECONDS_MAX)
        if self.config.fragments < 1:
            raise ConfigError("a scenario says how many fragments there are; give its config fragments of at least 1")
        one_of("durability", self.durability, DURABILITIES)
        self._check_fabric()
        for name in ("arrays", "inline", "inner", "keys", "relay_merges", "follows"):
            flag(name, getattr(self, name))
        for name in ("merge_ns", "sync_ns", "commit_ns"):
            whole(name, getattr(self, name), 0, TOOK_NS_MAX)
        known = {f"learner-{index}" for index in range(len(self.learners))} | set(self.places)
        for fault in self.faults:
            guest = fault.kind == "join"
            if guest and fault.target in known:
                raise ConfigError(f"{fault.target} takes part already; a learner that joins is called guest-0 or so")
            ends = fault.target.split("~")
            if not guest and (not set(ends) <= known or len(ends) > 2):
                raise ConfigError(
                    f"fault {fault.kind} hits {fault.target!r}, and the scenario has learner-0 to "
                    f"learner-{len(self.learners) - 1}{self._places_told()}; correct its target"
                )
        self._check_places()
        liars = {fault.target for fault in self.faults if fault.kind == "lie"}
        if len(liars) > 1 or (liars and len(self.learners) < LEARNERS_WITH_LIAR):
            raise ConfigError(
                f"{len(liars)} of {len(self.learners)} learners lie; one may, among at least {LEARNERS_WITH_LIAR}: the "
                "others must be a majority"
            )
        if not self.keys and any(fault.kind == "revoke" for fault in self.faults):
            raise ConfigError("without keys there is none to revoke; let the scenario have keys, or leave out revoke")
        if not self.keys and any(fault.kind == "lie" and LIES[fault.variant].steals for fault in self.faults):
            raise ConfigError("without keys anybody may be anybody; let the scenario have keys, or leave out that lie")

    def _check_places(self) -> None:
        for fault in self.faults:
            at_place, hits = fault.target in self.places, SIM_KINDS[fault.kind][0]
            if fault.target == "syncer" and fault.kind in LINK_KINDS and not self.fabric:
                raise ConfigError(f"fault {fault.kind} cannot hit the syncer; name a learner, such as learner-0")
            if at_place and hits != "syncer" and fault.kind not in AT_ANY_PLACE | LINK_KINDS | CHANGES:
                raise ConfigError(f"fault {fault.kind} cannot hit {fault.target}; name a learner, such as learner-0")
            count = self.config.fragments
            if fault.kind == "move" and any(int(one) >= count for one in fault.variant.split(",")):
                raise ConfigError(f"fault move: the run has fragments 0 to {count - 1}, not all of {fault.variant}")
            if "~" in fault.target and fault.kind not in LINK_KINDS:
                raise ConfigError(f"fault {fault.kind} hits no link; name one end of {fault.target}")

    def _check_fabric(self) -> None:
        one_of("standby", self.standby, ("", "folder", "replicate"))
        real("standby_after_s", self.standby_after_s, 0.1, SECONDS_MAX)
        whole("shards", self.shards, 0, SHARDS_MAX)
        whole("spares", self.spares, 0, SHARDS_MAX)
        real("lost_after_s", self.lost_after_s, 0.0, SECONDS_MAX)
        if (self.spares or self.lost_after_s) and not self.shards:
            raise ConfigError("spares and lost_after_s are of runs with shards; give shards, or leave them out")
        whole("relayed", self.relayed, 0, len(self.learners))
        if not self.fabric:
            if any(fault.kind == "kill" and fault.target == "syncer" and fault.lasts_s for fault in self.faults):
                raise ConfigError("fault kill on syncer is an instant: leave out lasts_s")
            return
        if not self.arrays or any(fault.kind == "lie" for fault in self.faults):
            raise ConfigError("a scenario with a standby, shards or a relay has arrays and nobody who lies")
        if self.standby and self.durability == "none":
            raise ConfigError("a standby has nothing to go on from with durability none; let it be commit")
        if self.standby == "replicate" and (self.shards or self.durability != "commit"):
            raise ConfigError("replicate goes with durability commit, and not with shards")
        if self.relayed and self.keys:
            raise ConfigError("a relay shows its own token: leave out keys, or the relay")

    @property
    def fabric(self) -> bool:
        """Whether the run is more than a syncer and its learners."""
        return bool(self.standby or self.shards or self.relayed)

    @property
    def places(self) -> tuple[str, ...]:
        """Where its processes run but for the learners."""
        standby = ("standby",) if self.standby else ()
        relays = ("relay-0",) if self.relayed else ()
        shards = (f"shard-{index}" for index in range(self.shards + self.spares))
        return ("syncer", *standby, *shards, *relays)

    def _places_told(self) -> str:
        return f", {', '.join(self.places)}" if self.fabric else ""

    @property
    def liar(self) -> str:
        """The one learner that lies now and then; empty: nobody does."""
        return next((fault.target for fault in self.faults if fault.kind == "lie"), "")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"learner-{index}" for index in range(len(self.learners)))


# ---------------------------------------------------------------- writing and reading


def to_json(scenario: Scenario) -> str:
    values = asdict(scenario)
    values["config"] = scenario.config.to_dict()
    return json.dumps({"format": SCENARIO_FORMAT, **values}, indent=1)


def load(path: Path) -> Scenario:
    """Read a scenario that `atoll sim` wrote. ConfigError says what is wrong with it."""
    try:
        with path.open("rb") as file:
            text = file.read(SCENARIO_BYTES_MAX + 1)
        if len(text) > SCENARIO_BYTES_MAX:
            raise ValueError(f"it has more than {SCENARIO_BYTES_MAX} bytes")
        values = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a scenario: {error}; give a file that `atoll sim` has written") from None
    return from_values(values, str(path))


def from_values(values: Any, where: str) -> Scenario:
    if not isinstance(values, dict) or values.pop("format", None) != SCENARIO_FORMAT:
        raise ConfigError(
            f"{where} is not a scenario of format {SCENARIO_FORMAT}; draw one with `atoll sim run --save`"
        )
    known = {entry.name for entry in fields(Scenario)}
    unknown = sorted(set(values) - known)
    if unknown:
        hint = meant(unknown[0], known)
        raise ConfigError(f"{where}: unknown entry {unknown[0]!r}; {hint}a scenario has {', '.join(sorted(known))}")
    try:
        return Scenario(
            **{
                **values,
                "config": SyncConfig.from_dict({**LATER_SETTINGS, **values["config"]}),
                "learners": tuple(LearnerSpec(**entry) for entry in values["learners"]),
                "faults": tuple(SimFault(**entry) for entry in values.get("faults", ())),
            }
        )
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: {error}; compare it with what `atoll sim run --save` writes") from None
