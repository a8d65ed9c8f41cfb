from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import KILLED, ORIGIN_NS, PARAMETERS, SECOND, SLOWED, STEP_TOKENS, SyntheticRun, state_of

from atoll.observe import RunState, data_parallel_bytes
from atoll.observe import events as ev
from atoll.observe.faults import exit_text
from atoll.observe.series import Curve, Sample, Track
from atoll.observe.summary import natural_key

S = SECOND


def synthetic(until_s: float = math.inf, **options: object) -> RunState:
    state = RunState()
    for t_ns, _, event in SyntheticRun(**options).events:  # type: ignore[arg-type]
        if t_ns <= ORIGIN_NS + until_s * S:
            state.apply(t_ns, event)
    return state


def step(
    learner: str, number: int, duration_s: float = 1.0, stall_s: float = 0.0, generation: int = 1
) -> ev.LearnerSteps:
    compute_ns = int((duration_s - stall_s) * S)
    return ev.LearnerSteps(
        learner, generation, number, 1, 10, 10 * number, 2.0, compute_ns, int(stall_s * S), 0, 0, 0, 0
    )  # fmt: skip


# ---------------------------------------------------------------- learners


def test_states_through_a_life() -> None:
    events: list[tuple[float, ev.Event]] = [(0, ev.ProcessStarted("learner", "a", 1))]
    assert state_of(*events).states() == {"a": "joining"}
    events += [(1, ev.LearnerJoined("a", 1, 0, 0)), (3, step("a", 1))]
    assert state_of(*events).states() == {"a": "active"}
    away = state_of(*events, (4, ev.MemberChanged("a", 1, "away", "silent")))
    assert away.states() == {"a": "cut off"} and away.states(now_ns=90 * S) == {"a": "away"}
    assert state_of(*events, (4, ev.LearnerLink("a", False))).states() == {"a": "cut off"}
    events += [(4, ev.ProcessExited("learner", "a", 1, -9))]
    assert state_of(*events).states() == {"a": "down"}
    events += [(5, ev.ProcessStarted("learner", "a", 2))]
    assert state_of(*events).states() == {"a": "joining"}
    events += [(6, ev.LearnerJoined("a", 2, 1, 0)), (7, step("a", 2, generation=2))]
    state = state_of(*events)
    assert state.states() == {"a": "active"}
    assert (state.learners["a"].restarts, state.learners["a"].generation) == (1, 2)
    assert state_of(*events, (8, ev.ProcessExited("learner", "a", 2, 0))).states() == {"a": "left"}


def test_only_links_that_are_lost_in_the_middle_are_news() -> None:
    state = state_of(
        (0, ev.LearnerLink("a", True)),
        (1, ev.LearnerLink("a", False, "reset")),
        (2, ev.LearnerLink("a", True)),
        (3, ev.MemberChanged("a", 1, "left", "finished")),
        (3, ev.LearnerLink("a", False, "asked to stop")),
    )
    assert [line.text for line in state.log] == ["a link down (reset)", "a link up again after 1.0 s"]


def test_one_at_less_than_half_the_usual_speed_is_slow() -> None:
    events: list[tuple[float, ev.Event]] = []
    for t_s in range(1, 10):
        events += [(t_s, step("a", t_s)), (t_s, step("b", t_s))]
        events += [(t_s, step("c", t_s, duration_s=3.0))] if t_s % 3 == 0 else []
    state = state_of(*events)
    assert state.states() == {"a": "active", "b": "active", "c": "slow"}
    assert state.rates()["a"] == pytest.approx(10)
    assert state.rates()["c"] == pytest.approx(10 / 3)


def test_a_silent_learner_loses_its_speed() -> None:
    state = state_of(*((t_s, step("a", t_s)) for t_s in range(1, 6)))
    assert state.rates(now_ns=5 * S)["a"] == pytest.approx(10)
    assert state.rates(now_ns=60 * S)["a"] == 0


