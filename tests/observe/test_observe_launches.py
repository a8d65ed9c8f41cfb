"""A run that was stopped and resumed, learners that leave and come back: whose time it is, and what is a fault."""

from __future__ import annotations

import pytest
from synthetic_run import state_of

from atoll.observe import Goodput, measure_goodput
from atoll.observe import events as ev
from atoll.observe.launches import SILENCE_NS

S = 1_000_000_000
HOUR = 3600
STARTED = ev.RunStarted("decoupled", 2, 1000, 24, 4, "int4", "int4", 0)
STOPPED = ev.RunFinished("SIGINT", float("nan"), 0.0)

Stream = list[tuple[float, ev.Event]]


def report(learner: str, compute_s: float, **others_s: float) -> ev.LearnerSteps:
    ns = {f"{name}_ns": int(others_s.get(name, 0) * S) for name in ("stall", "adopt", "snapshot", "overhead")}
    return ev.LearnerSteps(
        learner=learner, generation=1, step=1, steps=1, tokens=100, tokens_total=100, loss=1.0,
        compute_ns=int(compute_s * S), fragments_behind=0, **ns,
    )  # fmt: skip


def of(events: Stream) -> Goodput:
    return measure_goodput((int(t_s * S), "x", event) for t_s, event in events)


def seconds(goodput: Goodput, learner: str) -> dict[str, float]:
    return {name: round(s, 6) for name, s in goodput.learners[learner].seconds.items() if s}


def launch(at_s: float, *learners: str, pid: int = 1) -> Stream:
    """Started at `at_s`, first steps from 2 s to 12 s later."""
    events: Stream = [(at_s, STARTED)]
    events += [(at_s + 0.1, ev.ProcessStarted("learner", learner, pid)) for learner in learners]
    events += [(at_s + 1, ev.LearnerStarted(learner, pid)) for learner in learners]
    return events + [(at_s + 12, report(learner, 10)) for learner in learners]


# ---------------------------------------------------------------- pauses


def test_the_hours_between_two_launches_are_nobodys_time() -> None:
    events = launch(0, "a", "b")
    events += [(13, ev.ProcessExited("learner", learner, 1, -15)) for learner in "ab"] + [(14, STOPPED)]
    events += launch(3 * HOUR, "a", "b", pid=2)
    goodput = of(events)
    assert goodput.window_s == 20
    assert seconds(goodput, "a") == seconds(goodput, "b") == {"compute": 20}
    assert goodput.share == 1.0


def test_so_are_those_after_everything_was_killed_and_nobody_could_say_so() -> None:
    events = [*launch(0, "a", "b"), *launch(3 * HOUR, "a", "b", pid=2)]
    goodput = of(events)
    assert goodput.window_s == 20
    assert seconds(goodput, "b") == {"compute": 20}
    assert [one.failures for one in goodput.learners.values()] == [0, 0]


def test_without_a_launcher_a_long_silence_and_a_start_are_a_pause() -> None:
    silence_s = SILENCE_NS / S + 1
    events: Stream = [(0, ev.LearnerStarted("a", 1)), (10, report("a", 10))]
    resumed = [*events, (10 + silence_s, ev.LearnerStarted("a", 2)), (30 + silence_s, report("a", 10))]
    assert seconds(of(resumed), "a") == {"compute": 20}
    # A short one is an accident of this learner: it is charged with it.
    short = [*events, (20.0, ev.LearnerStarted("a", 2)), (40.0, report("a", 10))]
    assert seconds(of(short), "a") == {"compute": 20, "down": 10, "recovery": 10}
    # And one that ends with a report, of a step that took very long, is no silence at all.
    slow = [*events, (20 + silence_s, report("a", 10 + silence_s))]
    assert seconds(of(slow), "a") == {"compute": pytest.approx(20 + silence_s)}


