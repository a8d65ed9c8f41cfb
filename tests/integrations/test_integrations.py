"""The loops that others have written, with the real libraries and a real syncer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster import SyncerThread, TrainingThread
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from atoll.core import SyncConfig
from atoll.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def config(**changes: Any) -> SyncConfig:
    return SyncConfig.from_dict({"sync_every": 4, "fragments": 2, "learners_expected": 1, **changes})


@pytest.fixture
def syncer() -> Iterator[SyncerThread]:
    thread = SyncerThread(config())
    yield thread
    thread.stop()


# ---------------------------------------------------------------- examples, as a user runs them


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("hf", "transformers"),
        ("lightning", "lightning"),
        ("accelerate", "accelerate"),
        ("lora", "peft"),
        ("jax", "optax"),
        ("flax", "flax"),
    ],
)
def test_an_example_trains_two_learners_of_one_model(name: str, library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    script = EXAMPLES / f"train_{name}.py"
    added = [line for line in script.read_text().splitlines() if "# Atoll, line" in line]
    assert 2 <= len(added) <= 4
    command = [
        sys.executable,
        "-m",
        "atoll",
        "run",
        "--learners",
        "2",
        "--sync-every",
        "4",
        "--out",
        str(tmp_path / "run"),
    ]
    ended = subprocess.run(
        [*command, "--", sys.executable, str(script), "--steps", "40"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["ledger"]["merged"] > 0, result
    with safe_open(tmp_path / "run" / "model.safetensors", "np") as model:
        assert list(model.keys())


# ---------------------------------------------------------------- Hugging Face Trainer


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, seen: list[int] | None = None) -> None:
        self.seen = seen if seen is not None else []

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.seen.append(index)
        return {"x": torch.full((32,), index / 64.0)}


class Small(nn.Module):
    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 32))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - x).square().mean()}


def hf_trainer(folder: Path, syncer: SyncerThread, name: str, *, seen: list[int] | None = None, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    from atoll.integrations.hf import AtollCallback

    args = transformers.TrainingArguments(
        output_dir=str(folder / name),
        per_device_train_batch_size=4,
        learning_rate=0.01,
        warmup_steps=10,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **{"max_steps": 40, "save_strategy": "no", **more},
    )
    callback = AtollCallback(address=syncer.address, learner_id=name, run_folder=folder)
    trainer = transformers.Trainer(
        model=Small(), args=args, train_dataset=Pairs(seen), eval_dataset=Pairs(), callbacks=[callback]
    )
    return trainer, callback


def test_the_trainer_counts_the_runs_steps_and_a_late_joiner_has_the_right_rate(
    syncer: SyncerThread, tmp_path: Path
) -> None:
    first, callback = hf_trainer(tmp_path, syncer, "first", max_steps=24)
    first.train()
    assert callback.learner.step_count == 24 and first.state.global_step == 24
    assert callback.learner.closed and callback.learner.handed_over
    late, callback = hf_trainer(tmp_path, syncer, "late", logging_steps=1)
    late.train()
    assert late.state.global_step == 40
    rates = [(row["step"], row["learning_rate"]) for row in late.state.log_history if "learning_rate" in row]
    assert rates[0][0] == 25, "it begins where the run is"
    expected = 0.01 * (40 - 24) / 30  # past the warm-up, on the linear way down; the rate of the step that was taken
    assert rates[0][1] == pytest.approx(expected, rel=1e-6)
    stats = syncer.check_ledger()
    assert stats["tokens_processed"] == 40 * 4 * 32, "tokens are counted by the Trainer"


def test_evaluations_saves_and_the_model_afterwards_are_the_published_one(syncer: SyncerThread, tmp_path: Path) -> None:
    trainer, callback = hf_trainer(
        tmp_path, syncer, "l", eval_strategy="steps", eval_steps=10, save_strategy="steps", save_steps=20, max_steps=30
    )
    looked: list[bool] = []
    evaluate = trainer.evaluate

    def watched(*arguments: Any, **named: Any) -> Any:
        published = callback.learner.published_state_dict()
        own = dict(trainer.model.named_parameters())
        looked.append(all(torch.equal(own[name].detach(), value) for name, value in published.items()))
        return evaluate(*arguments, **named)

    kept: list[dict[str, torch.Tensor]] = []
    save = trainer._save_checkpoint

    def saved_as(*arguments: Any, **named: Any) -> Any:
        kept.append(callback.learner.published_state_dict())
        return save(*arguments, **named)

    trainer.evaluate, trainer._save_checkpoint = watched, saved_as
    trainer.train()
    assert len(looked) == 3 and all(looked)
    published = callback.learner.published_state_dict()
    assert all(torch.equal(dict(trainer.model.named_parameters())[n].detach(), v) for n, v in published.items())
    saved = load_file(tmp_path / "l" / "checkpoint-20" / "model.safetensors")
    assert saved.keys() == published.keys()
    assert all(torch.equal(saved[name], value) for name, value in kept[0].items()), (
        "what is saved is the published model"
    )


def test_learners_shuffle_apart_and_a_restarted_one_reads_on(syncer: SyncerThread, tmp_path: Path) -> None:
    orders: list[list[int]] = []
    for name in ("a", "b", "a"):
        seen: list[int] = []
        clock = syncer.ask(lambda shell: shell.machine.book.clock_last)
        hf_trainer(tmp_path, syncer, name, seen=seen, max_steps=clock + 4)[0].train()
        orders.append(seen[:16])
    assert len({tuple(order) for order in orders}) == 3, orders


def test_a_token_budget_ends_the_trainer(tmp_path: Path) -> None:
    syncer = SyncerThread(config(tokens_budget=10 * 4 * 32))
    try:
        trainer, callback = hf_trainer(tmp_path, syncer, "l", max_steps=100_000)
        trainer.train()
        assert callback.learner.done and trainer.state.global_step < 100_000
    finally:
        syncer.stop()


def test_a_callback_in_two_trainers_is_refused(syncer: SyncerThread, tmp_path: Path) -> None:
    trainer, callback = hf_trainer(tmp_path, syncer, "l", max_steps=4)
    with pytest.raises(ConfigError, match="once training has begun"):
        _ = callback.learner
    callback._loop.begin(trainer.model, torch.optim.SGD(trainer.model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="give each trainer its own"):
        trainer.train()
    callback._loop.end()


def orders(learner: str, make: Callable[[int], Any]) -> list[list[int]]:
    """What each of two ranks of this learner reads."""
    from atoll.integrations.loop import LearnerLoop, samplers_of

    read = []
    for rank in range(2):
        loader, loop = make(rank), LearnerLoop({})
        loop._learner = SimpleNamespace(learner_id=learner, generation=1)  # type: ignore[assignment]
        loop.seed(samplers_of(loader))
        read.append([int(index) for batch in loader for index in batch])
    return read


def by_torch(rank: int) -> Any:
    sampler = torch.utils.data.DistributedSampler(range(64), 2, rank, shuffle=True)  # type: ignore[arg-type]
    return torch.utils.data.DataLoader(range(64), 4, sampler=sampler)  # type: ignore[arg-type]


def by_accelerate(rank: int) -> Any:
    loaders = pytest.importorskip("accelerate.data_loader")
    drawn = loaders.SeedableRandomSampler(range(64), data_seed=42)
    shared = loaders.BatchSamplerShard(torch.utils.data.BatchSampler(drawn, 4, drop_last=False), 2, rank)
    return torch.utils.data.DataLoader(range(64), batch_sampler=shared)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [by_torch, by_accelerate])
def test_learners_of_several_ranks_shuffle_apart_and_their_ranks_together(make: Callable[[int], Any]) -> None:
    one, other = orders("learner-0", make), orders("learner-1", make)
    for ranks in (one, other):
        assert sorted(ranks[0] + ranks[1]) == list(range(64)), "every sample is read by one rank"
    assert one[0] != other[0] and one == orders("learner-0", make)


def test_ranks_say_parts_that_add_up_to_what_the_trainer_counted() -> None:
    pytest.importorskip("transformers")
    from atoll.integrations.hf import own_share

    for tokens, size in ((7, 2), (1, 4), (4096, 3)):
        ranks = [SimpleNamespace(island_size=size, island_rank=rank) for rank in range(size)]
        assert sum(own_share(tokens, rank) for rank in ranks) == tokens


def test_two_callbacks_in_one_trainer_are_refused_with_the_remedy(syncer: SyncerThread, tmp_path: Path) -> None:
    """The second one would take the first one's id, and fence it."""
    trainer, callback = hf_trainer(tmp_path, syncer, "l", max_steps=4)
    from atoll.integrations.hf import AtollCallback

    trainer.add_callback(AtollCallback(address=syncer.address, learner_id="l", run_folder=tmp_path))
    with pytest.raises(ConfigError, match=r"two callbacks are in one trainer.*give one callback to one trainer"):
        trainer.train()
    callback._loop.end(finished=False)
    again, callback = hf_trainer(tmp_path, syncer, "l", max_steps=callback.learner.step_count + 2)
    again.train()
    assert callback.learner.handed_over, "one after the other is no matter"


