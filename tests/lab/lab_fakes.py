"""A runner without a model: what it gives follows from the spec alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.instruments.lab.spec import LabResult, LabSpec
from atoll.instruments.lab.store import RunRecord
from atoll.instruments.lab.study import Study, load_study

Progress = Callable[[int, int], None]


def fake_loss(spec: LabSpec) -> float:
    """Data-parallel: 2 plus the seed's luck. Others are 1% worse per learner, on every seed alike."""
    luck = {0: 0.0, 1: 0.1, 2: -0.1}[spec.seed % 3]
    best = (2.0 if spec.optimizer == "adamw" else 1.8) + luck
    return best * (1.0 if spec.method in ("dp", "single") else 1.0 + spec.learners / 100.0)


def fake_result(spec: LabSpec, loss: float | None = None, **facts: Any) -> LabResult:
    end = fake_loss(spec) if loss is None else loss
    return LabResult(
        spec=spec,
        loss=end,
        curve=((spec.tokens // 2, end + 1.0), (spec.tokens, end)),
        tokens=spec.tokens,
        virtual_s=float(spec.steps),
        wall_s=spec.tokens / 1000.0,
        tokens_per_s=1000.0,
        facts={"rho": 0.5, "device": "a fake", "steps": {"learner-0": spec.steps}, **facts},
    )


class FakeRunner:
    """Remembers what it ran. `fails` and `stops` name seeds of runs that go wrong."""

    def __init__(self, *, fails: Callable[[LabSpec], bool] = lambda spec: False, stops_after: int = -1) -> None:
        self.ran: list[LabSpec] = []
        self._fails = fails
        self._stops_after = stops_after

    def __call__(self, spec: LabSpec, *, progress: Progress | None = None) -> LabResult:
        if len(self.ran) == self._stops_after:
            raise KeyboardInterrupt
        self.ran.append(spec)
        if self._fails(spec):
            raise RuntimeError("out of memory")
        if progress is not None:
            progress(spec.tokens // 2, spec.tokens)
            progress(spec.tokens, spec.tokens)
        return fake_result(spec)


SMALL = """
name = "small"
baseline = "dp"
seeds = [0, 1, 2]
columns = ["rho"]

[base]
model = "nano"
batch = 8
seq = 16
tokens = 12800
optimizer = ["adamw", "muon"]

[base.sync]
outer_lr = 0.5

[[arm]]
label = "dp"
method = "dp"

[[arm]]
label = "decoupled"
learners = [2, 4]
"""


def small_study(folder: Path, text: str = SMALL) -> Study:
    file = folder / "small.toml"
    file.write_text(text)
    return load_study(file)


def records_of(study: Study, **changes: Any) -> dict[str, RunRecord]:
    """All of its runs, done."""
    return {one.spec.key: RunRecord.of(fake_result(one.spec), label=one.label) for one in study.planned}
