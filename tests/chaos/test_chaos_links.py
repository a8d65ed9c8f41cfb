"""A learner behind a bad link: nothing crashes, nobody waits, the run goes on, and the books balance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chaos_run import Run

from atoll.instruments.chaos import PERFECT, Way, Weather


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    run.stop()


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_one_way_partition_costs_nobody_a_step(run: Run, direction: str) -> None:
    run.go_on()
    run.proxy.set("far", Weather(**{direction: Way(blocked=True)}))
    before = run.proxy.stats("far")
    run.near.wait_steps(100)
    run.far.wait_steps(100)
    after = run.proxy.stats("far")
    assert getattr(after, f"bytes_{direction}") == getattr(before, f"bytes_{direction}")
    run.proxy.set("far", PERFECT)
    run.go_on()
    assert run.finish()["tokens_discarded"] == {}


def test_a_thin_and_slow_link_that_is_cut_and_stalls_again_and_again(run: Run) -> None:
    run.go_on()
    way = Way(delay_s=0.05, bits_per_s=2e6)
    for _ in range(4):
        run.proxy.set("far", Weather(up=way, down=way))
        run.far.wait_steps(15)
        run.proxy.cut("far")
        run.proxy.set("far", Weather(up=Way(stalled=True), down=Way(stalled=True)))
        run.far.wait_steps(15)
    run.proxy.set("far", PERFECT)
    run.go_on()
    assert run.proxy.stats("far").cuts > 0
    assert run.finish()["tokens_discarded"] == {}
