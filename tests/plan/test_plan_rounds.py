"""A round's times, limits, the settings that are recommended, and what would fit instead."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.config import TIMEOUT_NS_MAX, SyncConfig
from atoll.core.policy import grace_ns, round_steps
from atoll.errors import ConfigError
from atoll.instruments.fleet import YEAR_S, Mechanics, expected_goodput
from atoll.instruments.plan import Job, Region, job_from, make_plan
from atoll.instruments.plan.limits import ABSENT, WAITING, binding, effective_sync_every, fits, limits_of
from atoll.instruments.plan.recommend import (
    chance_at_least,
    quorum_chance,
    recommend_interval,
    recommend_quorum,
    recommend_timeout,
)
from atoll.instruments.plan.rounds import round_times
from atoll.instruments.plan.settings import Settings, settings_from
from atoll.instruments.plan.show import verdict

PLACES = (Region("near", 3, 10.0, 10.0, 10.0), Region("far", 1, 1.0, 2.0, 200.0, 2.0))


def job(**changes: Any) -> Job:
    return Job(**{"parameters": 240 * 10**6, "learners": 4, "step_s": 1.0, "up_gbit": 1.0, **changes})


def chosen(learners: int = 4, **values: Any) -> Settings:
    return settings_from({"sync_every": 24, "fragments": 24, **values}, learners=learners)


# ---------------------------------------------------------------- times


def test_times_of_a_round_by_hand() -> None:
    """10M parameters per fragment, int4: 132 bytes per 256."""
    times = round_times(job(syncer_gbit=0.0, rtt_ms=100.0), chosen(quorum="all"))
    bits = math.ceil(10**7 / 256) * 132 * 8
    encode_s = math.ceil(10**7 / 256) * 256 / 0.83e9
    assert times.encode_s == pytest.approx(encode_s)
    assert times.quorum_s == pytest.approx(0.1 + encode_s + bits / 1e9)
    assert times.download_s == pytest.approx(0.15 + encode_s / 5.4 + bits / 1e9)
    written = (12e7 + 11 * 4 * bits / 8) / 12  # a slot, and what eleven merges were made from
    assert times.commit_s == pytest.approx(written / 1.3e9, rel=0.001)
    assert (times.has_s, times.period_s, times.every_s, times.in_flight) == (2.0, 24.0, 1.0, 2)
    assert times.slack_s == pytest.approx(2.0 - times.quorum_s - times.merge_s - times.commit_s - times.download_s)


def test_learners_of_a_region_share_its_link_and_all_share_the_syncers() -> None:
    two, four = (replace(PLACES[0], learners=n, rtt_ms=0.0) for n in (2, 4))
    alone = round_times(job(learners=2, up_gbit=0.0, regions=(two,)), chosen(2, quorum="all"))
    shared = round_times(job(up_gbit=0.0, regions=(four,)), chosen(quorum="all"))
    narrow = round_times(job(up_gbit=0.0, regions=(four,), syncer_gbit=5.0), chosen(quorum="all"))
    uploads = [times.all_s - times.encode_s for times in (alone, shared, narrow)]
    assert uploads[1] == pytest.approx(2 * uploads[0])
    assert uploads[2] == pytest.approx(2 * uploads[1])


def test_the_quorum_decides_who_is_waited_for_and_whose_steps_count() -> None:
    mixed = job(up_gbit=0.0, regions=PLACES)
    near, everybody = round_times(mixed, chosen(quorum="3")), round_times(mixed, chosen(quorum="all"))
    assert near.quorum_s < 0.1 < everybody.quorum_s
    assert (near.period_s, everybody.period_s) == (24.0, 48.0)
    assert near.contributions == 4  # the far one comes within the grace window
    assert round_times(mixed, chosen(quorum="3", grace_cap_steps=0.0)).contributions == 3


def test_the_grace_window_is_the_protocols_own() -> None:
    plan = make_plan(job(rtt_ms=300.0, parameters=2 * 10**9))
    times, sync = plan.times, plan.settings.sync
    steps = round_steps(sync.fragments, sync.sync_every, sync.rounds_in_flight_max)
    window, reason = grace_ns(sync, 1e9, 1e9 * times.quorum_s, 1e9 * (times.merge_s + times.commit_s), steps)
    assert (times.grace_s, times.grace_reason) == (window / 1e9, reason)


def test_a_synchronous_run_waits_and_its_period_grows() -> None:
    times = round_times(job(), chosen(overlap=0, quorum="all", grace_cap_steps=0.0))
    assert times.period_s == pytest.approx(24.0 + 24 * times.adopt_s)
    plan = make_plan(job(tokens_per_step=1000), {"overlap": 0, "quorum": "all", "grace_cap_steps": 0.0})
    assert plan.settings.sync.fragments == 1
    assert plan.methods[-1].utilisation == pytest.approx(plan.settings.sync.sync_every / plan.times.period_s)


def test_more_fragments_than_steps_travel_in_bursts() -> None:
    one, two = round_times(job(), chosen(fragments=24)), round_times(job(), chosen(fragments=48))
    assert two.quorum_s == pytest.approx(one.quorum_s, rel=0.01)


# ---------------------------------------------------------------- limits


def test_the_binding_limit_is_the_one_missed_by_the_most() -> None:
    thin = job(up_gbit=0.02, down_gbit=5.0)
    limits = limits_of(thin, chosen())
    worst = binding(limits)
    assert worst is not None
    assert worst.name == "uplink of each learner"
    assert worst.need == pytest.approx(10**7 * 24 * 132 / 256 * 8 / 1e9 / 24.0, rel=0.001)
    assert effective_sync_every(chosen(), limits) == pytest.approx(24 * worst.share)
    assert binding(limits_of(job(up_gbit=10.0), chosen())) is None


@pytest.mark.parametrize(
    ("changes", "values", "name"),
    [
        ({"down_gbit": 0.001}, {}, "downlink of each learner"),
        ({"syncer_gbit": 0.01}, {}, "syncer's link, in"),
        ({"disk_gbyte_s": 0.01}, {"durability": "commit"}, "syncer's disk"),
        ({"merge_gbyte_s": 0.002}, {}, "merging in the syncer, per period"),
        ({"encode_gparam_s": 0.001}, {}, "encoding in a learner, per period"),
        ({"rtt_ms": 59_000.0}, {"overlap": 2}, "time of a round until its commit"),
    ],
)
def test_every_part_can_be_the_binding_one(changes: dict[str, Any], values: dict[str, Any], name: str) -> None:
    plan = make_plan(job(**changes), {"sync_every": 24, **values})
    assert not plan.fits
    assert plan.binding is not None
    assert plan.binding.name == name or plan.binding.kind == "time", plan.binding


# ---------------------------------------------------------------- recommendations


@settings(max_examples=40, deadline=None)
@given(
    parameters=st.integers(10**6, 10**12),
    learners=st.integers(1, 64),
    step_s=st.floats(0.05, 60.0),
    gbit=st.floats(0.01, 1000.0),
    rtt_ms=st.floats(0.0, 500.0),
)
def test_what_is_recommended_fits_or_the_limit_is_named(
    parameters: int, learners: int, step_s: float, gbit: float, rtt_ms: float
) -> None:
    plan = make_plan(Job(parameters=parameters, learners=learners, step_s=step_s, up_gbit=gbit, rtt_ms=rtt_ms))
    assert plan.fits == fits(plan.job, plan.settings)
    if plan.fits:
        assert all(limit.share <= 1.0 for limit in plan.limits)
        assert plan.remedies == ()
    else:
        assert plan.binding is not None
        assert plan.binding.need > plan.binding.have
    assert {choice.name for choice in plan.choices if not choice.reason} == set()


def test_a_thinner_link_never_gets_a_smaller_period() -> None:
    jobs = [job(parameters=10**9, up_gbit=gbit, disk_gbyte_s=10.0) for gbit in (10.0, 0.3, 0.1, 0.03)]
    periods = [make_plan(one).settings.sync.sync_every for one in jobs]
    assert periods == sorted(periods)
    assert periods[0] == SyncConfig().sync_every < periods[-1]


def test_a_slow_disk_gets_rarer_rounds_before_it_gets_fewer_writes() -> None:
    plans = [make_plan(job(parameters=10**9, disk_gbyte_s=rate)).settings for rate in (10.0, 0.3, 0.1)]
    assert [(one.sync.sync_every, one.durability) for one in plans] == [(8, "commit"), (16, "commit"), (8, "interval")]


def test_latency_asks_for_more_overlap_not_for_a_larger_period() -> None:
    far = make_plan(job(parameters=10**7, step_s=0.2, rtt_ms=400.0)).settings.sync
    assert (far.sync_every, far.overlap) == (SyncConfig().sync_every, 6)


def test_what_the_user_chose_stays() -> None:
    given_values = {"sync_every": 40, "codec_up": "bf16", "quorum": "3", "outer_lr": 0.5, "durability": "none"}
    given_values |= {"correction": "none", "feedback_up": True}
    plan = make_plan(job(), given_values)
    assert {name: plan.options()[name] for name in given_values} == given_values
    by = {choice.name: choice.chosen_by for choice in plan.choices}
    assert all(by[name] == "user" for name in given_values)
    assert by["overlap"] == by["codec_down"] == "plan"


def test_half_of_those_that_are_up_need_no_luck() -> None:
    assert recommend_quorum(8, 1.0)[0] == recommend_quorum(8, 0.7)[0] == "50%"
    assert "on average 5.6" in recommend_quorum(8, 0.7)[1]
    for quorum, count in (("50%", 1), ("all", 1), ("3", 3)):
        assert quorum_chance(chosen(quorum=quorum).sync, 8, 0.7) == chance_at_least(count, 8, 0.7)


def test_a_number_of_learners_that_are_rarely_all_up_is_named() -> None:
    fleet = job(learners=16, chips=2_400_000, tokens_per_step=1_000_000)
    plan = make_plan(fleet, {"quorum": "16"})
    worst = plan.binding
    assert worst is not None and worst.name == "time without a quorum of 16 learners" and worst.kind == ABSENT
    assert plan.quorum.merged == 16 and plan.quorum.chance < 0.5
    assert plan.sync_every_effective == pytest.approx(plan.settings.sync.sync_every / plan.quorum.chance)
    assert plan.remedies == ("--quorum 50%",)
    thin = make_plan(replace(fleet, up_gbit=1e-4), {"quorum": "16", "sync_every": 8})
    assert thin.remedies and all("--quorum 50%" in text for text in thin.remedies)
    for quorum in ("all", "50%", "1"):
        good = make_plan(fleet, {"quorum": quorum})
        assert good.fits and good.quorum.chance > 0.99, quorum


def test_what_is_suggested_for_a_quorum_was_tried() -> None:
    """With a share of the learners the fast ones set the pace, and their thin links are what is missed then."""
    fast = Region("fast", learners=4, up_gbit=0.8, down_gbit=0.8, step_s=1.0)
    slow = Region("slow", learners=4, up_gbit=5.0, down_gbit=5.0, step_s=20.0)
    given_values = {"quorum": "8", "sync_every": 24}
    uneven = job(
        parameters=7 * 10**9, learners=8, up_gbit=0.0, regions=(fast, slow), chips=2048, mtbi_years=0.02, step_s=1.0
    )
    plan = make_plan(uneven, given_values)
    assert plan.binding is not None and plan.binding.kind == ABSENT
    assert "--quorum 50%" not in plan.remedies and all(text.startswith("--quorum 50% ") for text in plan.remedies)


def test_a_synchronous_run_that_mostly_waits_does_not_fit() -> None:
    given = {"overlap": 0, "quorum": "all", "grace_cap_steps": 0.0}
    thin = make_plan(job(up_gbit=1e-5, down_gbit=1.0), given)
    worst = thin.binding
    assert worst is not None and worst.name.startswith(WAITING) and worst.name.endswith("uploads")
    assert thin.methods[-1].utilisation < 0.8 and thin.sync_every_effective == thin.settings.sync.sync_every
    assert "compute" in verdict(thin)[1]
    wider = make_plan(job(up_gbit=0.2, down_gbit=0.2), given)
    assert wider.fits and wider.methods[-1].utilisation > 0.8 and wider.settings.sync.sync_every > 8
    assert make_plan(replace(job(up_gbit=0.2, down_gbit=0.2)), {**given, "sync_every": 8}).remedies


def test_all_chips_as_one_may_be_hopeless_where_many_learners_are_not() -> None:
    plan = make_plan(job(learners=128, chips=20_000_000, tokens_per_step=1_000_000), {})
    by_name = {method.name: method for method in plan.methods}
    assert by_name["data-parallel, elastic"].goodput == 0.0 and math.isinf(by_name["data-parallel, elastic"].seconds)
    assert by_name["Atoll, this plan"].goodput > 0.5


def test_a_link_too_thin_for_any_timeout_is_the_links_fault() -> None:
    plan = make_plan(job(parameters=10**15, step_s=1e6, up_gbit=1e-6, down_gbit=1e-6))
    assert plan.binding is not None and plan.settings.sync.quorum_timeout_ns == TIMEOUT_NS_MAX


@given(learners=st.integers(1, 12), availability=st.floats(0.01, 0.99), count=st.integers(1, 12))
def test_the_chance_of_a_quorum_by_listing_who_is_up(learners: int, availability: float, count: int) -> None:
    total = 0.0
    for who in range(2**learners):
        up = who.bit_count()
        if up >= count:
            total += availability**up * (1 - availability) ** (learners - up)
    assert chance_at_least(count, learners, availability) == pytest.approx(total, abs=1e-9)


def test_the_chance_of_a_quorum_among_many() -> None:
    assert chance_at_least(1450, 3000, 0.5) == pytest.approx(chance_at_least(483, 1000, 0.5), abs=0.12)
    assert chance_at_least(3000, 3000, 0.5) < 1e-9 < 0.999 < chance_at_least(1, 3000, 0.5)


def test_a_slow_disk_gets_intervals_and_a_hopeless_one_is_a_limit() -> None:
    slow = make_plan(job(parameters=12 * 10**9, step_s=4.0, up_gbit=10.0, disk_gbyte_s=0.3))
    assert slow.settings.durability == "interval"
    assert slow.settings.durability_interval == recommend_interval(slow.job, slow.settings.sync)[0]
    hopeless = make_plan(replace(slow.job, disk_gbyte_s=0.001))
    assert hopeless.binding is not None
    assert hopeless.binding.name == "syncer's disk"


def test_a_round_that_takes_minutes_gets_a_longer_timeout() -> None:
    patient = job(parameters=10**9, up_gbit=0.002, step_s=60.0)
    plan = make_plan(patient)
    assert plan.times.all_s > 40.0
    assert plan.settings.sync.quorum_timeout_ns == recommend_timeout(patient, plan.settings)[0] > 120 * 10**9


# ---------------------------------------------------------------- failures and other methods


def test_goodput_is_the_fleets_own() -> None:
    plan = make_plan(job(chips=100_000, tokens_per_step=1000, slice_chips=256))
    mechanics = Mechanics(slice_chips=256, step_s=1.0, message_s=0.0, transfer_s=0.0, merge_s=0.0)
    shares = {method.name.split(",")[-1].strip(): method.goodput for method in plan.methods}
    for name, learners, method in (
        ("elastic", 1, "elastic"),
        ("restarts", 1, "inelastic"),
        ("this plan", 4, "decoupled"),
    ):
        assert 100 * shares[name] == pytest.approx(expected_goodput(100_000, learners, method, mechanics, YEAR_S))
    assert shares["restarts"] < shares["elastic"] < shares["this plan"]
    assert plan.quorum.up == pytest.approx(4 * shares["this plan"])


def test_times_and_bytes_of_the_methods() -> None:
    plan = make_plan(job(tokens_per_step=1000, tokens=10**9))
    restarts, elastic, sync, ours = plan.methods
    assert ours.seconds == pytest.approx(10**9 / 4000)
    assert elastic.seconds == pytest.approx(ours.seconds / elastic.utilisation)
    assert restarts.seconds > sync.seconds > ours.seconds
    assert sync.bytes == pytest.approx(elastic.bytes / SyncConfig().sync_every)
    assert ours.steps == 250_000


def test_one_learner_has_nobody_to_exchange_with() -> None:
    plan = make_plan(job(learners=1, tokens_per_step=1000))
    assert [method.utilisation for method in plan.methods] == [1.0, 1.0, 1.0, 1.0]
    assert plan.methods[0].bytes == 0.0


def test_a_slow_region_holds_up_only_those_who_wait() -> None:
    plan = make_plan(job(up_gbit=0.0, regions=PLACES, tokens_per_step=1000, tokens=10**9))
    assert plan.methods[-1].seconds == pytest.approx(10**9 / 1000 / (3 / 1.0 + 1 / 2.0))
    assert plan.methods[0].seconds > 10**9 / 1000 / (4 / 2.0)


# ---------------------------------------------------------------- what would fit


def test_every_remedy_fits() -> None:
    thin = job(parameters=12 * 10**9, step_s=4.0, up_gbit=0.2)
    given_values = {"sync_every": 100, "codec_up": "bf16", "overlap": 1}
    plan = make_plan(thin, given_values)
    assert not plan.fits
    assert len(plan.remedies) == 3
    options = [text for text in plan.remedies if text.startswith("--")]
    for text in options:
        name, value = text.removeprefix("--").replace("-", "_").split(" ")
        changed = {**given_values, name: int(value) if value.isdigit() else value}
        assert make_plan(thin, changed).fits, text
    links = plan.remedies[-1]
    assert links.startswith("uplink of each learner")
    up, down = (float(part.split(" ")[-2]) for part in links.split(", ")[:2])
    disk = float(links.split(", ")[2].split(" ")[-2]) if "disk" in links else thin.disk_gbyte_s
    faster = replace(thin, up_gbit=1.01 * up, down_gbit=1.01 * down, disk_gbyte_s=1.01 * disk)
    assert fits(faster, plan.settings)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learners": 0}, "learners must be a whole number from 1"),
        ({"parameters": -5}, "parameters must be a whole number"),
        ({"parameters": 0.5}, "parameters must be a whole number"),
        ({"parameters": "many"}, "such as 1500, 300M, 12B"),
        ({"parameters": 10**30}, "parameters must be a whole number"),
        ({"step_s": float("nan")}, "step_s must be a number"),
        ({"step_s": -1.0}, "step_s must be a number"),
        ({"step_s": "fast"}, "step_s must be a number"),
        ({"step_s": True}, "step_s must be a number"),
        ({"up_gbit": float("inf")}, "up_gbit must be a number"),
        ({"up_gbit": -1}, "up_gbit must be a number"),
        ({"up_gbit": None}, "no links"),
        ({"up_gbit": 0}, "up_gbit must be positive"),
        ({"tokens": "0"}, "tokens must be positive"),
        ({"rtt_ms": -3.0}, "rtt_ms must be a number"),
        ({"rtt_ms": 10**400}, "rtt_ms must be a number"),
        ({"chips": 2}, "4 learners on 2 chips"),
        ({"mtbi_years": 0.0}, "mtbi_years must be a number"),
        ({"precision": "int3"}, "precision must be one of"),
        ({"precision": 16}, "precision must be text"),
        ({"colour": "red"}, "unknown setting 'colour'"),
        ({"learner": 4}, "unknown setting 'learner' of a job; did you mean learners?"),
        ({"regions": 7}, "regions must be a list"),
        ({"regions": ["a:1"]}, "a region is NAME:LEARNERS"),
        ({"regions": [{"name": "a", "learners": 4, "gbit": 1.0}]}, "links are given twice"),
        ({"regions": [{"name": "a", "learners": 3, "gbit": 1.0}], "up_gbit": None}, "the regions have 3 learners"),
        ({"regions": [{"name": "a", "learners": 2}] * 2, "up_gbit": None}, "a region needs a name"),
        ({"regions": ["a:2:1", "a:2:1"], "up_gbit": None}, "same name"),
        ({"regions": ["a:4:nan"], "up_gbit": None}, "up_gbit must be a number"),
        ({"regions": [{"name": "a", "learners": 4, "gbit": 1.0, "moon": 1}]}, "a region is a table"),
    ],
)
def test_jobs_that_cannot_be(values: dict[str, Any], message: str) -> None:
    whole = {"parameters": 10**6, "learners": 4, "step_s": 1.0, "up_gbit": 1.0}
    with pytest.raises(ConfigError, match=message):
        job_from({**whole, **values})


def test_regions_say_how_many_learners_there_are() -> None:
    found = job_from(
        {"parameters": "1.5k", "step_s": 1, "regions": ["a:2:4/10:60:1.5", {"name": "b", "learners": 1, "gbit": 2}]}
    )
    assert (found.parameters, found.learners) == (1500, 3)
    assert found.regions == (Region("a", 2, 4.0, 10.0, 60.0, 1.5), Region("b", 1, 2, 2, 50.0, 0.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quorum": "5"}, "quorum 5 is above the 4 learners"),
        ({"sync_every": 0}, "sync_every must be"),
        ({"fragments": -1}, "fragments must be"),
        ({"overlap": "two"}, "overlap must be int"),
        ({"codec_up": "int1"}, "codec_up is .int1., which is no codec"),
        ({"durability": "never"}, "durability must be one of"),
        ({"durability": "interval", "durability_interval": float("nan")}, "durability_interval must be"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(job(), values)
