"""Everything that `atoll train` and `atoll run` take, as frozen dataclasses with checks.

One dial, `learners`, derives the rest: who is expected, how many contributions a quorum is, how many tokens the run
processes, how many threads each learner gets. `describe` prints what was derived.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from atoll.core import SyncConfig, fragments_for, one_of, quorum_count
from atoll.errors import ConfigError
from atoll.launch.durability import DurabilityConfig, describe_durability, durability_config, durability_names
from atoll.launch.faults import plan_path
from atoll.launch.options import DERIVED, check_types, split_values, sync_config, sync_options, take_preset
from atoll.launch.ranks import RANKS_MAX
from atoll.zoo import OPTIMIZERS, STEP_MS_MAX, count_parameters, model_config

METHODS = ("decoupled", "diloco", "dp", "single")
SCRIPT_METHODS = {
    "dp": "start the script with torchrun and DistributedDataParallel",
    "single": "start the script alone, without atoll run",
}
"""Methods that a user's own script does by itself, and how."""
MINUTES_MAX = 525_600.0
"""A year."""
DEVICES = ("auto", "cpu", "cuda")
LEARNERS_LOCAL_MAX = 1024
"""More processes than this on one machine only measure its scheduler."""
PEERS = "learners"
"""As `shards`: one beside each learner."""
SHARDS_LOCAL_MAX = 64
"""A shard fills a core or two; more of them than a large machine has cores help nobody."""
COUNT_MAX = 1_000_000_000
TOKENS_MAX = 10**18
"""As SyncConfig.tokens_budget."""

