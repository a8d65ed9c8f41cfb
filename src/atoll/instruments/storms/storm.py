"""`atoll chaos storm` without the terminal: a fault-free twin, the same training under a plan of faults, a scorecard.

    OUT/twin             the run without faults (or another folder, if one is to be used again)
    OUT/storm            the run under the plan; OUT/storm/plan.toml is the plan, every fault listed
    OUT/scorecard.json   how they compare, and what the checks found

Both runs process the same tokens, each learner through a port of its own of the chaos proxy, and with a floor under the
time of a step: learners on one machine share its cores, and would otherwise go faster while one of them is down.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError, LaunchError
from atoll.instruments.chaos import StormPlan, dump_plan, load_plan, storm_plan
from atoll.instruments.storms.injection import StormFaults
from atoll.instruments.storms.namespace_links import check_namespaces
from atoll.instruments.storms.plans import CALM, parts_of
from atoll.instruments.storms.scorecard import build_scorecard
from atoll.launch import (
    FinishedRun,
    TrainConfig,
    View,
    create_parent,
    is_finished,
    read_run,
    run_train,
    to_toml,
    train_config,
    write_json,
    write_text,
)

LEARNERS_MIN = 2
"""With one learner nobody would be left to go on while it is down."""
MINUTES_MIN, MINUTES_MAX = 0.1, 24 * 60.0
STEP_MS = 300.0
"""Four learners of the model `tiny` need some 60 ms of a core for a step: on two cores this leaves more than half of
both idle, so that a process that starts again, or a guest, does not slow the others down."""
TWIN_LATE_S = 300.0
"""How much longer than the storm a twin beside it may take: on a busy machine their starts alone differ by a minute."""
NOT_COMPARED = ("chaos", "chaos_seed", "storm_minutes", "out", "threads")
"""Settings in which a storm and its twin may differ."""


@dataclass(frozen=True, slots=True)
class StormConfig:
    """One storm and its twin."""

    minutes: float = 10.0
    """Length of each of the two runs."""
    seed: int = 0
    """What the plan is drawn from."""
    faults: int = 0
    """How many are drawn; 0: three a minute."""
    plan: str = ""
    """A TOML file of faults instead of a drawn plan."""
    learners: int = 4
    model: str = "tiny"
    step_ms: float = STEP_MS
    """Each step takes at least this long."""
    out: str = ""
    """Folder of both runs; empty: a new one under runs/."""
    twin: str = ""
    """Folder of a twin that was run before; empty: one is run first."""
    beside: bool = False
    """Both runs at the same time: half as long, on a machine that has room for both."""
    namespaces: bool = False
    """Each learner of both runs is in a network namespace of its own, with a real link to the host (needs root)."""
    shards: int = 0
    """Shards of both runs."""
    relays: int = 0
    """Sites of both runs, each behind a relay."""
    standby: bool = False
    """Both runs have a second syncer that stands by."""
    rate_mbit: float = 0.0
    """What each of these links carries in each direction, in Mbit/s; 0: as much as it can."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the synchronisation of both runs, by name, where they differ from the defaults."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.minutes) and MINUTES_MIN <= self.minutes <= MINUTES_MAX):
            raise ConfigError(f"minutes must be from {MINUTES_MIN:g} to {MINUTES_MAX:g}; not {self.minutes!r}")
        if self.learners < LEARNERS_MIN:
            raise ConfigError(
                f"a storm takes learners down while the others go on, so it needs at least {LEARNERS_MIN}; not "
                f"{self.learners}"
            )
        if not self.step_ms > 0.0:
            raise ConfigError(f"step_ms must be above 0: both runs are paced by it; not {self.step_ms!r}")
        if self.beside and (self.twin or self.namespaces):
            raise ConfigError("a twin that runs beside the storm is a new one, without namespaces; leave beside away")
        if self.faults < 0 or (self.faults and self.plan):
            raise ConfigError("faults must be 0 or more, and the number in the file counts where --plan is given")

    @property
    def steps(self) -> int:
        """Of each learner: as many as fit into the minutes."""
        return max(1, round(self.minutes * 60_000.0 / self.step_ms))

    @property
    def seconds(self) -> float:
        """What they take at least, and the length that the plan is drawn for."""
        return self.steps * self.step_ms / 1000.0

    def train(self, *, chaos: str, out: str) -> TrainConfig:
        """The training of both runs."""
        values = {
            **self.settings,
            "learners": self.learners,
            "model": self.model,
            "step_ms": self.step_ms,
            "steps": self.steps,
            "chaos": chaos,
            "chaos_seed": self.seed,
            # so that every merge can be done again afterwards (I9); both runs pay for it. Shards record nothing
            "record": not self.shards,
            "shards": self.shards,
            "relays": self.relays,
            "standby": self.standby,
            "out": out,
            "namespaces": self.namespaces,
            "rate_mbit": self.rate_mbit,
        }
        return train_config(values)[0]


