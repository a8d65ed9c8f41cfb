"""One run of the lab as data: what is trained, by how many learners, how long, under which settings, in which world.

A spec decides the result: two runs of one spec differ by floating-point noise only. So its `key` is the run's name in a
study's store, and nothing that only decides the speed (the device, graphs) is part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from atoll.core import SyncConfig, meant, one_of
from atoll.errors import ConfigError
from atoll.instruments.sim import real, whole
from atoll.zoo import OPTIMIZERS, SCHEDULES

METHODS = ("decoupled", "streaming", "diloco", "dp", "single")
LOCAL_METHODS = ("dp", "single")
"""Those in which one model is trained and nobody exchanges anything."""
BUILT_IN = ("gpt", "domains")
"""Tasks of the lab's own."""
LEARNERS_MAX = 1024
"""Every learner is a whole model with its optimizer on one device."""
TOKENS_MAX = 10**13
SPEC_FORMAT = 1

METHOD_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "decoupled": {},
    "diloco": {"quorum": "all", "overlap": 0, "fragments": 1, "grace_cap_steps": 0.0},
    "streaming": {
        "quorum": "all",
        "overlap": 1,
        "grace_cap_steps": 0.0,
        "merge": "mean",
        "outer_lr": 0.4,
        "outer_momentum": 0.9,
        "adopt": "mix:0.5",
        "codec_up": "int4",
        "codec_down": "fp32",
    },
}
"""What a method changes in the settings of the synchronisation. `diloco` is that of `atoll train`: our merge and outer
step, with everybody waiting. `streaming` is Streaming DiLoCo (arXiv 2501.18512): tau = 1, averaging, outer lr 0.4,
alpha = 0.5, 4 bits up."""


@dataclass(frozen=True, slots=True)
class LabSpec:
    method: str = "decoupled"
    """decoupled, streaming, diloco; dp (one model, the whole batch at every step) or single (one model that takes a
    learner's batch, one step after another)."""
    task: str = "gpt"
    """gpt: the reference GPT on bytes. domains: the same, and each learner reads a stretch of the corpus of its own.
    Else MODULE:FUNCTION that makes an `atoll.instruments.lab.task.Task`."""
    model: str = "tiny"
    """Size of the reference GPT."""
    corpus: str = "stdlib"
    learners: int = 4
    batch: int = 32
    """Sequences of one step of all learners together: each takes batch / learners, data-parallel takes all."""
    seq: int = 128
    tokens: int = 1_000_000
    """Processed in total, by all learners."""
    optimizer: str = OPTIMIZERS[0]
    lr: float = 0.0
    """Peak learning rate; 0: the model's own."""
    schedule: str = "cosine"
    schedule_by: str = "tokens"
    """What the schedule follows: the tokens that everybody has processed, or the learner's own steps, as in `atoll
    train`. With steps it ends too early when learners fail, and too late when others help."""
    seed: int = 0
    evals: int = 8
    """How often the published model is evaluated, the end included."""
    eval_windows: int = 256
    """Held-out windows of `seq` bytes."""
    sync: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the synchronisation that differ from the method's."""
    world: Mapping[str, Any] = field(default_factory=dict)
    """What a scenario file says: speeds, links, faults (see `atoll.instruments.lab.scenario`)."""

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("schedule_by", self.schedule_by, ("tokens", "steps"))
        whole("learners", self.learners, 1, LEARNERS_MAX)
        whole("batch", self.batch, 1, 1_000_000)
        whole("seq", self.seq, 1, 1_000_000)
        whole("tokens", self.tokens, 1, TOKENS_MAX)
        whole("seed", self.seed, 0, 2**32 - 1)
        whole("evals", self.evals, 1, 10_000)
        whole("eval_windows", self.eval_windows, 1, 1_000_000)
        real("lr", self.lr, 0.0, 100.0)
        for name in ("task", "model", "corpus"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"{name} must be a name, not {getattr(self, name)!r}")
        for name in ("sync", "world"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{name} must be a table of settings, not {getattr(self, name)!r}")
        if self.batch % self.learners:
            raise ConfigError(
                f"a batch of {self.batch} sequences does not split among {self.learners} learners; "
                f"use a multiple of {self.learners}"
            )
        if self.method in LOCAL_METHODS and self.sync:
            raise ConfigError(f"nothing is synchronised with method {self.method}; leave out the sync settings")
        for name, instead in (("learners_expected", "learners"), ("tokens_budget", "tokens")):
            if name in self.sync and self.sync[name] != getattr(self, instead):
                raise ConfigError(f"sync.{name} is not set by itself in the lab; set {instead}")
        if self.method not in LOCAL_METHODS:
            self.config()
        if self.steps < 1:
            least = self.tokens_per_step * (1 if self.method in LOCAL_METHODS else self.learners)
            raise ConfigError(f"{self.tokens} tokens are less than one step of everybody ({least}); give more")

    @property
    def learner_batch(self) -> int:
        """Sequences of one step of one replica."""
        return self.batch if self.method == "dp" else self.batch // self.learners

    @property
    def tokens_per_step(self) -> int:
        """Of one replica."""
        return self.learner_batch * self.seq

    @property
    def steps(self) -> int:
        """Nominal steps of each replica, which its learning rate follows."""
        replicas = 1 if self.method in LOCAL_METHODS else self.learners
        return self.tokens // (self.tokens_per_step * replicas)

    def config(self) -> SyncConfig:
        """The settings of the synchronisation."""
        own = {"learners_expected": self.learners, **METHOD_SETTINGS[self.method], **self.sync}
        own["tokens_budget"] = self.tokens
        return SyncConfig.from_dict(own)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LabSpec:
        """Build from untrusted data: unknown names and wrong types are errors."""
        known = {entry.name: entry for entry in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(
                    f"unknown setting {name!r} of a lab run; {meant(name, known)}known are {', '.join(known)}"
                )
            if known[name].type == "str" and not isinstance(value, str):
                raise ConfigError(f"{name} must be a text, not {value!r}")
        return cls(**values)

    @property
    def key(self) -> str:
        """Names the run: 16 hex digits of the hash of everything that decides its result."""
        text = json.dumps({"format": SPEC_FORMAT, **self.to_dict()}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class LabResult:
    """What a run of the lab gives. All losses are of the published parameters, in nats per token, held out."""

    spec: LabSpec
    loss: float
    """At the end."""
    curve: tuple[tuple[int, float], ...]
    """(tokens processed by everybody, loss), the end included."""
    tokens: int
    virtual_s: float
    """What the run took in its own world."""
    wall_s: float
    """What it took here, without the preparation of the device."""
    tokens_per_s: float
    """Here, of all learners together."""
    facts: Mapping[str, Any]
    """Whatever else is worth keeping: steps by learner, rounds, contributions by fate, waiting, bytes, rho, machine."""

    def to_dict(self) -> dict[str, Any]:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "key": self.spec.key, "spec": self.spec.to_dict(), "facts": dict(self.facts)}