def test_learners_are_listed_in_natural_order() -> None:
    state = state_of(*((0, ev.LearnerStarted(f"learner-{i}", i)) for i in (10, 2, 1)))
    assert list(state.learners) == ["learner-1", "learner-2", "learner-10"]
    assert sorted(["b", "a10", "a9", ""], key=natural_key) == ["", "a9", "a10", "b"]


def test_recent_shares_add_up() -> None:
    state = state_of((1, step("a", 1, stall_s=0.25)), (2, step("a", 2, stall_s=0.25)))
    shares = state.recent_shares("a")
    assert shares["stall"] == pytest.approx(0.25)
    assert sum(shares.values()) == pytest.approx(1)


# ---------------------------------------------------------------- rounds


def test_a_round_from_launch_to_commit() -> None:
    state = state_of(
        (1.0, ev.RoundLaunched(7, 1, 3, 24, ["a", "b", "c"], 2)),
        (1.1, ev.ContributionReceived(7, 3, "a", 1, 0, 10, 24, 240, 1.0, False)),
        (1.2, ev.ContributionReceived(7, 3, "b", 1, 0, 10, 24, 240, 1.0, False)),
        (1.3, ev.RoundClosed(7, 3, ["a", "b"], 0, "quorum and grace", int(0.2 * S), int(0.1 * S), int(0.3 * S))),
        (1.4, ev.ContributionReceived(7, 3, "c", 1, 0, 10, 24, 240, 1.0, True)),
        (1.5, ev.Committed(3, 1, 7, ["a", "b"], 480, 5, 100, 1.0, math.nan, 9)),
    )
    (entry,) = state.rounds.recent
    assert (entry.launch_ns, entry.close_ns, entry.commit_ns) == (1.0 * S, 1.3 * S, 1.5 * S)
    assert (entry.version, entry.contributors, entry.late) == (1, ["a", "b"], ["c"])
    assert not state.rounds.open
    assert (state.rounds.commits, state.rounds.merged, state.rounds.late) == (1, 2, 1)
    assert [mark.late for mark in state.rounds.marks["c"]] == [True]
    assert [mark.t_ns for mark in state.rounds.marks["a"]] == [1.1 * S]


def test_aborted_rounds_are_counted_and_logged() -> None:
    state = state_of((1, ev.RoundAborted(7, 1, 3, 0, 2, "no quorum in 120 s")))
    assert state.rounds.aborted == 1
    assert "aborted: no quorum" in state.log[-1].text


# ---------------------------------------------------------------- faults


def test_what_a_kill_costs() -> None:
    events: list[tuple[float, ev.Event]] = [(0, ev.ProcessStarted("learner", "b", 1))]
    events += [(t_s, step("a", t_s)) for t_s in range(1, 31)]
    events += [(t_s, step("b", t_s)) for t_s in range(1, 11)]
    events += [
        (10, ev.FaultInjected("kill", "b", "SIGKILL")),
        (10.1, ev.ProcessExited("learner", "b", 1, -9)),
        (11, ev.ProcessStarted("learner", "b", 2)),
        (14, ev.LearnerJoined("b", 2, 14, 0)),
    ]
    events += [(t_s, step("b", t_s, generation=2)) for t_s in range(16, 31)]
    state = state_of(*sorted(events, key=lambda stamped: stamped[0]))
    (cost,) = state.fault_costs()
    assert cost.fault.text == "killed (SIGKILL)"
    assert (cost.fault.joined_step, cost.fault.joined_generation) == (14, 2)
    assert cost.duration_s == pytest.approx(5)
    assert cost.lost_s == pytest.approx(5)
    assert cost.lost_steps == pytest.approx(5)
    (other,) = cost.others
    assert other.learner == "a"
    assert (other.steps_s_before, other.steps_s_during) == (pytest.approx(1), pytest.approx(1))
    assert (cost.others_ratio, cost.others_stall_s) == (pytest.approx(1), 0)


