"""`atoll plan --adaptive`: the run's own controller, on the planner's links."""

from __future__ import annotations

import pytest

from atoll.instruments.plan import make_plan
from atoll.instruments.plan.job import Job, Region
from atoll.instruments.plan.show import settled


def job(*regions: Region) -> Job:
    learners = sum(region.learners for region in regions)
    return Job(parameters=300_000_000, step_s=1.0, learners=learners, regions=regions)


def test_a_thin_place_is_asked_for_fewer_bits_and_the_others_for_none() -> None:
    places = (Region("fat", 3, 1.0, 1.0), Region("thin", 1, 0.02, 1.0))
    plan = make_plan(job(*places), {"adaptive": "network", "sync_every": 8, "quorum": "50%"})
    assert plan.settled is not None
    codecs = dict(plan.settled.codecs)
    assert codecs["fat"] == "int4" and codecs["thin"] != "int4"
    lines = settled(plan)
    assert lines[0].startswith("adaptive: H 8, ") and any("thin int4 -> topk:3%: " in line for line in lines)
    assert plan.to_dict()["adaptive"]["period"] == 8


def test_where_every_link_is_thin_the_period_grows_within_its_bounds() -> None:
    plan = make_plan(
        job(Region("a", 4, 0.001, 0.001)), {"adaptive": "network", "sync_every": 8, "period_max": 20, "overlap": 2}
    )
    assert plan.settled is not None and plan.settled.period == 20
    assert {decision.what for decision in plan.settled.decisions} >= {"codec_up", "period"}


def test_without_adaptive_nothing_is_said_of_it() -> None:
    plan = make_plan(job(Region("a", 4, 1.0, 1.0)))
    assert plan.settled is None and not settled(plan)


@pytest.mark.parametrize("given", [{}, {"period_max": 16}])
def test_the_planner_s_own_period_stays_within_the_bounds(given: dict[str, int]) -> None:
    plan = make_plan(job(Region("a", 4, 0.001, 0.001)), {"adaptive": "network", **given})
    assert 4 <= plan.settings.sync.sync_every <= given.get("period_max", 64)


def test_needs_and_verdict_go_by_what_was_decided() -> None:
    """20 Mbit/s up carry topk:3% of 300M parameters, and int4 not by far."""
    places = (Region("fat", 3, 1.0, 1.0), Region("thin", 1, 0.02, 1.0))
    plan = make_plan(job(*places), {"adaptive": "network", "sync_every": 8})
    uplink = next(limit for limit in plan.limits if limit.name == "uplink of thin")
    assert uplink.met and plan.fits, plan.binding
    assert plan.rates.syncer_in < 4 * plan.rates.learner_up, "the thin one sends less than the others"
    fixed = make_plan(job(*places), {"sync_every": 8})
    assert fixed.binding is not None and fixed.binding.name == "uplink of thin"


def test_thin_downlinks_of_most_make_the_period_longer() -> None:
    plan = make_plan(job(Region("a", 4, 1.0, 0.2)), {"adaptive": "network", "sync_every": 8})
    assert plan.settled is not None and plan.settled.period > 8 and plan.fits, plan.binding
    assert dict(plan.settled.codecs) == {"a": "int4"}
    assert "fetching a version takes" in plan.settled.decisions[0].reason
