"""The ramp of the learning rate after a cold start: what the optimizer sees, and what the user's schedule sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.learner.warmup import InnerWarmup
from atoll.zoo.optim import CombinedOptimizer


def parameter() -> torch.nn.Parameter:
    value = torch.nn.Parameter(torch.zeros(3))
    value.grad = torch.ones(3)
    return value


def moved_by(optimizer: Any, value: torch.nn.Parameter) -> float:
    """With plain SGD and a gradient of ones, a step moves the parameter by the learning rate that it used."""
    before = value.detach().clone()
    optimizer.step()
    return float((before - value.detach())[0])


@settings(deadline=None)
@given(st.integers(1, 12), st.floats(1e-6, 10.0))
def test_steps_ramp_up_and_the_rate_is_untouched_in_between(steps: int, lr: float) -> None:
    value = parameter()
    optimizer = torch.optim.SGD([value], lr=lr)
    warmup = InnerWarmup(optimizer, steps)
    for k in range(steps):
        assert warmup.active and warmup.factor == (k + 1) / (steps + 1)
        assert moved_by(optimizer, value) == pytest.approx(lr * (k + 1) / (steps + 1), rel=1e-4)
        assert optimizer.param_groups[0]["lr"] == lr
    assert not warmup.active and warmup.factor == 1.0
    assert moved_by(optimizer, value) == pytest.approx(lr, rel=1e-4)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("lr", [0.3, torch.tensor(0.3)])
def test_a_schedule_goes_on_as_if_there_were_no_warmup(lr: Any) -> None:
    def rates(steps: int) -> list[float]:
        optimizer = torch.optim.AdamW([parameter()], lr=lr.clone() if isinstance(lr, torch.Tensor) else lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        InnerWarmup(optimizer, steps)
        seen = []
        for _ in range(15):
            optimizer.step()
            schedule.step()
            seen.append(float(optimizer.param_groups[0]["lr"]))
        return seen

    assert rates(6) == rates(0)


def test_a_tensor_rate_is_scaled_in_place_and_once_when_groups_share_it() -> None:
    lr = torch.tensor(0.7)
    one, two = parameter(), parameter()
    optimizer = torch.optim.SGD([{"params": [one]}, {"params": [two]}], lr=0.1)
    for group in optimizer.param_groups:
        group["lr"] = lr
    InnerWarmup(optimizer, 1)
    assert moved_by(optimizer, two) == pytest.approx(0.35) and float(one.detach()[0]) == pytest.approx(-0.35)
    assert optimizer.param_groups[0]["lr"] is lr and torch.equal(lr, torch.tensor(0.7))


def test_groups_keep_their_own_rates() -> None:
    one, two = parameter(), parameter()
    optimizer = torch.optim.SGD([{"params": [one], "lr": 1.0}, {"params": [two], "lr": 4}], lr=0.1)
    InnerWarmup(optimizer, 3)
    optimizer.step()
    assert float(one.detach()[0]) == pytest.approx(-0.25) and float(two.detach()[0]) == pytest.approx(-1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 4]


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_a_step_that_raises_leaves_no_trace(lr: Any) -> None:
    value = parameter()
    optimizer = torch.optim.SGD([value], lr=lr)
    warmup = InnerWarmup(optimizer, 4)

    def fail() -> float:
        raise ArithmeticError("the loss is not finite")

    for _ in range(3):
        with pytest.raises(ArithmeticError):
            optimizer.step(fail)
    assert moved_by(optimizer, value) == pytest.approx(0.1) and float(optimizer.param_groups[0]["lr"]) == 0.5
    with pytest.raises(ArithmeticError):
        optimizer.step(fail)
    warmup.remove()
    assert float(optimizer.param_groups[0]["lr"]) == 0.5 and moved_by(optimizer, value) == pytest.approx(0.5)


@pytest.mark.parametrize("tensor", [False, True])
def test_who_sets_the_rate_inside_of_a_step_wins(tensor: bool) -> None:
    optimizer = torch.optim.SGD([parameter()], lr=torch.tensor(0.5) if tensor else 0.5)

    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        group = optimizer.param_groups[0]
        if tensor:
            group["lr"].fill_(0.25)
        else:
            group["lr"] = 0.25

    optimizer.register_step_post_hook(halve)
    InnerWarmup(optimizer, 5)
    optimizer.step()
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


def test_other_hooks_run_through_the_end_of_the_ramp() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.5)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("before"))
    InnerWarmup(optimizer, 1)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(3):
        optimizer.step()
    assert calls == ["before", "after"] * 3


def test_a_second_ramp_replaces_the_first() -> None:
    value = parameter()
    optimizer = torch.optim.SGD([value], lr=1.0)
    first = InnerWarmup(optimizer, 9)
    optimizer.step()
    InnerWarmup(optimizer, 1)
    assert not first.active and moved_by(optimizer, value) == pytest.approx(0.5)
    assert moved_by(optimizer, value) == pytest.approx(1.0) and optimizer.param_groups[0]["lr"] == 1.0


def test_a_combination_ramps_in_all_of_its_parts() -> None:
    one, two = parameter(), parameter()
    both = CombinedOptimizer(torch.optim.SGD([one], lr=1.0), torch.optim.SGD([two], lr=2.0))
    warmup = InnerWarmup(both, 1)
    assert warmup.active
    both.step()
    assert float(one.detach()[0]) == pytest.approx(-0.5) and float(two.detach()[0]) == pytest.approx(-1.0)
    assert not warmup.active and [group["lr"] for group in both.param_groups] == [1.0, 2.0]
    both.step()
    assert float(one.detach()[0]) == pytest.approx(-1.5)


def test_without_hooks_or_steps_nothing_happens() -> None:
    class Own:
        param_groups: list[dict[str, Any]] = [{"lr": 1.0}]  # noqa: RUF012

        def step(self) -> None: ...

    value = parameter()
    optimizer = torch.optim.SGD([value], lr=1.0)
    for warmup in (InnerWarmup(Own(), 5), InnerWarmup(None, 5), InnerWarmup(optimizer, 0)):
        assert not warmup.active and warmup.factor == 1.0
        warmup.remove()
    assert moved_by(optimizer, value) == 1.0
