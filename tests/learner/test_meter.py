"""How long a step took, whatever part of it a call of `learner.step` waits for."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.learner.meter import PACE_STEPS, StepMeter
from atoll.observe import events

MS = 1_000_000


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def step(meter: StepMeter, clock: Clock, *, outside_ms: int, inside_ms: int, stall_ms: int = 0) -> float:
    clock.now_ns += outside_ms * MS
    step_ns = meter.enter()
    clock.now_ns += inside_ms * MS
    meter.leave(tokens=1, loss=math.nan, stall_ns=stall_ms * MS, adopt_ns=0, snapshot_ns=0)
    return step_ns / MS


def test_a_step_that_a_device_computes_while_the_call_waits_takes_as_long_as_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """JAX comes back from a step at once, and a snapshot waits for its arrays. Taken for steps of 0.2 ms, learners were
    told on loopback that their links are too thin."""
    clock, told = Clock(), list[Any]()
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    machine: Any = SimpleNamespace(learner="paris", generation=1, step=3, tokens=3, versions_behind=0)
    meter = StepMeter(SimpleNamespace(emit=told.append, close=lambda: None), machine)
    for _ in range(PACE_STEPS):  # every fourth call waits for what the device has had to do since the one before
        assert step(meter, clock, outside_ms=1, inside_ms=0) > 0
        for inside_ms in (0, 0, 196):
            pace = step(meter, clock, outside_ms=1, inside_ms=inside_ms)
    assert pace == 50
    step(meter, clock, outside_ms=1, inside_ms=200, stall_ms=200)
    assert step(meter, clock, outside_ms=1, inside_ms=0) == 50, "what it stood still for others is not its pace"
    clock.now_ns += 10_000 * MS
    meter.resume()
    assert step(meter, clock, outside_ms=1, inside_ms=0) <= 50, "nor is an evaluation"
    compute_ns = sum(one.compute_ns for one in told)
    assert all(isinstance(one, events.LearnerSteps) for one in told) and compute_ns <= 40 * MS
    assert sum(one.stall_ns for one in told) == 200 * MS