def test_what_a_slowdown_costs_and_that_a_stall_of_the_others_shows() -> None:
    # From 10 to 30 s b takes 4 s a step, and a is held up by it: 2 s a step, half of it waiting.
    events: list[tuple[float, ev.Event]] = [(t_s, step(learner, t_s)) for t_s in range(1, 11) for learner in "ab"]
    events += [(10, ev.FaultInjected("slow", "b", "4x", until_ns=99))]
    events += [(t_s, step("b", t_s, duration_s=4.0)) for t_s in range(14, 31, 4)]
    events += [(t_s, step("a", t_s, duration_s=2.0, stall_s=1.0)) for t_s in range(12, 31, 2)]
    events += [(30, ev.FaultEnded("slow", "b"))]
    (cost,) = state_of(*sorted(events, key=lambda stamped: stamped[0])).fault_costs()
    assert cost.duration_s == 20
    assert cost.lost_steps == pytest.approx(20 - 5)
    assert cost.lost_s == pytest.approx(15)
    assert cost.others_ratio == pytest.approx(0.5)
    assert cost.others_stall_s == pytest.approx(10)


def test_testing_the_model_during_a_fault_is_not_held_against_it() -> None:
    events: list[tuple[float, ev.Event]] = [(t_s, step(learner, t_s)) for t_s in range(1, 11) for learner in "ab"]
    events += [(10, ev.FaultInjected("slow", "b", "4x", until_ns=99)), (14, ev.LearnerEvaluated("a", 10, 2.0, 100))]
    events += [(t_s, step("a", t_s)) for t_s in range(15, 31)] + [(30, ev.FaultEnded("slow", "b"))]
    (cost,) = state_of(*events).fault_costs()
    assert cost.others_ratio == pytest.approx(1.0)


def test_a_crash_that_nobody_planned_is_a_fault_and_may_be_for_good() -> None:
    events: list[tuple[float, ev.Event]] = [(t_s, step("a", t_s)) for t_s in range(1, 31)]
    events += [(t_s, step("b", t_s)) for t_s in range(1, 11)] + [(10, ev.ProcessExited("learner", "b", 1, 3))]
    (cost,) = state_of(*sorted(events, key=lambda stamped: stamped[0])).fault_costs()
    assert (cost.fault.name, cost.fault.text) == ("crash", "exited with status 3")
    assert cost.lost_s == pytest.approx(20)


def test_a_syncer_that_was_away_is_a_fault_until_it_serves_again() -> None:
    state = state_of(
        (1, step("a", 1)),
        (2, ev.ProcessExited("syncer", "syncer", 9, -9)),
        (3, ev.ProcessStarted("syncer", "syncer", 10)),
        (7, ev.SyncerStarted("run", "127.0.0.1:1", 10)),
        (8, step("a", 2, duration_s=7.0)),
    )
    (cost,) = state.fault_costs()
    assert (cost.fault.target, cost.duration_s, cost.lost_s) == ("syncer", 5, 0)


def test_a_learner_that_dies_before_its_first_step_is_down_then_joining() -> None:
    events: list[tuple[float, ev.Event]] = [
        (0, ev.ProcessStarted("learner", "a", 1)),
        (1, ev.ProcessExited("learner", "a", 1, 1)),
    ]
    assert state_of(*events).states() == {"a": "down"}
    assert state_of(*events, (2, ev.ProcessStarted("learner", "a", 2))).states() == {"a": "joining"}


def test_ends_that_were_asked_for_are_no_faults() -> None:
    state = state_of(
        (1, step("a", 1)), (2, ev.RunFinished("over", 1.0, 2.0)), (3, ev.ProcessExited("syncer", "syncer", 9, -15))
    )
    assert state.faults == []


def test_exit_text() -> None:
    assert [exit_text(code) for code in (-9, -15, 1, -999)] == [
        "killed (SIGKILL)",
        "killed (SIGTERM)",
        "exited with status 1",
        "killed (signal 999)",
    ]


# ---------------------------------------------------------------- the whole


