"""What a run cannot see of a model by itself: parameters changed after joining, frozen ones that differ, buffers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import WAIT_S, SyncerThread, TrainingThread
from torch import nn

import atoll
from atoll import ConfigError, Learner, StoreError
from atoll.core.config import SyncConfig
from atoll.learner.buffers import KeptBuffers, read_buffers
from atoll.learner.watch import LOOK_STEPS, ModelWatch, frozen_checksum
from atoll.observe import events, read_events


class Tuned(nn.Module):
    """A head that is trained on a frozen body, with running statistics between them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(32, 16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 32)
        self.register_buffer("mask", torch.ones(500, 500))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(self.body(x)))
        return y


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[SyncerThread]:
    running = SyncerThread(SyncConfig(sync_every=6, fragments=1, learners_expected=1, quorum="1"), folder=tmp_path)
    yield running
    running.stop()


def warned(folder: Path) -> list[str]:
    return [event.text for _, _, event in read_events(folder) if isinstance(event, events.Warned)]


# ---------------------------------------------------------------- parameters that change hands


def unfreeze(model: Tuned) -> None:
    model.body.requires_grad_(True)


def add(model: Tuned) -> None:
    model.adapter = nn.Linear(2, 2)


def replace(model: Tuned) -> None:
    model.head = nn.Linear(16, 32)


def take_out(model: Tuned) -> None:
    model.head = nn.Identity()


def retie(model: Tuned) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (unfreeze, "unfrozen: 'body.bias', 'body.weight'"),
        (add, "added: 'adapter.bias', 'adapter.weight'"),
        (replace, "replaced: 'head.bias', 'head.weight'"),
        (retie, "replaced: 'head.weight'"),
        (take_out, "missing: 'head.bias', 'head.weight'"),
    ],
)
def test_what_is_changed_after_joining_is_told_once(change: Callable[[Tuned], None], text: str) -> None:
    model = Tuned()
    watch = ModelWatch(model, [name for name, p in model.named_parameters() if p.requires_grad])
    assert not any(watch.stepped() for _ in range(3 * LOOK_STEPS))
    change(model)
    told = [said for _ in range(3 * LOOK_STEPS) if (said := watch.stepped())]
    assert len(told) == 1 and text in told[0] and "start a new run" in told[0]


def test_what_a_run_can_follow_is_not_told() -> None:
    model = Tuned()
    watch = ModelWatch(model, [name for name, p in model.named_parameters() if p.requires_grad])
    model.head.bias.requires_grad_(False)  # still synced: others may train it
    model.head.weight.data = torch.zeros(32, 16)
    model.head = torch.compile(model.head, backend="eager")  # type: ignore[assignment]
    model.double()
    assert not any(watch.stepped() for _ in range(3 * LOOK_STEPS))


def test_a_parameter_unfrozen_in_a_run_is_in_the_events_and_a_warning(syncer: SyncerThread, tmp_path: Path) -> None:
    model = Tuned().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Learner(model, optimizer, address=syncer.address, learner_id="l", run_folder=tmp_path) as learner:
            for step in range(2 * LOOK_STEPS):
                learner.step(tokens=1)
                if step == 3:
                    unfreeze(model)
    assert len([w for w in caught if "unfrozen: 'body.bias', 'body.weight'" in str(w.message)]) == 1
    assert len([text for text in warned(tmp_path) if "unfrozen" in text]) == 1


@pytest.mark.parametrize("changed_after", [0, 8], ids=["after a step", "just before the end"])
def test_a_short_run_says_so_too(changed_after: int, syncer: SyncerThread, tmp_path: Path) -> None:
    model = Tuned().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Learner(model, optimizer, address=syncer.address, learner_id="l", run_folder=tmp_path) as learner:
            for step in range(9):
                learner.step(tokens=1)
                if step == changed_after:
                    unfreeze(model)
                said = [one for one in caught if "unfrozen" in str(one.message)]
                assert len(said) == int(step > changed_after)
    assert len([text for text in warned(tmp_path) if "unfrozen" in text]) == 1


def test_where_objects_change_by_themselves_names_are_looked_at() -> None:
    model = Tuned()
    watch = ModelWatch(model, [name for name, p in model.named_parameters() if p.requires_grad], identities=False)
    retie(model)
    assert watch.stepped() == ""
    add(model)
    assert "added: 'adapter.bias'" in watch.stepped()


# ---------------------------------------------------------------- frozen parameters


def test_the_checksum_of_frozen_parameters_tells_other_weights_names_and_types() -> None:
    assert frozen_checksum(nn.Linear(2, 2)) == 0
    one = frozen_checksum(Tuned())
    assert one == frozen_checksum(Tuned()) != 0
    assert one == frozen_checksum(torch.compile(Tuned(), backend="eager"))  # type: ignore[arg-type]
    assert one != frozen_checksum(Tuned(seed=1))
    assert one != frozen_checksum(Tuned().to(torch.bfloat16))
    other = Tuned()
    other.trunk, other.body = other.body, nn.Identity()  # type: ignore[assignment]
    assert one != frozen_checksum(other)
    large = nn.Linear(3000, 3000, bias=False).requires_grad_(False)
    before = frozen_checksum(large)
    with torch.no_grad():
        large.weight.add_(torch.randn(3000, 3000))
    assert frozen_checksum(large) != before
    assert frozen_checksum(nn.Linear(2, 2, device="meta").requires_grad_(False)) != 0


