"""Optimizers, the schedule, the meter and the slow-down."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.observe.events import LearnerSteps
from atoll.zoo import SlowDown, StepReporter, build_model, load_corpus, lr_at, make_optimizer, pacing, set_lr
from atoll.zoo.corpus import Batches
from atoll.zoo.gpt import next_byte_loss
from atoll.zoo.optim import CombinedOptimizer

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_loss_falls_in_thirty_steps() -> None:
    model = build_model("nano", 0)
    optimizer = make_optimizer(model, "adamw", model.config.lr)
    batches = Batches(load_corpus("stdlib").shard(0, 4), batch=8, seq=64, seed=0)
    losses = []
    for step in range(30):
        set_lr(optimizer, lr_at(step, 30, peak=model.config.lr))
        loss = next_byte_loss(model, *next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 3.8 < 5.0 < losses[0]


def test_weight_decay_is_for_hidden_matrices_only() -> None:
    model = build_model("tiny", 0)
    decay = {id(p): g["weight_decay"] for g in make_optimizer(model, "adamw", 1e-3).param_groups for p in g["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert (decay[id(parameter)] > 0) == name.startswith("blocks.")


def test_frozen_parameters_are_left_out() -> None:
    model = build_model("tiny", 0)
    model.embed.weight.requires_grad_(False)
    given_to = [p for g in make_optimizer(model, "adamw", 1e-3).param_groups for p in g["params"]]
    assert all(p is not model.embed.weight for p in given_to)


def test_combined_optimizer_steps_sets_lr_and_restores() -> None:
    one, two = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    both = CombinedOptimizer(torch.optim.SGD([one], lr=1.0, momentum=0.9), torch.optim.AdamW([two], lr=1.0))
    set_lr(both, 0.5)
    for parameter in (one, two):
        parameter.grad = torch.ones(2)
    both.step()
    assert torch.allclose(one, torch.full((2,), 0.5)) and not torch.equal(two, torch.ones(2))
    both.zero_grad()
    assert one.grad is None and two.grad is None and set(both.state) == {one, two}
    fresh = CombinedOptimizer(torch.optim.SGD([one], lr=1.0, momentum=0.9), torch.optim.AdamW([two], lr=1.0))
    fresh.load_state_dict(both.state_dict())
    assert fresh.param_groups[0]["lr"] == 0.5 and torch.equal(fresh.state[one]["momentum_buffer"], torch.ones(2))


def test_unknown_optimizer() -> None:
    with pytest.raises(ConfigError, match="muon, adamw, sgd"):
        make_optimizer(build_model("nano", 0), "lion", 1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
def test_muon_learns(device: str) -> None:
    model = build_model("nano", 0).to(device)
    optimizer = make_optimizer(model, "muon", 3e-3)
    tokens = torch.randint(256, (4, 65), device=device)
    first = next_byte_loss(model, tokens[:, :-1], tokens[:, 1:]).item()
    for _ in range(30):
        optimizer.zero_grad()
        loss = next_byte_loss(model, tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < first - 1.0


def test_schedule_shape() -> None:
    cosine = [lr_at(step, 100, peak=1.0, warmup=10) for step in range(130)]
    assert cosine[0] == pytest.approx(1 / 11) and cosine[10] == pytest.approx(1.0)
    assert cosine[:11] == sorted(cosine[:11]) and cosine[10:101] == sorted(cosine[10:101], reverse=True)
    assert cosine[55] == pytest.approx(0.55) and cosine[100] == cosine[129] == pytest.approx(0.1)
    wsd = [lr_at(step, 100, peak=2.0, warmup=10, schedule="wsd") for step in range(120)]
    assert set(wsd[10:81]) == {2.0} and wsd[90] == pytest.approx(2.0 * 0.55) and wsd[110] == pytest.approx(0.2)
    assert lr_at(70, 100, peak=3.0, schedule="constant") == 3.0
    with pytest.raises(ConfigError, match="cosine, wsd, constant"):
        lr_at(0, 10, peak=1.0, schedule="step")


@given(st.integers(0, 10_000), st.integers(1, 5_000), st.sampled_from(["cosine", "wsd", "constant"]))
def test_learning_rate_is_always_positive_and_at_most_the_peak(step: int, total: int, schedule: str) -> None:
    lr = lr_at(step, total, peak=0.5, schedule=schedule)
    assert 0 < lr <= 0.5 and math.isfinite(lr)


def test_meter_adds_up_and_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr(pacing.time, "monotonic_ns", lambda: clock[0])
    events: list[LearnerSteps] = []
    meter = StepReporter("l0", events.append)
    for step in range(100):
        clock[0] += 50_000_000  # 20 steps a second
        meter.step(tokens=10, loss=torch.tensor(float(step)), stall_ns=20_000_000)
        if step == 50:
            clock[0] += 70_000_000
            meter.overhead(70_000_000)
    meter.flush()
    meter.flush()
    seconds = clock[0] / 1e9
    assert len(events) <= 4 * seconds + 1
    assert sum(e.steps for e in events) == 100 and sum(e.tokens for e in events) == 1000
    assert events[-1].step == 100 and events[-1].tokens_total == 1000
    assert sum(e.compute_ns + e.stall_ns + e.overhead_ns for e in events) == clock[0]
    assert sum(e.stall_ns for e in events) == 2_000_000_000 and sum(e.overhead_ns for e in events) == 70_000_000
    assert events[0].loss == pytest.approx(2.0)  # mean of 0..4


def test_slow_down_follows_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "SLOW_CHECK_S", 0.0)
    file = tmp_path / "slow.json"
    slow = SlowDown(file)
    assert slow.after_step(0.01) == 0.0
    file.write_text(json.dumps({"factor": 4}))
    began = time.perf_counter()
    assert slow.after_step(0.01) == pytest.approx(0.03)
    assert time.perf_counter() - began >= 0.03
    for broken in ("", "[]", '{"factor": "x"}', '{"factor": 0.5}', '{"factor": null}', '{"factor": NaN}'):
        file.write_text(broken)
        assert slow.after_step(0.01) == 0.0
    file.unlink()
    assert slow.after_step(0.01) == 0.0
    assert SlowDown(None).after_step(1.0) == 0.0