PRESETS: dict[str, dict[str, Any]] = {
    "decoupled": {},
    # DiLoCo is one fragment per round: all parameters at once, every H steps.
    "diloco": {"overlap": 0, "fragments": 1},
    "dp": {},
    "single": {},
}
"""Defaults of a method where they differ from SyncConfig's; an explicit setting wins over them."""
FORCED: dict[str, dict[str, Any]] = {
    "decoupled": {},
    "diloco": {"quorum": "all", "grace_cap": 0.0},
    "dp": {},
    "single": {},
}
"""What a method is by definition: these win over explicit settings, and the launcher says so."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One run of `atoll train`, fully resolved. Build it with `train_config`, which applies the method's presets."""

    method: str = "decoupled"
    """decoupled, diloco (synchronous), dp (DistributedDataParallel) or single."""
    learners: int = 4
    """Learner processes (M). The one dial. Method single takes all their steps in one process."""
    steps: int = 300
    """Inner steps per learner if all are equally fast; faster learners take over steps of slower ones."""
    batch: int = 8
    """Sequences per inner step of one learner."""
    seq: int = 128
    """Tokens (bytes) per sequence."""
    model: str = "tiny"
    """Name of a reference GPT of the zoo."""
    corpus: str = "stdlib"
    """stdlib (the source of Python's standard library), a file or folder of text, or hf:NAME[:split[:column]]."""
    optimizer: str = OPTIMIZERS[0]
    """Inner optimizer: muon (on the hidden matrices, AdamW for the rest), adamw or sgd."""
    lr: float = 0.0
    """Peak learning rate of the inner optimizer; 0: the model's own."""
    device: str = "auto"
    """auto (CUDA if there is any), cpu or cuda."""
    threads: int = 0
    """CPU threads per learner; 0: the machine's cores divided by the learners, at least 1."""
    eval_every: int = 0
    """Steps between evaluations of the published model during the run; 0: an eighth of the steps."""
    step_ms: float = 0.0
    """A step takes at least this many milliseconds; the rest is slept. 0: as fast as it can. Learners that share cores
    keep their speed with it when one of them is down."""
    chaos: str = "none"
    """none; demo: kill one learner and slow another; storm: faults of all kinds over the run; a TOML file of faults; or
    calm: none, but the links go through the proxy of a storm."""
    chaos_seed: int = 0
    """Seed of what a storm draws."""
    storm_minutes: float = 10.0
    """How long a run is taken to be for the moments in a file of faults, where step_ms does not tell."""
    namespaces: bool = False
    """Learners run in network namespaces of their own, where partition and limit are the kernel's (needs root)."""
    rate_mbit: float = 0.0
    """What the link of each such learner carries in each direction, in Mbit/s; 0: as much as it can."""
    shards: int | str = 0
    """Processes that have the fragments, their merges and their traffic; 0: the syncer has them itself; learners: one
    beside each learner, which comes and goes with it."""
    relays: int = 0
    """Sites: the learners are shared out among so many relays, in the order of their numbers; 0: none."""
    standby: bool = False
    """A second syncer waits beside the first, and serves when that one is gone; who was gone waits then."""
    seed: int = 0
    """Seed of parameters, data order and sampling."""
    out: str = ""
    """Run folder; empty: a new folder under runs/."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """How the learners synchronise; its learners_expected and tokens_budget follow from the fields above."""
    durability: DurabilityConfig = field(default_factory=DurabilityConfig)
    """What the syncer keeps on disk (decoupled and diloco)."""

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.device not in DEVICES and not self.device.startswith("cuda:"):
            one_of("device", self.device, DEVICES)
        _whole("learners", self.learners, 1, LEARNERS_LOCAL_MAX)
        for name in ("steps", "batch", "seq"):
            _whole(name, getattr(self, name), 1, COUNT_MAX)
        for name in ("threads", "eval_every", "seed", "chaos_seed"):
            _whole(name, getattr(self, name), 0, COUNT_MAX)
        _check_fabric(self)
        if not 0.0 <= self.step_ms <= STEP_MS_MAX:
            raise ConfigError(f"step_ms must be from 0 (as fast as it can) to {STEP_MS_MAX}; not {self.step_ms!r}")
        if not math.isfinite(self.lr) or not 0.0 <= self.lr <= 10.0:
            raise ConfigError(f"lr must be a number from 0 (the model's own) to 10; not {self.lr!r}")
        model_config(self.model)

    @property
    def synchronises(self) -> bool:
        """True for the methods that run a syncer."""
        return self.method in ("decoupled", "diloco")

    @property
    def tokens_budget(self) -> int:
        """Tokens that the run processes in total."""
        return self.learners * self.steps * self.batch * self.seq

    @property
    def processes(self) -> int:
        """Training processes that are really started."""
        return 1 if self.method == "single" else self.learners

    @property
    def steps_per_process(self) -> int:
        """Steps that each of them takes if all are equally fast."""
        return self.learners * self.steps // self.processes

    @property
    def threads_per_learner(self) -> int:
        return self.threads or threads_for(self.processes)

    @property
    def eval_every_steps(self) -> int:
        return self.eval_every or max(1, self.steps_per_process // 8)

    def options(self) -> dict[str, Any]:
        """Flat settings as `train_config` takes them again."""
        own = {name: getattr(self, name) for name in _own_names(type(self))}
        return {**own, **sync_options(self.sync), **self.durability.options()}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One run of `atoll run`: the user's own command, started once per learner."""

    learners: int = 2
    """Learners (M) that run the command."""
    ranks: int = 1
    """Processes of each learner; more than 1: started by torchrun, as ranks of one torch.distributed world."""
    gpus_per_learner: int = 0
    """GPUs of this machine that each learner gets; 0: one for each rank, where there are any."""
    method: str = "decoupled"
    """decoupled, or diloco (synchronous)."""
    tokens_budget: int = 0
    """The run is over when its learners have processed this many tokens together; 0: the script decides."""
    minutes: float = 0.0
    """The learners are told to hand over and leave this long after the first step of any; 0: the script decides."""
    threads: int = 0
    """CPU threads per learner (OMP_NUM_THREADS); 0: the machine's cores divided by the learners, at least 1."""
    chaos: str = "none"
    """none; storm: faults of all kinds; a TOML file of faults; or calm: none, but through the proxy of a storm."""
    chaos_seed: int = 0
    """Seed of what a storm draws."""
    storm_minutes: float = 10.0
    """How long the storm lasts, from the first step on: nobody knows how long the script will train."""
    shards: int | str = 0
    """Processes that have the fragments, their merges and their traffic; 0: the syncer has them itself; learners: one
    beside each learner, which comes and goes with it."""
    relays: int = 0
    """Sites: the learners are shared out among so many relays, in the order of their numbers; 0: none."""
    standby: bool = False
    """A second syncer waits beside the first, and serves when that one is gone; who was gone waits then."""
    out: str = ""
    """Run folder; empty: a new folder under runs/."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """How the learners synchronise."""
    durability: DurabilityConfig = field(default_factory=DurabilityConfig)
    """What the syncer keeps on disk."""

    def __post_init__(self) -> None:
        _whole("learners", self.learners, 1, LEARNERS_LOCAL_MAX)
        _whole("ranks", self.ranks, 1, RANKS_MAX)
        _whole("gpus_per_learner", self.gpus_per_learner, 0, RANKS_MAX)
        if one_of("method", self.method, METHODS) in SCRIPT_METHODS:
            raise ConfigError(
                f"method {self.method} has no syncer, so that atoll run has nothing to add: "
                f"{SCRIPT_METHODS[self.method]}, or compare with `atoll train --method {self.method}`"
            )
        _whole("tokens_budget", self.tokens_budget, 0, TOKENS_MAX)
        if not 0.0 <= self.minutes <= MINUTES_MAX:
            raise ConfigError(f"minutes must be from 0 (no limit) to {MINUTES_MAX:g}; not {self.minutes!r}")
        _whole("threads", self.threads, 0, COUNT_MAX)
        _whole("chaos_seed", self.chaos_seed, 0, COUNT_MAX)
        _check_fabric(self)

    @property
    def threads_per_learner(self) -> int:
        """Of each rank, where a learner has several."""
        return self.threads or threads_for(self.learners * self.ranks)

    def options(self) -> dict[str, Any]:
        """Flat settings as `run_config` takes them again."""
        own = {name: getattr(self, name) for name in _own_names(type(self))}
        return {**own, **sync_options(self.sync), **self.durability.options()}


def train_config(values: Mapping[str, Any], *, where: str = "the settings") -> tuple[TrainConfig, list[str]]:
    """The run that these settings mean, and notes on settings that the method overrode.

    Raises ConfigError for unknown names, wrong types and values that cannot work.
    """
    rest, preset = take_preset(values)
    own, sync, durability = _split(_absolute_plan(rest), TrainConfig, where=where)
    method = one_of("method", own.get("method", "decoupled"), METHODS)
    notes: list[str] = []
    plain = TrainConfig(**own)
    sizes = {"learners": plain.learners, "tokens_budget": plain.tokens_budget}
    if plain.synchronises:
        sync, notes = _by_method(method, sync, preset, **sizes)
        # The model is known here, so the derived number can be shown and kept.
        every = sync.get("sync_every") or SyncConfig().sync_every
        sync["fragments"] = sync.get("fragments") or fragments_for(count_parameters(model_config(plain.model)), every)
    else:
        # Nothing synchronises, so a quorum that would suit another method must not stop a comparison with one flag.
        sync.pop("quorum", None)
    return TrainConfig(**own, sync=sync_config(sync, **sizes), durability=durability), notes


def run_config(values: Mapping[str, Any], *, where: str = "the settings") -> RunConfig:
    """The settings of `atoll run`."""
    return script_config(values, where=where)[0]


def script_config(values: Mapping[str, Any], *, where: str = "the settings") -> tuple[RunConfig, list[str]]:
    """The settings of `atoll run`, and notes on those that the method overrode."""
    rest, preset = take_preset(values)
    own, sync, durability = _split(_absolute_plan(rest), RunConfig, where=where)
    plain = RunConfig(**own, durability=durability)
    sizes = {"learners": plain.learners, "tokens_budget": plain.tokens_budget}
    sync, notes = _by_method(plain.method, sync, preset, **sizes)
    return RunConfig(**own, sync=sync_config(sync, **sizes), durability=durability), notes


def _by_method(
    method: str, sync: Mapping[str, Any], preset: Mapping[str, Any], *, learners: int, tokens_budget: int
) -> tuple[dict[str, Any], list[str]]:
    """The preset and the method's defaults under what was asked for, the method's definition over it; and notes on what
    that replaced."""
    # What was asked for is checked before the method's definition replaces any of it: a slip stays an error.
    sync_config(sync, learners=learners, tokens_budget=tokens_budget)
    forced = FORCED[method]
    replaced = [name for name, value in forced.items() if name in sync and str(sync[name]) != str(value)]
    notes = [f"method {method} means {name} {forced[name]}: {sync[name]} is not used" for name in replaced]
    return {**preset, **PRESETS[method], **sync, **forced}, notes


def _split(
    values: Mapping[str, Any], cls: type[TrainConfig] | type[RunConfig], *, where: str
) -> tuple[dict[str, Any], dict[str, Any], DurabilityConfig]:
    """(own settings, checked; sync settings; durability)."""
    own, sync = split_values(values, (*_own_names(cls), *durability_names()), where=where)
    kept = {name: own.pop(name) for name in durability_names() if name in own}
    if isinstance(shards := own.get("shards"), str) and shards.isascii() and shards.isdigit():
        own["shards"] = int(shards)  # the command line has text
    return check_types(cls, own), sync, durability_config(kept)


def _absolute_plan(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings with the path of a plan from the root, so that the run can be resumed from anywhere."""
    chaos = values.get("chaos")
    if isinstance(chaos, str) and (path := plan_path(chaos)) is not None:
        return {**values, "chaos": str(path.expanduser().resolve())}
    return dict(values)


