"""Goodput against small cases worked out by hand, and against the sums it must keep for any stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import KILLED, SyntheticRun

from atoll.observe import data_parallel_bytes, measure_goodput
from atoll.observe import events as ev
from atoll.observe.account import CATEGORIES
from atoll.observe.goodput import Goodput

S = 1_000_000_000
STARTED = ev.RunStarted("decoupled", 2, 1000, 24, 4, "int4", "int4", 0)


def report(learner: str, compute_s: float, tokens: int = 100, **others_s: float) -> ev.LearnerSteps:
    ns = {f"{name}_ns": int(others_s.get(name, 0) * S) for name in ("stall", "adopt", "snapshot", "overhead")}
    return ev.LearnerSteps(
        learner=learner, generation=1, step=1, steps=1, tokens=tokens, tokens_total=tokens, loss=1.0,
        compute_ns=int(compute_s * S), fragments_behind=0, **ns,
    )  # fmt: skip


def stats(discarded: dict[str, int]) -> ev.SyncerStats:
    return ev.SyncerStats(0, 1, 0, 0, 0, 0, 0, 0, 1000, 1000 - sum(discarded.values()), 0, discarded)


def of(*events: tuple[float, ev.Event], origin_s: float = 1000.0) -> Goodput:
    return measure_goodput((int((origin_s + t_s) * S), "x", event) for t_s, event in events)


def seconds(goodput: Goodput, learner: str) -> dict[str, float]:
    return {name: s for name, s in goodput.learners[learner].seconds.items() if s}


def test_no_events_is_no_goodput() -> None:
    assert of().share == 0.0
    assert of((1, ev.LearnerStarted("a", 1))).learners == {}


def test_one_learner_that_only_computes() -> None:
    goodput = of((10, report("a", 10)), (20, report("a", 10)))
    assert goodput.window_s == 20
    assert goodput.share == 1.0
    assert seconds(goodput, "a") == {"compute": 20}


def test_reported_parts_are_kept_apart() -> None:
    goodput = of((10, report("a", 6, stall=1, adopt=2, snapshot=0.5, overhead=0.5)))
    assert seconds(goodput, "a") == {"compute": 6, "stall": 1, "adopt": 2, "snapshot": 0.5, "overhead": 0.5}
    assert goodput.share == pytest.approx(0.6)


def test_the_origin_of_time_does_not_matter() -> None:
    events = ((10, report("a", 10)), (12, report("b", 9)))
    assert of(*events, origin_s=0.0) == of(*events, origin_s=1.7e9)


def test_a_killed_learner_is_down_then_recovers() -> None:
    goodput = of(
        (0, ev.ProcessStarted("learner", "a", 1)),
        (0, ev.ProcessStarted("learner", "b", 2)),
        (10, report("a", 10)),
        (10, report("b", 10)),
        (13, ev.ProcessExited("learner", "b", 2, -9)),
        (14, ev.ProcessStarted("learner", "b", 3)),
        (16, ev.LearnerStarted("b", 3)),
        (17, ev.LearnerJoined("b", 2, 5, 0)),
        (20, report("b", 2)),
        (20, report("a", 10)),
    )
    assert seconds(goodput, "a") == {"compute": 20}
    # Down from the last report (10) to the next process (14); recovering until the first new step began (18).
    assert seconds(goodput, "b") == {"compute": 12, "down": 4, "recovery": 4}
    assert goodput.share == pytest.approx(32 / 40)
    assert goodput.learners["b"].failures == 1


def test_a_shell_around_the_training_process_changes_nothing() -> None:
    """The launcher knows the shell by its pid, the events of the learner have another."""
    goodput = of(
        (0, ev.ProcessStarted("learner", "a", 1)),
        (1, ev.LearnerStarted("a", 11)),
        (10, report("a", 10)),
        (13, ev.ProcessExited("learner", "a", 1, -9)),
        (14, ev.ProcessStarted("learner", "a", 2)),
        (15, ev.LearnerStarted("a", 12)),
        (20, report("a", 2)),
    )
    assert seconds(goodput, "a") == {"compute": 12, "down": 4, "recovery": 4}
    assert goodput.learners["a"].failures == 1


def test_without_a_launcher_the_successor_tells_of_the_death() -> None:
    goodput = of(
        (0, ev.LearnerStarted("a", 1)),
        (10, report("a", 10)),
        (15, ev.LearnerStarted("a", 2)),
        (20, report("a", 3)),
    )
    assert seconds(goodput, "a") == {"compute": 13, "down": 5, "recovery": 2}


def test_time_spent_testing_the_model_is_told_apart() -> None:
    goodput = of((10, report("a", 10)), (12, ev.LearnerEvaluated("a", 1, 2.0, 100)), (20, report("a", 7)))
    assert seconds(goodput, "a") == {"compute": 17, "evaluate": 3}


def test_one_that_never_comes_back_is_down_until_the_end() -> None:
    goodput = of(
        (10, report("a", 10)),
        (10, report("b", 10)),
        (11, ev.ProcessExited("learner", "b", 2, 1)),
        (40, report("a", 30)),
    )
    assert seconds(goodput, "b") == {"compute": 10, "down": 30}


def test_a_late_joiner_is_allocated_from_its_first_sign() -> None:
    goodput = of((10, report("a", 10)), (12, ev.LearnerStarted("b", 9)), (20, report("a", 10)), (20, report("b", 6)))
    assert goodput.learners["b"].allocated_s == 8
    assert seconds(goodput, "b") == {"compute": 6, "idle": 2}
    assert goodput.share == pytest.approx(26 / 28)


def test_one_that_was_there_at_the_start_is_allocated_from_the_start() -> None:
    goodput = of((0, ev.LearnerStarted("b", 9)), (10, report("a", 10)), (20, report("a", 10)), (20, report("b", 6)))
    assert goodput.learners["b"].allocated_s == 20


def test_one_that_finishes_gives_its_slot_back() -> None:
    goodput = of(
        (10, report("a", 10)), (10, report("b", 10)), (11, ev.LearnerFinished("b", 1, 1, "x")), (20, report("a", 10))
    )
    assert goodput.learners["b"].allocated_s == 11
    assert goodput.learners["b"].failures == 0


def test_what_happens_after_the_last_step_is_not_in_the_window() -> None:
    goodput = of(
        (10, report("a", 10)),
        (30, ev.ProcessExited("learner", "a", 1, -15)),
        (31, ev.ProcessStarted("learner", "a", 2)),
        (40, ev.RunFinished("over", 1.0, 40)),
    )
    assert goodput.window_s == 10
    assert seconds(goodput, "a") == {"compute": 10}


def test_processes_that_the_launcher_ends_are_no_failures() -> None:
    events = (
        (10, report("a", 10)),
        (11, ev.RunFinished("over", 1.0, 1)),
        (12, ev.ProcessExited("learner", "a", 1, -15)),
    )
    assert of(*events).learners["a"].failures == 0


def test_discarded_tokens_count_by_the_share_of_their_fragment() -> None:
    layout = ev.LayoutFixed(parameters=100, tensors=2, fragments=2, fragment_parameters=[75, 25])
    goodput = of(
        (0, layout),
        (10, report("a", 10, tokens=1000)),
        (10, ev.LearnerDiscarded("a", 0, 400, "overwritten")),
        (10, ev.LearnerDiscarded("a", 1, 400, "overwritten")),
    )
    assert goodput.learners["a"].tokens_discarded == pytest.approx(400)
    assert goodput.share == pytest.approx(0.6)


def test_without_a_layout_fragments_count_evenly() -> None:
    goodput = of((10, report("a", 10, tokens=1000)), (10, ev.LearnerDiscarded("a", 3, 400, "overwritten")))
    assert goodput.learners["a"].tokens_discarded == pytest.approx(100)


def test_what_was_lost_with_a_process_is_charged_to_those_that_failed() -> None:
    goodput = of(
        (10, report("a", 10, tokens=500)),
        (10, report("b", 10, tokens=500)),
        (11, ev.ProcessExited("learner", "b", 2, -9)),
        (20, report("a", 10, tokens=500)),
        (20, stats({"learner_lost": 250})),
    )
    assert goodput.learners["a"].tokens_discarded == 0
    assert goodput.learners["b"].tokens_discarded == 250
    assert goodput.share == pytest.approx((20 + 5) / 40)


def test_discards_told_by_both_sides_count_once() -> None:
    goodput = of(
        (10, report("a", 10, tokens=1000)),
        (10, ev.LearnerDiscarded("a", 0, 400, "overwritten")),
        (10, stats({"overwritten": 400})),
    )
    assert goodput.share == pytest.approx(0.6)


def test_the_synthetic_run_adds_up() -> None:
    goodput = measure_goodput(SyntheticRun().events)
    for one in goodput.learners.values():
        assert one.allocated_s == pytest.approx(goodput.window_s)
        assert set(one.seconds) == set(CATEGORIES)
    assert goodput.learners[KILLED].failures == 1
    assert goodput.learners[KILLED].seconds["recovery"] == pytest.approx(4.6, abs=0.01)
    assert 0.9 < goodput.share < 1.0


_SOME_EVENT = st.one_of(
    st.builds(report, st.sampled_from("abc"), st.floats(0, 5), stall=st.floats(0, 3)),
    st.builds(ev.LearnerStarted, st.sampled_from("abc"), st.integers(1, 5)),
    st.builds(ev.ProcessStarted, st.just("learner"), st.sampled_from("abc"), st.integers(1, 5)),
    st.builds(
        ev.ProcessExited, st.just("learner"), st.sampled_from("abc"), st.integers(1, 5), st.sampled_from([0, -9])
    ),
    st.builds(ev.LearnerFinished, st.sampled_from("abc"), st.just(1), st.just(1), st.just("x")),
    st.builds(ev.CheckpointWritten, st.sampled_from("abc"), st.just(1), st.just(1), st.integers(0, 3 * S), st.just(1)),
    st.just(STARTED),
    st.just(ev.RunFinished("over", 1.0, 1.0)),
)


@given(st.lists(st.tuples(st.floats(0, 60) | st.sampled_from([500.0, 520.0, 4000.0]), _SOME_EVENT), max_size=40))
def test_any_stream_adds_up(events: list[tuple[float, ev.Event]]) -> None:
    goodput = of(*sorted(events, key=lambda stamped: stamped[0]))
    assert 0.0 <= goodput.share <= 1.0 + 1e-9
    for one in goodput.learners.values():
        assert all(s >= -1e-6 for s in one.seconds.values())
        assert one.allocated_s <= goodput.window_s + 1e-6


def test_data_parallel_bytes() -> None:
    # Each of 4 learners sends 2 * 3/4 of 1000 bf16 gradients (2 bytes) in each of its 10 steps.
    assert data_parallel_bytes(1000, 4 * 10, 4) == 40 * 3000
    assert data_parallel_bytes(1000, 10, 1) == 0
    # H=24 and int4 both ways is 1 byte per parameter in 24 steps: about 96 times fewer for many learners.
    ratio = data_parallel_bytes(10**6, 24 * 1000, 1000) / (1000 * 10**6)
    assert ratio == pytest.approx(96, rel=0.01)