def test_learners_with_other_frozen_weights_are_told_of_and_let_in(tmp_path: Path) -> None:
    syncer = SyncerThread(SyncConfig(sync_every=6, fragments=1, quorum="1"), folder=tmp_path)
    learners = []
    for name, seed in (("a", 0), ("b", 0), ("c", 7)):
        learner = TrainingThread(syncer.address, name, model=Tuned(seed))
        learner.wait_steps(2)
        learners.append(learner)
    for learner in learners:
        learner.stop()
        assert learner.error is None
    syncer.stop()
    told = [text for text in warned(tmp_path) if "frozen parameters" in text]
    assert len(told) == 1 and "'c' differ from those of 'a'" in told[0] and "load the same frozen weights" in told[0]


# ---------------------------------------------------------------- buffers


def trained(address: str, name: str, folder: Path, steps: int, seed: int = 0) -> TrainingThread:
    learner = TrainingThread(address, name, model=Tuned(), steps=steps, seed=seed, run_folder=folder)
    learner.thread.join(WAIT_S)
    assert learner.error is None
    return learner


def test_only_buffers_that_training_changes_are_kept() -> None:
    model = Tuned()
    model.register_buffer("seen", torch.zeros(2))
    model.register_buffer("average", torch.zeros(2))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    kept = KeptBuffers(model)
    statistics = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(kept.state_dict()) == statistics
    model.seen.add_(1)  # type: ignore[operator,union-attr]
    model.average = model.average * 0.9  # type: ignore[operator]
    assert set(kept.state_dict()) == statistics | {"seen", "average"}


def test_a_restarted_learner_goes_on_with_its_own_statistics(syncer: SyncerThread, tmp_path: Path) -> None:
    first = trained(syncer.address, "a", tmp_path, 20)
    again = trained(syncer.address, "a", tmp_path, 0)
    assert int(first.model.norm.num_batches_tracked) == 20  # type: ignore[union-attr,arg-type]
    for name, buffer in first.model.norm.named_buffers():  # type: ignore[union-attr,operator]
        assert torch.equal(dict(again.model.norm.named_buffers())[name], buffer), name  # type: ignore[union-attr,operator]
    assert not [text for text in warned(tmp_path) if "not restored" in text]


def test_statistics_that_stay_local_are_told_of_when_joining(syncer: SyncerThread, tmp_path: Path) -> None:
    model = Tuned()
    with (
        pytest.warns(UserWarning, match=r"running statistics of BatchNorm1d stay .*--buffers mean"),
        Learner(model, address=syncer.address, learner_id="l", run_folder=tmp_path) as learner,
    ):
        learner.step(tokens=1)
    assert len([text for text in warned(tmp_path) if "running statistics" in text]) == 1


def test_buffers_of_one_learner_or_the_mean_of_all_are_read_back(syncer: SyncerThread, tmp_path: Path) -> None:
    one, two = (trained(syncer.address, name, tmp_path, 5, seed) for seed, name in enumerate(("a", "b/2")))
    means = [learner.model.norm.running_mean for learner in (one, two)]  # type: ignore[union-attr]
    assert not torch.equal(*means)  # type: ignore[arg-type]
    found, told = read_buffers(tmp_path, "b/2", "r1")
    assert torch.equal(torch.from_numpy(found["norm.running_mean"]), means[1])  # type: ignore[arg-type]
    assert set(found) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert told == ["buffers are those of b/2 at its step 10"]
    found, told = read_buffers(tmp_path, "mean", "r1")
    expected = (means[0] + means[1]) / 2  # type: ignore[operator]
    assert torch.allclose(torch.from_numpy(found["norm.running_mean"]), expected)
    assert int(found["norm.num_batches_tracked"]) == 5 and found["norm.num_batches_tracked"].dtype == "int64"
    assert [text.split(" at ")[0] for text in told] == ["buffers are those of a", "buffers are those of b/2"]
    with pytest.raises(StoreError, match=r"no checkpoint of nobody .*\(there are those of: a, b_2-"):
        read_buffers(tmp_path, "nobody", "r1")
    with pytest.raises(StoreError, match="no checkpoint of any learner"):
        read_buffers(tmp_path, "mean", "another run")


def test_nobody_else_may_keep_something_under_the_buffers_name(syncer: SyncerThread, tmp_path: Path) -> None:
    extra: Any = torch.optim.SGD(Tuned().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"two things are to be kept as 'atoll.buffers'"):
        Learner(Tuned(), address=syncer.address, extras={"atoll.buffers": extra}).start()


def test_an_exported_model_with_buffers_is_the_learners_model(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = Tuned(3)
    source(torch.randn(9, 32))
    tensors = {name: p.detach() for name, p in source.named_parameters() if p.requires_grad}
    save_file({**tensors, **KeptBuffers(source).state_dict()}, tmp_path / "model.safetensors")
    other = Tuned(3)
    left = atoll.load_model(tmp_path / "model.safetensors", other)
    assert set(left.missing) == {"mask", "body.weight", "body.bias"}
    x = torch.randn(5, 32)
    assert torch.equal(source.eval()(x), other.eval()(x))
