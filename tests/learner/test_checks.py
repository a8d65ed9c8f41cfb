"""What is given to a Learner: optimizers of libraries, lists of them, and what cannot work, refused with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cluster import WAIT_S, SyncerThread, TrainingThread, small_model
from torch import nn

from atoll import ConfigError, Learner
from atoll.core.config import SyncConfig
from atoll.learner.warmup import InnerWarmup, torch_optimizers

NOWHERE = "127.0.0.1:1"


@pytest.fixture
def syncer() -> Iterator[SyncerThread]:
    running = SyncerThread(SyncConfig(sync_every=6, fragments=2, learners_expected=1, quorum="1"))
    yield running
    running.stop()


class Shell(torch.optim.Optimizer):
    """Shaped as accelerate's AcceleratedOptimizer: a torch optimizer by its class, which was never initialised as one,
    around the one that does the work."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Imitation:
    """Shaped as Lightning's LightningOptimizer: it takes on the class of what it wraps. A state that is loaded into it
    stays with it, and never reaches the optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Imitated", (Imitation, type(optimizer)), {})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(self, closure: Any = None) -> None:
        self._optimizer.step()

    def __getattr__(self, item: str) -> Any:
        return getattr(self._optimizer, item)


def accelerated(optimizer: torch.optim.Optimizer) -> Any:
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(optimizer)


def listed(optimizer: torch.optim.Optimizer) -> Any:
    return [optimizer]


WRAPPERS = {"accelerate's shape": Shell, "Lightning's shape": Imitation, "accelerate": accelerated, "a list": listed}


class Wrapped(TrainingThread):
    """Trains with AdamW inside of a wrapper."""

    def __init__(self, address: str, name: str, wrap: Callable[[Any], Any], **options: Any) -> None:
        model = small_model()
        self.adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        super().__init__(address, name, model=model, optimizer=wrap(self.adam), **options)
        self.optimizer = self.adam


@pytest.mark.parametrize("how", WRAPPERS)
def test_a_late_learner_with_a_librarys_optimizer_warms_up(how: str, syncer: SyncerThread) -> None:
    first = Wrapped(syncer.address, "a", lambda adam: adam, steps=30)
    first.thread.join(WAIT_S)
    late = Wrapped(syncer.address, "b", WRAPPERS[how], steps=40)
    seen = []
    late.adam.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    late.thread.join(WAIT_S)
    assert first.error is None and late.error is None
    assert late.learner.start_step > 0 and len(late.adam.state) == 4
    assert late.adam.param_groups[0]["lr"] == 1e-3 and len(seen) == 40


@pytest.mark.parametrize("how", WRAPPERS)
def test_a_restarted_learner_gets_its_state_back_through_the_wrapper(
    how: str, syncer: SyncerThread, tmp_path: Path
) -> None:
    first = Wrapped(syncer.address, "a", WRAPPERS[how], steps=20, run_folder=tmp_path)
    first.thread.join(WAIT_S)
    again = Wrapped(syncer.address, "a", WRAPPERS[how], steps=0, run_folder=tmp_path)
    again.thread.join(WAIT_S)
    assert first.error is None and again.error is None and again.learner.generation == 2
    assert [int(state["step"]) for state in again.adam.state.values()] == [20] * 4


def test_a_ramp_is_put_on_every_optimizer_of_a_list() -> None:
    values = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parts = [torch.optim.SGD([value], lr=1.0) for value in values]
    model = nn.ParameterList(values)
    learner = Learner(model, [parts[0], Shell(parts[1]), Shell(Shell(parts[2]))], address=NOWHERE)  # type: ignore[list-item]
    assert list(torch_optimizers(learner._optimizer)) == parts
    InnerWarmup(learner._optimizer, 1)
    for value, part in zip(values, parts, strict=True):
        value.grad = torch.ones(2)
        part.step()
        assert value.detach().tolist() == [-0.5, -0.5] and part.param_groups[0]["lr"] == 1.0


def test_a_wrapper_with_state_of_its_own_keeps_it() -> None:
    class Lookahead(Shell):
        def state_dict(self) -> dict[str, Any]:
            return {**self.optimizer.state_dict(), "slow": {}}

    model = small_model()
    slow = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    assert Learner(model, slow, address=NOWHERE)._optimizer is slow


class Wheel:
    """A schedule that is not torch's."""

    def get_last_lr(self) -> list[float]:
        return [0.1]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m, o: torch.optim.lr_scheduler.StepLR(o, 10), "is a schedule; .*extras="),
        (lambda m, o: Wheel(), "is a schedule; .*extras="),
        (lambda m, o: o.step, "not <bound method.*; give what you call"),
        (lambda m, o: m.parameters(), "must be a torch optimizer or a list of them"),
        (lambda m, o: m, "must be a torch optimizer"),
        (lambda m, o: torch.optim.SGD(small_model().parameters(), lr=0.1), "steps no parameter of this model"),
        (lambda m, o: [o, torch.optim.SGD(small_model().parameters(), lr=0.1)], "steps no parameter of this model"),
        (lambda m, o: [o, None], "no None"),
        (lambda m, o: [], "at least one"),
    ],
)
def test_what_is_no_optimizer_of_this_model_is_refused(make: Callable[[Any, Any], Any], text: str) -> None:
    model = small_model()
    with pytest.raises(ConfigError, match=text):
        Learner(model, make(model, torch.optim.SGD(model.parameters(), lr=0.1)), address=NOWHERE)


def test_a_model_and_an_optimizer_in_the_wrong_order_are_told_apart() -> None:
    model = small_model()
    with pytest.raises(ConfigError, match=r"not SGD; give atoll.Learner\(model, optimizer\)"):
        Learner(torch.optim.SGD(model.parameters(), lr=0.1), model, address=NOWHERE)


# ---------------------------------------------------------------- several ranks, sharded models


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fsdp1_is_refused_with_what_to_do(one_rank: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with pytest.raises(ConfigError, match=r"FSDP1.*fully_shard"):
        Learner(FullyShardedDataParallel(small_model(), device_id=torch.device("cpu")), address=NOWHERE)


def test_a_group_of_one_rank_is_one_process(one_rank: None) -> None:
    Learner(nn.parallel.DistributedDataParallel(small_model()), address=NOWHERE)


# ---------------------------------------------------------------- tokens


def test_tokens_are_any_whole_number_and_a_wrong_one_counts_nothing(syncer: SyncerThread) -> None:
    with Learner(small_model(), address=syncer.address, learner_id="l") as learner:
        for tokens in (7, np.int64(7), np.uint8(7), torch.tensor(7), torch.tensor([7], dtype=torch.int32)):
            learner.step(tokens=tokens)
        wrong: list[Any] = [True, np.True_, torch.tensor(True), 0, -1, 1.0, np.float32(3), torch.tensor(2.0), "7", None]
        for tokens in [*wrong, torch.tensor([1, 2]), 2**40 + 1, 10**30, 10**5000]:
            with pytest.raises(ConfigError, match=r"at least 1 and at most 2\*\*40"):
                learner.step(tokens=tokens)
        assert learner.step_count == 5 and learner._machine.tokens == 35
        learner.step(tokens=2**40)
        assert learner._machine.tokens == 35 + 2**40