def test_the_synthetic_run() -> None:
    state = synthetic()
    assert state.tokens == STEP_TOKENS * state.learner_steps
    assert state.parameters == PARAMETERS
    assert [(fault.name, fault.target) for fault in state.faults] == [("kill", KILLED), ("slow", SLOWED)]
    assert set(state.states().values()) == {"left"}
    assert state.data_parallel_bytes == data_parallel_bytes(PARAMETERS, state.learner_steps, 4)
    ledger = state.ledger
    assert ledger.processed == ledger.merged + ledger.pending + sum(ledger.discarded.values())
    assert state.eval_loss == pytest.approx(1.353, abs=0.01)
    texts = [line.text for line in state.log]
    assert f"{KILLED} killed (SIGKILL)" in texts
    assert any(text.startswith(f"{KILLED} rejoined at step") for text in texts)


def test_the_synthetic_run_while_it_runs() -> None:
    assert synthetic(until_s=36.3).states()[KILLED] == "down"
    assert synthetic(until_s=40).states()[KILLED] == "joining"
    assert synthetic(until_s=60).states() == {
        "learner-0": "active", SLOWED: "slow", KILLED: "active", "learner-3": "active",
    }  # fmt: skip


def test_without_a_syncer_tokens_are_merged_and_bytes_come_from_the_learners() -> None:
    state = state_of(
        (1, step("a", 1)),
        (2, ev.LearnerPushed("a", 0, 0, 0, 70, 1, 10, 1, 1, "accepted")),
        (2, ev.LearnerFetched("a", 0, 1, 30, 1, False)),
    )
    assert (state.ledger.processed, state.ledger.merged, state.ledger.pending) == (10, 10, 0)
    assert (state.bytes_up, state.bytes_down) == (70, 30)


def test_an_empty_state_answers_everything() -> None:
    state = RunState()
    assert state.states() == {} and state.rates() == {} and state.fault_costs() == []
    assert state.goodput().share == 0.0 and math.isnan(state.eval_loss) and state.data_parallel_bytes == 0


# ---------------------------------------------------------------- series


@given(st.lists(st.floats(-1e6, 1e6), max_size=500))
def test_a_curve_is_bounded_and_keeps_its_mean(values: list[float]) -> None:
    curve = Curve(points_max=16)
    for i, value in enumerate(values):
        curve.add(i, value)
    assert len(curve.points) <= 16
    if values:
        assert min(values) - 1e-6 <= min(y for _, y in curve.points)
        assert max(y for _, y in curve.points) <= max(values) + 1e-6
        assert [x for x, _ in curve.points] == sorted(x for x, _ in curve.points)


def test_a_curve_leaves_out_what_is_not_finite() -> None:
    curve = Curve()
    for value in (math.nan, 1.0, math.inf):
        curve.add(0, value)
    assert curve.points == [(0, 1.0)]


def test_a_track_keeps_exact_totals_when_it_thins() -> None:
    track = Track(1, points_max=16)
    for i in range(1000):
        track.add(i, (float(i),))
    assert track.at(999) == (999.0,)
    assert track.between(0, 999) == (999.0,)
    assert track.between(100.5, 200.5)[0] == pytest.approx(100)
    assert Track(2).between(0, 10) == (0.0, 0.0)


def test_a_track_stays_exact_where_it_is_pinned() -> None:
    plain, pinned = Track(1, points_max=64), Track(1, points_max=64)
    pinned.pin(500, 510)
    for i in range(5000):
        # Nothing happens from 500 to 510, one unit a nanosecond otherwise.
        total = float(i if i < 500 else max(500, i - 10))
        plain.add(i, (total,))
        pinned.add(i, (total,))
    assert pinned.between(500, 510) == (0.0,)
    assert plain.between(500, 510) != (0.0,)
    crowded = Track(1, points_max=64)
    crowded.pin(0, 10**9)
    for i in range(5000):
        crowded.add(i, (float(i),))
    assert crowded.between(0, 4999) == (4999.0,)


def test_a_sample_is_bounded_and_even() -> None:
    sample: Sample[int] = Sample(items_max=10)
    for i in range(1000):
        sample.add(i)
    assert sample.seen == 1000 and len(sample) <= 10
    gaps = {b - a for a, b in zip(list(sample), list(sample)[1:], strict=False)}
    assert len(gaps) == 1