@dataclass(frozen=True, slots=True)
class StormEnd:
    """What a storm came to: a scorecard, or the run that was stopped."""

    folder: Path
    scorecard: dict[str, Any] | None
    stopped: FinishedRun | None = None


def run_storm(
    config: StormConfig,
    *,
    view: Callable[[Path], View] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> StormEnd:
    """Run the twin and the storm, and compare them. Bad settings raise before anything is started."""
    plan, faults = _plan(config), StormFaults()
    faults.check(config.train(chaos=CALM, out=""))
    if config.namespaces:
        check_namespaces()
    twin = _check_twin(config) if config.twin else None
    folder = create_parent(config.out, name="storm")
    if config.beside:
        return _run_beside(config, plan, folder, view=view, say=say)
    if twin is None:
        say(f"1 of 2: the twin, {config.minutes:g} minutes without faults")
        calm = config.train(chaos=CALM, out=str(folder / "twin"))
        finished = run_train(calm, view=view, say=say, faults=faults)
        if finished.result is None:
            return StormEnd(folder, None, finished)
        twin = finished.folder
    say(f"2 of 2: the storm, {config.minutes:g} minutes with {len(plan.faults)} faults")
    training = _training(config, plan, folder)
    finished = run_train(training, view=view, say=say, faults=faults)
    return _scored(config, plan, folder, training, finished, twin)


def _training(config: StormConfig, plan: StormPlan, folder: Path) -> TrainConfig:
    path = folder / "plan.toml"
    write_text(path, dump_plan(plan))
    return config.train(chaos=str(path), out=str(folder / "storm"))


def _scored(
    config: StormConfig, plan: StormPlan, folder: Path, training: TrainConfig, finished: FinishedRun, twin: Path
) -> StormEnd:
    if finished.result is None:
        return StormEnd(folder, None, finished)
    scorecard = build_scorecard(training, finished.folder, twin, seed=plan.seed, minutes=config.minutes)
    write_json(folder / "scorecard.json", scorecard)
    return StormEnd(folder, scorecard)


def _run_beside(
    config: StormConfig,
    plan: StormPlan,
    folder: Path,
    *,
    view: Callable[[Path], View] | None,
    say: Callable[[str], None],
) -> StormEnd:
    """The storm here, and its twin in a process of its own."""
    twin, settings = folder / "twin", folder / "twin.toml"
    options = {name: value for name, value in config.train(chaos=CALM, out="").options().items() if name != "out"}
    write_text(settings, to_toml(options, comment="The twin of a storm"))
    say(f"the twin, and beside it the storm, {config.minutes:g} minutes with {len(plan.faults)} faults")
    argv = [sys.executable, "-m", "atoll", "train", "--config", str(settings), "--out", str(twin), "--json"]
    with (folder / "twin.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        training = _training(config, plan, folder)
        finished = run_train(training, view=view, say=say, faults=StormFaults())
        if finished.result is not None and process.wait(TWIN_LATE_S):
            raise LaunchError(f"the twin did not come to its end; see {folder / 'twin.log'}")
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"the twin needs {TWIN_LATE_S:g} s more than the storm; use a quieter machine, or leave --beside away"
        ) from None
    finally:
        process.terminate()  # nothing happens where it has ended
        process.wait()
    return _scored(config, plan, folder, training, finished, twin)


def _plan(config: StormConfig) -> StormPlan:
    if config.plan:
        parts = parts_of(config.train(chaos=CALM, out=""))
        path = Path(config.plan).expanduser()
        plan = load_plan(path, learners=config.learners, seconds=config.seconds, parts=parts)
    else:
        count = config.faults or None
        drawn = storm_plan(seed=config.seed, learners=config.learners, minutes=config.seconds / 60.0, faults=count)
        plan = StormPlan(drawn, config.seed)
    if not plan.faults:
        raise ConfigError("the plan has no faults; give some with --faults, or list them in the file")
    return replace(plan, faults=tuple(plan.faults))


def _check_twin(config: StormConfig) -> Path:
    """The folder of a twin that was run with the same settings."""
    path = Path(config.twin).expanduser()
    stored = read_run(path)
    wanted = config.train(chaos=CALM, out="").options()
    if not isinstance(stored.config, TrainConfig):
        raise LaunchError(f"{path} is a run of `atoll run`; give the folder of an earlier storm's twin")
    found = stored.config.options()
    other = [name for name, value in wanted.items() if name not in NOT_COMPARED and found.get(name) != value]
    if other or found["chaos"] != CALM:
        names = ", ".join(f"{name} {found.get(name)} instead of {wanted[name]}" for name in other) or "faults"
        raise LaunchError(
            f"the run in {path} is no twin of this storm ({names}); give the same --minutes, --learners, --model, "
            f"--step-ms, --shards, --relays, --standby, --namespaces and --rate-mbit, or leave --twin away"
        )
    if not is_finished(stored.folder):
        raise LaunchError(f"the run in {path} did not come to its end; leave --twin away")
    return stored.folder.path
