"""The controller and its measurements against a modelled link: it thins out, recovers, and flaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from atoll.core.adaptive import AdaptiveController
from atoll.core.codec_ladder import USUAL, bits
from atoll.core.config import CODECS, SECOND_NS, SyncConfig
from atoll.core.events import Adapted

KNOWS = frozenset(CODECS.names())
BITS = {name: bits(name) or 0.0 for name in USUAL}
PARAMETERS = 1_000_000
STEP_S = 0.1
TICK_S = 0.05
FAT, THIN = 100e6, 1e6


@dataclass
class ModelledRun:
    """One learner with one fragment: a round is over when its answer has crossed the link, and its update, too."""

    rate_up: Callable[[float], float]
    rate_down: Callable[[float], float] = lambda at_s: FAT
    latency_s: float = 0.0
    others: tuple[str, ...] = ("rome", "oslo")
    """Who answers at once."""
    controller: AdaptiveController = field(
        default_factory=lambda: AdaptiveController(SyncConfig(adaptive="network", fragments=1))
    )
    told: list[tuple[float, Adapted]] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)

    def run(self, seconds: float) -> ModelledRun:
        made, version, fetched, number = self.controller, 0, 0, 0
        up = down = begun = due = quiet = 0.0
        for tick in range(int(seconds / TICK_S)):
            at_s = tick * TICK_S
            now_ns = int(at_s * SECOND_NS)
            if up > 0.0 and at_s >= quiet:
                up -= self.rate_up(at_s) * TICK_S
                if up <= 0.0:
                    made.links.answered("paris", 0, number, 1, now_ns)
                    version += 1
                    made.published(0, version, int(begun * SECOND_NS), now_ns)
                    self.answers.append(at_s)
            if down <= 0.0 and fetched < version:
                fetched, down = version, BITS[made.codec_down] * PARAMETERS
            if down > 0.0:
                down -= self.rate_down(at_s) * TICK_S
                if down <= 0.0:
                    made.adopted("paris", (fetched,), now_ns)
            if up <= 0.0 and at_s >= due:
                number += 1
                up, begun, due = BITS[made.codec("paris") or "int4"] * PARAMETERS, at_s, at_s + made.period * STEP_S
                quiet = at_s + self.latency_s
                for name in ("paris", *self.others):
                    made.asked(name, 0, number, now_ns)
                for name in self.others:
                    made.links.answered(name, 0, number, 1, now_ns + 1_000_000)
            if version:
                run = made.measured(STEP_S * SECOND_NS)
                asked = [(name, KNOWS) for name in ("paris", *self.others)]
                self.told += [(at_s, change) for change in made.look(now_ns, number, run, asked)]
        return self

    @property
    def state(self) -> tuple[str, int]:
        return self.controller.codec("paris") or "int4", self.controller.period

    def history(self) -> list[tuple[float, str, str]]:
        return [(round(at_s, 1), change.what, change.after) for at_s, change in self.told]


@pytest.mark.parametrize(
    ("thin", "codec", "period"),
    [(4e6, "int2", 8), (2e6, "topk:10%", 8), (1e6, "topk:3%", 8), (0.3e6, "topk:3%", 14)],
)
def test_a_link_that_thins_out_first_gets_fewer_bits_and_then_a_longer_period(
    thin: float, codec: str, period: int
) -> None:
    """int4 takes 41 ms of a period of 800 at first. Then int2 takes 530, or topk:10% 550, or topk:3% 380 or 1250."""
    made = ModelledRun(lambda at_s: thin if at_s >= 100.0 else FAT).run(300.0)
    assert made.state == (codec, pytest.approx(period, abs=1)), made.history()
    assert min(at_s for at_s, _ in made.told) >= 100.0
    assert not any("did not help" in change.reason for _, change in made.told)
    kinds = [change.what for _, change in made.told]
    assert kinds == sorted(kinds), "codecs come first"
    assert made.told[-1][0] < 160.0, "it is decided within a minute"


@pytest.mark.parametrize(("thin", "codec", "period"), [(4e6, "int2", 8), (2e6, "int2", 12), (1e6, "int2", 22)])
def test_where_it_is_everybody_s_link_the_period_grows_and_nothing_is_left_out(
    thin: float, codec: str, period: int
) -> None:
    """int2 takes 0.53, 1.06 or 2.1 s; a period of 8 has 0.8."""
    made = ModelledRun(lambda at_s: thin if at_s >= 100.0 else FAT, others=()).run(300.0)
    assert made.state == (codec, pytest.approx(period, abs=1)), made.history()
    assert made.told[-1][0] < 130.0, made.history()


def test_a_link_that_recovers_gets_its_bits_and_its_period_back() -> None:
    made = ModelledRun(lambda at_s: 0.3e6 if 100.0 <= at_s < 600.0 else FAT).run(900.0)
    assert made.state == ("int4", 8), made.history()
    assert made.told[-1][0] < 700.0, made.history()


def test_a_run_that_begins_on_a_thin_link_and_recovers_is_back_within_two_minutes() -> None:
    made = ModelledRun(lambda at_s: THIN if at_s < 600.0 else FAT).run(900.0)
    assert made.state == ("int4", 8) and made.told[-1][0] < 720.0, made.history()


def test_a_link_that_changes_every_minute_stays_with_what_its_thin_minutes_carry() -> None:
    """And is never stuck in one of them with more bits than it carries."""
    made = ModelledRun(lambda at_s: THIN if int(at_s // 60) % 2 else FAT).run(3600.0)
    thin_s = [at_s for at_s in made.answers if int(at_s // 60) % 2 and at_s > 120.0]
    gaps = [after - before for before, after in pairwise(thin_s) if after - before < 30.0]
    assert sum(gap > 5.0 for gap in gaps) <= 12, "at most one long answer for each time that it went up and came down"
    assert len(thin_s) > 0.7 * 29 * 60 / 0.8, f"{len(thin_s)} answers in thin minutes"
    assert len(made.told) <= 16, made.history()
    assert made.controller.period == 8


def test_a_link_that_is_slow_for_another_reason_than_bytes_is_told_apart() -> None:
    """A second of delay: fewer bits bring nothing, so they are given back, and the period grows."""
    made = ModelledRun(lambda at_s: FAT, latency_s=1.0).run(400.0)
    assert made.state[0] == "int4" and made.state[1] > 8, made.history()
    assert sum("did not help" in change.reason for _, change in made.told) == 1


def test_a_thin_downlink_takes_bits_of_updates_and_makes_the_period_longer_and_leaves_contributions_alone() -> None:
    """An update of 4.1 Mbit takes two seconds where a period has 0.8; one of 2.1 takes one."""
    made = ModelledRun(lambda at_s: FAT, lambda at_s: 2e6).run(300.0)
    assert made.state[0] == "int4" and 11 <= made.state[1] <= 15, made.history()
    assert made.controller.codec_down == "int2" and "fetching a version takes" in made.told[0][1].reason
    made = ModelledRun(lambda at_s: FAT, lambda at_s: 2e6 if at_s < 200.0 else FAT).run(400.0)
    assert made.state == ("int4", 8), made.history()


def test_the_reason_names_who_it_is() -> None:
    made = ModelledRun(lambda at_s: 0.3e6).run(200.0)
    periods = [change for _, change in made.told if change.what == "period"]
    assert periods and "paris needs 1,2" in periods[0].reason and "of a period of 800" in periods[0].reason