# ---------------------------------------------------------------- LoRA


def test_only_adapters_travel(syncer: SyncerThread) -> None:
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(32, 200), nn.Tanh(), nn.Linear(200, 32))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    adapters = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert 0 < sum(adapters.values()) < 0.2 * sum(p.numel() for p in model.parameters())
    thread = TrainingThread(syncer.address, "l", steps=12, model=model)
    thread.thread.join(120)
    assert thread.error is None and thread.learner.handed_over
    tensors = syncer.ask(lambda shell: [(spec.name, spec.shape) for spec in shell.state.layout.tensors])
    assert {name for name, _ in tensors} == set(adapters) and all("lora_" in name for name, _ in tensors)
    sizes = syncer.ask(lambda shell: [fragment.theta.size for fragment in shell.state.fragments])
    padding = 256 * len(adapters)
    assert sum(sizes) <= sum(adapters.values()) + padding, "nothing of the frozen model is merged or sent"


# ---------------------------------------------------------------- Lightning


def test_lightning_counts_the_runs_steps_and_validates_the_published_model(
    syncer: SyncerThread, tmp_path: Path
) -> None:
    lightning = pytest.importorskip("lightning")
    from atoll.integrations.lightning import AtollCallback

    looked: list[bool] = []

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.small = Small()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.small(batch["x"])["loss"]

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            published = callback.learner.published_state_dict() if not self.trainer.sanity_checking else {}
            own = dict(self.named_parameters())
            looked.append(all(torch.equal(own[name].detach(), value) for name, value in published.items()))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 40)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    for name, steps, begins in (("first", 12, 0), ("late", 20, 12)):
        callback = AtollCallback(
            tokens=lambda batch: batch["x"].numel(), address=syncer.address, learner_id=name, run_folder=tmp_path
        )
        trainer = lightning.Trainer(
            max_steps=steps,
            accumulate_grad_batches=2,
            callbacks=[callback],
            default_root_dir=tmp_path / name,
            enable_checkpointing=False,
            val_check_interval=4,
            **quiet,
        )
        loaders = [torch.utils.data.DataLoader(Pairs(), 4, shuffle=shuffle) for shuffle in (True, False)]
        module = Module()
        trainer.fit(module, *loaders)
        assert trainer.global_step == steps == callback.learner.step_count
        assert callback.learner.start_step == begins
        assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * (1 - steps / 40))
        published = callback.learner.published_state_dict()
        assert all(torch.equal(dict(module.named_parameters())[n].detach(), v) for n, v in published.items())
        assert callback.learner.closed
    assert looked and all(looked)
    assert syncer.check_ledger()["tokens_processed"] == 20 * 2 * 4 * 32


def test_after_it_was_closed_a_learners_model_can_be_the_published_one(syncer: SyncerThread) -> None:
    thread = TrainingThread(syncer.address, "l", steps=10)
    thread.thread.join(60)
    thread.learner.adopt_published()
    published = thread.learner.published_state_dict()
    assert all(torch.equal(dict(thread.model.named_parameters())[n].detach(), v) for n, v in published.items())
