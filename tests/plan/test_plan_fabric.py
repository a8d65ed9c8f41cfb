"""`atoll plan --sites`: how many shards and relays a job needs, and why."""

from __future__ import annotations

import json

import pytest

from atoll.errors import ConfigError
from atoll.instruments.plan import job_from, make_plan

LARGE = {"parameters": "100B", "learners": 16, "sites": 4, "step_s": 10.0, "up_gbit": 4.0}
SMALL = {**LARGE, "parameters": "100M", "sites": 2}


def needs(plan, name: str) -> float:  # type: ignore[no-untyped-def]
    return next(one.need for one in plan.limits if one.name == name)


def test_a_large_job_gets_as_many_shards_as_its_state_needs_memory_for() -> None:
    plan = make_plan(job_from({**LARGE, "disk_gbyte_s": 10.0}))
    assert plan.fabric is not None and plan.fits
    state = plan.memory.total
    assert plan.fabric.shards == 12  # the least of those tried that leaves a fifth of 256 GB
    assert 0.8 * 8 * 256e9 < state <= 0.8 * 12 * 256e9
    assert needs(plan, "memory in a shard") == pytest.approx(state / 12)
    assert "TB of 256 GB (memory" in plan.fabric.shards_why


def test_disks_that_are_too_slow_are_met_with_shards_and_not_with_a_longer_period() -> None:
    plan = make_plan(job_from({**LARGE, "host_gbyte": 4000.0, "disk_gbyte_s": 0.4}))
    assert plan.fabric is not None and plan.fabric.shards > 1 and "disk" in plan.fabric.shards_why
    assert plan.settings.sync.sync_every < make_plan(job_from({**LARGE, "shards": 0})).settings.sync.sync_every


def test_a_small_job_needs_no_shards() -> None:
    plan = make_plan(job_from(SMALL))
    assert plan.fabric is not None and plan.fabric.shards == 0 and plan.fits


def test_a_relay_takes_the_number_of_its_learners_from_the_link() -> None:
    chosen = {"sync_every": 24, "fragments": 24, "codec_up": "int4", "codec_down": "int4", "durability": "none"}
    with_relays = make_plan(job_from({**SMALL, "relays": True}), chosen)
    without = make_plan(job_from({**SMALL, "relays": False}), chosen)
    for way in ("uplink", "downlink"):
        assert needs(without, f"{way} of site 1") == pytest.approx(8 * needs(with_relays, f"{way} of site 1"))
    assert with_relays.fabric is not None and with_relays.fabric.relays == 2
    assert without.fabric is not None and without.fabric.relays == 0


def test_sites_of_one_learner_need_no_relays() -> None:
    plan = make_plan(job_from({**SMALL, "learners": 2}))
    assert plan.fabric is not None and plan.fabric.relays == 0 and "save nothing" in plan.fabric.relays_why


def test_learners_that_do_not_divide_evenly_are_shared_out() -> None:
    assert [place.learners for place in job_from({**SMALL, "learners": 7, "sites": 3}).places] == [3, 2, 2]


def test_without_sites_nothing_is_said_of_a_fabric_and_nothing_changes() -> None:
    plan = make_plan(job_from({**SMALL, "sites": None}))
    assert plan.fabric is None and not any("moves" in one.name or "memory" in one.name for one in plan.limits)
    assert json.loads(json.dumps(plan.to_dict()))["fabric"] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sites": 17}, "sites"),
        ({"up_gbit": None, "regions": ["a:16:4"]}, "leave one of them out"),
        ({"sites": None, "relays": True}, "relays stand at sites"),
        ({"shards": -1}, "shards"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        job_from({**SMALL, **change})
