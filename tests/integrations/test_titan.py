"""torchtitan's own trainer as a learner, as far as its classes run on a CPU: see titan_cpu."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import SyncerThread

sys.path.insert(0, str(Path(__file__).parent))

import titan_cpu

from atoll.core import SyncConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
titan_cpu.without_kernels()
pytest.importorskip("torchtitan")


@pytest.fixture
def syncer() -> Iterator[SyncerThread]:
    thread = SyncerThread(SyncConfig(sync_every=4, fragments=2, learners_expected=1))
    yield thread
    thread.stop()


def trainer_of(syncer: SyncerThread, name: str, steps: int, folder: Path, validated: list[Any]) -> Any:
    titan_cpu.prepare()
    from atoll.integrations.titan import AtollTrainer

    class Mine(AtollTrainer):
        learner_options = {"address": syncer.address, "learner_id": name, "run_folder": folder}  # noqa: RUF012

    titan_cpu.register(f"tiny-{name}-{id(validated)}", validated)
    return Mine(titan_cpu.job(f"tiny-{name}-{id(validated)}", steps, str(folder / name)))


def plain(named: dict[str, Any]) -> dict[str, Any]:
    """The run knows a tensor by its name without what torchtitan's activation checkpointing puts into it."""
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in named.items()}


def test_torchtitans_trainer_counts_the_runs_steps_and_validates_the_published_model(
    syncer: SyncerThread, tmp_path: Path
) -> None:
    rates: list[float] = []
    for name, steps, begins in (("first", 12, 0), ("late", 20, 12)):
        validated: list[Any] = []
        trainer = trainer_of(syncer, name, steps, tmp_path, validated)
        step = trainer.train_step

        published: list[Any] = []

        def watched(data: Any, trainer: Any = trainer, step: Any = step, published: Any = published) -> None:
            rates.append(trainer.lr_schedulers.schedulers[0].get_last_lr()[0])
            step(data)
            if trainer.step % 5 == 0:
                published.append(trainer.learner.published_state_dict())

        trainer.train_step = watched
        trainer.train()
        assert trainer.step == steps == trainer.learner.step_count and trainer.learner.start_step == begins
        assert trainer.learner.closed and trainer.learner.handed_over
        own = plain(dict(trainer.model_parts[0].named_parameters()))
        last = trainer.learner.published_state_dict()
        other = [name for name, value in last.items() if not torch.equal(own[name].detach(), value)]
        assert not other, f"it is the published model when it is over: {other}, {[own[n].isnan().any() for n in other]}"
        assert [step for step, _ in validated] == [step for step in range(begins + 1, steps + 1) if step % 5 == 0]
        for (_, seen), there in zip(validated, published, strict=True):
            assert all(torch.equal(plain(seen)[name], value) for name, value in there.items())
        trainer.close()
    assert rates[12] == pytest.approx(0.008), "the late one joins on the way down from step 10 to step 20"
    assert rates[0] == pytest.approx(0.001)
    assert syncer.check_ledger()["tokens_processed"] == 20 * 4 * 16


def test_the_example_is_torchtitans_entry_point_with_atolls_trainer(
    syncer: SyncerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script, with a job that a CPU can train in the place of the one on its command line."""
    titan_cpu.prepare()
    titan_cpu.register("tiny-example", [])
    told: list[Any] = []

    def main(trainer: type[Any]) -> None:
        monkeypatch.setattr(trainer, "learner_options", {"address": syncer.address, "learner_id": "l"})
        told.append(trainer(titan_cpu.job("tiny-example", 6, str(tmp_path))))
        told[0].train()

    monkeypatch.setattr("torchtitan.train.main", main)
    runpy.run_path(str(EXAMPLES / "train_titan.py"), run_name="__main__")
    assert told[0].learner.step_count == 6 and told[0].learner.handed_over
    told[0].close()


def test_a_token_budget_ends_torchtitan(tmp_path: Path) -> None:
    syncer = SyncerThread(SyncConfig(sync_every=4, fragments=2, tokens_budget=10 * 64))
    try:
        trainer = trainer_of(syncer, "l", 1_000_000, tmp_path, [])
        trainer.train()
        assert trainer.learner.done and trainer.step < 1_000_000
    finally:
        syncer.stop()