def test_what_was_charged_after_the_last_step_of_a_launch_is_taken_back() -> None:
    # b dies, a goes on for a second; then everything stops. The pause begins with a's last step.
    events = [*launch(0, "a", "b"), (13, ev.ProcessExited("learner", "b", 1, -9)), (14, report("a", 2))]
    events += [(100, ev.ProcessExited("learner", "a", 1, -9)), (101, STOPPED), *launch(HOUR, "a", "b", pid=2)]
    goodput = of(events)
    assert goodput.window_s == 22
    assert seconds(goodput, "a") == {"compute": 22}
    assert seconds(goodput, "b") == {"compute": 20, "down": 2}


def test_a_learner_that_is_not_there_in_the_second_launch_is_not_allocated_in_it() -> None:
    goodput = of([*launch(0, "a", "b"), (13, STOPPED), *launch(HOUR, "a", "c", pid=2)])
    assert {name: one.allocated_s for name, one in goodput.learners.items()} == {"a": 20, "b": 10, "c": 10}


def test_a_learner_that_comes_later_in_the_second_launch_joins_late() -> None:
    events = [*launch(0, "a", "b"), (13, STOPPED), *launch(HOUR, "a", pid=2)]
    events += [(HOUR + 20, ev.LearnerStarted("b", 7)), (HOUR + 32, report("b", 10)), (HOUR + 32, report("a", 20))]
    goodput = of(events)
    assert seconds(goodput, "b") == {"compute": 20, "idle": 2}
    assert goodput.learners["a"].allocated_s == goodput.window_s == 40


def test_a_launch_without_a_step_changes_nothing() -> None:
    failed: Stream = [
        (50, STARTED),
        (51, ev.ProcessStarted("learner", "a", 9)),
        (52, ev.ProcessExited("learner", "a", 9, 1)),
    ]
    plain = [*launch(0, "a", "b"), (13, STOPPED), *launch(HOUR, "a", "b", pid=2)]
    with_it = [*launch(0, "a", "b"), (13, STOPPED), *failed, *launch(HOUR, "a", "b", pid=2)]
    assert seconds(of(with_it), "a") == seconds(of(plain), "a")
    assert of(with_it).window_s == of(plain).window_s


def test_the_clock_of_the_views_stands_still_in_a_pause() -> None:
    state = state_of(*launch(0, "a"), (13, STOPPED), *launch(HOUR, "a", pid=2))
    assert [state.elapsed_s(t_s * S) for t_s in (2, 12, 13, HOUR, HOUR + 2, HOUR + 12)] == [0, 10, 10, 10, 10, 20]
    assert [state.moment_ns(s) / S for s in (0, 5, 10, 15, 20)] == [2, 7, 12, HOUR + 7, HOUR + 12]
    (pause,) = state.pauses
    assert (pause.start_ns, pause.end_ns) == (12 * S, (HOUR + 2) * S)


def test_a_resumed_run_is_not_finished_and_its_learners_join_again() -> None:
    stopped = [*launch(0, "a", "b"), (13, ev.LearnerFinished("a", 1, 1, "SIGINT")), (14, STOPPED)]
    assert state_of(*stopped).finished is STOPPED
    resumed = [*stopped, (HOUR, STARTED), (HOUR + 1, ev.ProcessStarted("learner", "a", 2))]
    state = state_of(*resumed)
    assert state.finished is None
    assert state.states() == {"a": "joining", "b": "left"}
    assert "run resumed 60 min after its last step" in [line.text for line in state.log]
    assert state_of(*resumed, (HOUR + 13, report("a", 10))).states()["a"] == "active"


def test_a_syncer_that_starts_after_the_end_begins_a_new_launch_too() -> None:
    state = state_of(*launch(0, "a"), (13, STOPPED), (HOUR, ev.SyncerStarted("run", "127.0.0.1:1", 5, 2)))
    assert state.finished is None
    assert state.syncer_away_s == 0


# ---------------------------------------------------------------- faults and failures around an end


def test_processes_that_a_launcher_ends_before_it_says_so_are_no_failures() -> None:
    events = [*launch(0, "a", "b"), (13, ev.ProcessExited("learner", "a", 1, -15)), (16, report("b", 4))]
    events += [(22, ev.ProcessExited("learner", "b", 1, 143)), (23, ev.ProcessExited("syncer", "syncer", 3, -15))]
    before = state_of(*events)
    assert [fault.target for fault in before.faults] == ["a", "b", "syncer"]
    after = state_of(*events, (24, STOPPED))
    assert after.faults == []
    assert [one.failures for one in after.goodput().learners.values()] == [0, 0]
    killed = [*events[:-2], (22, ev.ProcessExited("learner", "b", 1, -9)), (24, STOPPED)]
    assert [fault.target for fault in state_of(*killed).faults] == ["b"]


