"""A link that is too thin is named, with what the run needs and what it gets; one that is not is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.codec import needed_bytes_s
from atoll.core.config import SECOND_NS, SyncConfig
from atoll.core.layout import build_layout
from atoll.core.learner_fetches import Arrival
from atoll.core.messages import TensorSpec
from atoll.learner.join_deadline import RATE_GUESSED, SAY_S, JoinDeadline
from atoll.learner.thin import TRANSFERS_MIN, LinkMeter
from atoll.observe import events


class Kept:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def test_what_a_run_needs_of_a_link() -> None:
    layout = build_layout((TensorSpec("w", (100_000,), "float32"),), 2)
    config = SyncConfig(fragments=2, codec_up="fp32")
    up = needed_bytes_s(config, layout, "up", 0.5 * SECOND_NS)
    assert up == pytest.approx(400_000 / 4.0, rel=0.01)
    assert needed_bytes_s(config, layout, "down", 0.5 * SECOND_NS) == pytest.approx(up / 8, rel=0.1)  # int4


def test_a_thin_link_is_named_once_and_again_when_it_becomes_worse(capsys: pytest.CaptureFixture[str]) -> None:
    kept = Kept()
    meter = LinkMeter("paris", kept)
    for _ in range(10):
        meter.moved("down", 50_000, 8 * SECOND_NS, 20_000.0)
    assert kept.events == [events.LinkThin("paris", "down", 20_000.0, 6_250.0)]
    assert "link down too thin: needs 160 kbit/s, gets 50 kbit/s" in capsys.readouterr().err
    for _ in range(20):
        meter.moved("down", 50_000, 20 * SECOND_NS, 20_000.0)
    assert len(kept.events) == 2
    for _ in range(20):
        meter.moved("down", 50_000, SECOND_NS, 20_000.0)
    assert len(kept.events) == 2, "it carries what is needed now"


def test_transfers_that_are_quick_say_nothing() -> None:
    kept = Kept()
    meter = LinkMeter("paris", kept)
    for _ in range(TRANSFERS_MIN + 2):
        meter.moved("up", 500, SECOND_NS // 100, 10**9)
    assert not kept.events


def test_joining_waits_for_a_thin_link_and_not_for_a_silent_one(capsys: pytest.CaptureFixture[str]) -> None:
    arriving = Arrival()
    deadline = JoinDeadline(10.0, "paris", arriving, 0.0)
    size = 200_000
    wait = {"linked": True, "started": True}
    assert not deadline.is_over(10.0 + size / RATE_GUESSED - 1, **wait, fragments=[size, size])
    arriving.came(size, 40 * SECOND_NS)
    assert not deadline.is_over(70.0, **wait, fragments=[size])
    assert "1 fragments of the model (200 kB); 200 kB came, at 40 kbit/s about 40 s are left" in capsys.readouterr().err
    assert not deadline.is_over(70.0 + 10.0 + 119.0, **wait, fragments=[size])
    assert deadline.is_over(70.0 + 10.0 + 121.0, **wait, fragments=[size])


def test_joining_a_syncer_that_is_not_there_ends_after_the_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    deadline = JoinDeadline(2 * SAY_S, "paris", Arrival(), 0.0)
    assert not deadline.is_over(2 * SAY_S - 1, linked=False, started=False, fragments=[])
    assert deadline.is_over(2 * SAY_S + 1, linked=False, started=False, fragments=[])
    assert not capsys.readouterr().err, "why nobody is there is said elsewhere"