def _own_names(cls: type[TrainConfig] | type[RunConfig]) -> tuple[str, ...]:
    """The settings of a run that are its own, not a part's."""
    return tuple(f.name for f in fields(cls) if f.name not in ("sync", "durability"))


def threads_for(learners: int) -> int:
    """Cores that this process may use, shared out; several learners that each take all cores would only fight."""
    return max(1, len(os.sched_getaffinity(0)) // learners) if hasattr(os, "sched_getaffinity") else 1


def describe(config: TrainConfig | RunConfig) -> list[str]:
    """What the settings come to, one line per thought."""
    lines = []
    if isinstance(config, TrainConfig):
        who = "1 process" if config.processes == 1 else f"{config.processes} learners"
        lines.append(
            f"{config.method}: {who} x {config.steps_per_process} steps x {config.batch} sequences x {config.seq} "
            f"tokens = {config.tokens_budget:,} tokens; model {config.model}, "
            f"{count_parameters(model_config(config.model)):,} parameters"
        )
    elif config.tokens_budget or config.minutes:
        ends = [f"{config.tokens_budget:,} tokens"] if config.tokens_budget else []
        ends += [f"{config.minutes:g} minutes"] if config.minutes else []
        lines.append(f"{config.method}: until {' or '.join(ends)}, or until the script ends")
    if isinstance(config, RunConfig) or config.synchronises:
        lines += [*describe_sync(config.sync), describe_durability(config.durability)]
        if config.shards == PEERS:
            lines.append("each learner has a shard beside it; together they have the fragments")
        elif config.shards:
            lines.append(f"{config.shards} shard{'s' if config.shards != 1 else ''} have the fragments")
        if config.relays:
            lines.append(f"learners in {config.relays} site{'s' if config.relays != 1 else ''}, each behind a relay")
        if config.standby:
            lines.append("a second syncer stands by")
    threads = config.threads_per_learner
    ranks = config.ranks if isinstance(config, RunConfig) else 1
    who = "learner" if ranks == 1 else f"rank, {ranks} ranks per learner"
    lines.append(f"{threads} CPU thread{'s' if threads > 1 else ''} per {who}")
    return lines


def describe_sync(sync: SyncConfig) -> list[str]:
    """The quorum as a number, the rhythm of rounds and the encodings."""
    quorum = quorum_count(sync, sync.learners_expected, sync.learners_expected)
    wait = "learners wait for each merge" if sync.synchronous else f"hidden behind {sync.overlap} steps"
    return [
        f"quorum {sync.quorum} = {quorum} of {sync.learners_expected}, "
        f"grace up to {sync.grace_cap_steps:g}x a step's time",
        f"{sync.fragments or 'some'} fragment{'' if sync.fragments == 1 else 's'}"
        f"{'' if sync.fragments else ' (as the model needs)'}, each every {sync.sync_every} steps, {wait}",
        f"contributions {sync.codec_up}{_fed(sync.feedback_up)}, updates {sync.codec_down}{_fed(sync.feedback_down)}; "
        f"merge {sync.merge}{'' if sync.correction == 'none' else f' with {sync.correction}'}, outer "
        f"{'' if sync.outer == 'nesterov' else f'{sync.outer} '}lr "
        f"{sync.outer_lr:g}{'' if sync.outer_schedule == 'constant' else f' ({sync.outer_schedule} to a tenth)'}, "
        f"momentum {sync.outer_momentum:g}{_restarted(sync.momentum_restart)}"
        f"{'' if sync.partial == 'scaled' else ', whole steps for partial merges'}; adopt {sync.adopt}",
    ]


def _fed(feedback: bool) -> str:
    return "" if feedback else " (no feedback)"


def _restarted(versions: int) -> str:
    return f" (anew every {versions} versions)" if versions else ""


def resolved(config: TrainConfig | RunConfig) -> dict[str, Any]:
    """The options and, apart, what was derived from them: the content of RUN/config.json."""
    derived = {name: getattr(config.sync, name) for name in DERIVED}
    return {**config.options(), "derived": {**derived, "threads": config.threads_per_learner}}


def _check_fabric(config: TrainConfig | RunConfig) -> None:
    if isinstance(config.shards, str) and config.shards != PEERS:
        raise ConfigError(f"shards must be a whole number or {PEERS}; not {config.shards!r}")
    if not isinstance(config.shards, str):
        _whole("shards", config.shards, 0, SHARDS_LOCAL_MAX)
    if config.shards and config.durability.record:
        raise ConfigError("merges on shards cannot be replayed yet, so that they are not recorded; use no-record")
    if config.shards == PEERS and config.chaos != "none":
        raise ConfigError("a plan of faults cannot reach shards beside learners; give shards a number, or chaos none")
    _whole("relays", config.relays, 0, config.learners)
    if config.standby and config.shards == PEERS:
        raise ConfigError("shards beside learners know one syncer alone; give shards a number, or leave standby away")
    if config.standby and config.durability.durability == "none":
        raise ConfigError("with durability none a standby has nothing to go on from; use commit or interval")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}; not {value!r}")