def test_one_that_was_killed_long_before_the_end_stays_a_failure() -> None:
    events = [
        *launch(0, "a", "b"),
        (13, ev.ProcessExited("learner", "a", 1, -15)),
        (112, report("b", 100)),
        (113, STOPPED),
    ]
    state = state_of(*events)
    assert [fault.target for fault in state.faults] == ["a"]
    assert state.goodput().learners["a"].failures == 1


def test_a_fault_does_not_outlast_its_launch() -> None:
    events = [*launch(0, "a", "b"), (13, ev.ProcessExited("learner", "b", 1, 3)), (22, report("a", 10)), (23, STOPPED)]
    events += launch(HOUR, "a", "b", pid=2)
    (cost,) = state_of(*events).fault_costs()
    assert cost.duration_s == 9
    assert cost.fault.end_ns is None


def test_speeds_before_a_fault_are_those_of_its_own_launch() -> None:
    events = [*launch(0, "a", "b"), (13, STOPPED), *launch(HOUR, "a", "b", pid=2)]
    events += [(HOUR + 12, ev.ProcessExited("learner", "b", 2, -9)), (HOUR + 22, report("a", 10))]
    events += [
        (HOUR + 15, ev.ProcessStarted("learner", "b", 3)),
        (HOUR + 32, report("b", 10)),
        (HOUR + 32, report("a", 10)),
    ]
    (cost,) = state_of(*events).fault_costs()
    assert cost.others_ratio == pytest.approx(1.0)


# ---------------------------------------------------------------- leaving and coming back


def test_a_learner_that_left_and_comes_back_is_not_charged_for_its_absence() -> None:
    events = [
        *launch(0, "a", "b"),
        (13, ev.LearnerFinished("b", 1, 1, "SIGTERM")),
        (14, ev.ProcessExited("learner", "b", 1, 0)),
    ]
    events += [(102, report("a", 90)), (103, ev.ProcessStarted("learner", "b", 2)), (105, ev.LearnerStarted("b", 2))]
    events += [(106, ev.LearnerJoined("b", 2, 5, 0)), (112, report("a", 10)), (112, report("b", 6))]
    goodput = of(events)
    # 10 s and the second in which it left, then from its new process (103) on.
    assert seconds(goodput, "b") == {"compute": 16, "idle": 1 + 3}
    assert goodput.learners["b"].failures == 0
    assert goodput.learners["a"].allocated_s == goodput.window_s == 110


def test_reports_of_several_processes_under_one_id_are_one_slot() -> None:
    # The old process was stopped and woke up again after its successor had begun: its report overlaps.
    events = [
        *launch(0, "a"),
        (13.0, ev.ProcessStarted("learner", "a", 2)),
        (20.0, report("a", 5)),
        (21.0, report("a", 9)),
    ]
    goodput = of(events)
    assert goodput.learners["a"].allocated_s == goodput.window_s == 19
    assert goodput.learners["a"].tokens_processed == 300


# ---------------------------------------------------------------- checkpoints


def test_checkpoints_are_not_training_and_counted_once() -> None:
    inside = [(10, report("a", 8, overhead=1, snapshot=1)), (10, ev.CheckpointWritten("a", 1, 100, int(1.5 * S), 1))]
    goodput = of(inside)
    assert seconds(goodput, "a") == {"compute": 8, "overhead": 1, "snapshot": 1}
    assert goodput.learners["a"].checkpoint_s == 1.5
    # Reports that hold less snapshot and overhead than the checkpoints took held the rest as compute.
    outside = [(10, report("a", 9, overhead=1)), (10, ev.CheckpointWritten("a", 1, 100, 3 * S, 1))]
    assert seconds(of(outside), "a") == {"compute": 7, "overhead": 3}
