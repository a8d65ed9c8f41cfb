"""What a worker process is told: the same WorkerConfig for all of a run, and a Seat of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from atoll.core import one_of
from atoll.errors import ConfigError
from atoll.zoo.presets import OPTIMIZERS, model_config, own_lr

METHODS = ("decoupled", "diloco", "dp", "single")
RANKS_FILE = "ranks"
"""In the run folder: where the processes of `dp` find each other."""
STEP_MS_MAX = 60_000
"""A minute a step: the longest that a slow learner sleeps at once, too."""
_NUMBERS_MIN = {
    "learners": 1,
    "steps": 1,
    "batch": 1,
    "seq": 1,
    "seed": 0,
    "eval_every": 0,
    "eval_batches": 1,
    "eval_rank": 0,
    "threads": 0,
}


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One training run of the reference GPT, as every one of its processes sees it.

    Every method processes learners x steps x batch x seq tokens. `single` does so as one process that takes
    learners x steps steps of the same batch: equal tokens and equal data, not an equal number of updates.
    """

    method: str = "decoupled"
    """decoupled, diloco (the synchronous special case: the difference is in the syncer's settings), dp or single."""
    learners: int = 4
    """Learners that the run is planned for: the number of data shards."""
    steps: int = 200
    """Inner steps per learner; also the length of the learning-rate schedule."""
    batch: int = 8
    """Windows per step and learner."""
    seq: int = 128
    """Bytes per window."""
    model: str = "tiny"
    """Name of a preset."""
    corpus: str = "stdlib"
    """stdlib, a file, a folder, or hf:NAME_OR_PATH[:split[:column]]."""
    seed: int = 0
    """Fixes the initial parameters (equal for all) and, with the rank, the data of each learner."""
    lr: float = 0.0
    """Peak learning rate. 0: the preset's."""
    optimizer: str = OPTIMIZERS[0]
    """muon, adamw or sgd."""
    schedule: str = "cosine"
    """cosine, wsd or constant; each with warm-up."""
    eval_every: int = 25
    """Steps between two evaluations of the published model. 0: only at the end."""
    eval_batches: int = 8
    """Batches of held-out windows per evaluation."""
    eval_rank: int = 0
    """The learner that evaluates (decoupled and diloco; with dp every rank takes its share)."""
    device: str = "cpu"
    """cpu, cuda (learner r takes GPU r modulo their number), cuda:N, or auto (cuda where there is one)."""
    threads: int = 0
    """Threads of torch in each process. 0: torch's own choice, which is too many when learners share cores."""
    step_ms: float = 0.0
    """A step takes at least this long: what is left of it is slept. 0: as fast as it can."""

    def __post_init__(self) -> None:
        for name, low in _NUMBERS_MIN.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} must be a whole number from {low}; not {value!r}")
        if isinstance(self.lr, bool) or not isinstance(self.lr, int | float) or not 0 <= self.lr < math.inf:
            raise ConfigError(f"lr must be a number from 0 (0: the preset's); not {self.lr!r}")
        if isinstance(self.step_ms, bool) or not 0 <= self.step_ms <= STEP_MS_MAX:
            raise ConfigError(f"step_ms must be a number of milliseconds from 0 to {STEP_MS_MAX}; not {self.step_ms!r}")
        one_of("method", self.method, METHODS)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("schedule", self.schedule, ("cosine", "wsd", "constant"))
        if self.device.partition(":")[0] not in ("cpu", "cuda", "auto"):
            raise ConfigError(f"device must be cpu, cuda, cuda:N or auto; not {self.device!r}")
        model_config(self.model)

    @property
    def tokens_per_step(self) -> int:
        """Bytes that one learner processes in one step."""
        return self.batch * self.seq

    @property
    def tokens_budget(self) -> int:
        """Bytes that the whole run processes."""
        return self.learners * self.steps * self.tokens_per_step

    @property
    def peak_lr(self) -> float:
        """The given learning rate, or the preset's."""
        return self.lr or own_lr(self.model, self.optimizer)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerConfig:
        """Build from JSON: unknown names and wrong values are errors."""
        try:
            values: Any = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the worker's configuration is not JSON: {error}") from None
        known = {f.name for f in fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= known:
            raise ConfigError(f"the worker's configuration must be a JSON object with names of {sorted(known)}")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    """Who this worker is."""

    rank: int
    """Which data shard it reads; 0 saves the model (dp, single)."""
    learner: str
    """Its id in events and at the syncer."""
    run_folder: Path
    slow_file: Path | None = None
    """While this file exists the worker is slow (see SlowDown)."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> WorkerSeat:
        """From the variables that the launcher sets."""
        try:
            rank = int(environment["ATOLL_RANK"])
            learner = environment["ATOLL_LEARNER"]
            run_folder = Path(environment["ATOLL_RUN_FOLDER"])
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"ATOLL_RANK (a number), ATOLL_LEARNER and ATOLL_RUN_FOLDER must be set ({error}); "
                "start workers with `atoll train`, or set them yourself"
            ) from None
        slow_file = environment.get("ATOLL_SLOW_FILE")
        return cls(rank, learner, run_folder, Path(slow_file) if slow_file else None)
