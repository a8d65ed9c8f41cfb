"""Learners that are cut off, set aside or not there yet, as the events of both sides tell it."""

from __future__ import annotations

import pytest
from synthetic_run import Timed, state_of

from atoll.observe import RunState
from atoll.observe import events as ev
from atoll.observe.log import bits_text

S = 1_000_000_000
SERVED: list[Timed] = [(0, ev.SyncerStarted("run", "127.0.0.1:1", 1))]
JOINED: list[Timed] = [*SERVED, (1, ev.LearnerJoined("a", 1, 0, 0)), (1, ev.MemberChanged("a", 1, "active", "ready"))]


def steps(first_s: int, last_s: int, learner: str = "a") -> list[Timed]:
    return [(t_s, ev.LearnerSteps(learner, 1, t_s, 1, 10, 10, 2.0, S, 0, 0, 0, 0, 0)) for t_s in range(first_s, last_s)]


def away(t_s: float, silent_s: float) -> Timed:
    return t_s, ev.MemberChanged("a", 1, "away", f"silent for {silent_s:g} s", int(silent_s * S))


def commit(contributors: list[str], version: int = 1) -> ev.Committed:
    equal = [1.0 / len(contributors)] * len(contributors)
    return ev.Committed(0, version, version, contributors, 10, 1, 1, 1.0, 0.5, 7, [8] * len(contributors), equal)


def cut_off_s(state: RunState) -> list[float]:
    return [(one.up_ns - one.down_ns) / S for one in state.comebacks.returns]


# ---------------------------------------------------------------- for how long


def test_a_learner_that_notices_only_afterwards_was_cut_off_from_the_beginning() -> None:
    """The cut is at 10 s and over at 35 s. The learner finds its connection dead when packets pass again, and has a new
    one within a tenth of a second."""
    back: list[Timed] = [
        (35.0, ev.LearnerLink("a", False, "reset")),
        (35.1, ev.MemberChanged("a", 1, "joining", "joined")),
        (35.1, ev.LearnerLink("a", True)),
    ]
    state = state_of(*JOINED, away(25, 15), *back, (36, commit(["a"])))
    assert cut_off_s(state) == [pytest.approx(25.1)]
    assert "a came back after 25 s with 8 steps" in " ".join(line.text for line in state.log)


def test_a_learner_whose_session_outlived_the_cut_was_cut_off_too() -> None:
    state = state_of(*JOINED, away(25, 15), (35, ev.MemberChanged("a", 1, "active", "heard again")))
    assert cut_off_s(state) == [25.0]
    assert state.log[-1].text == "a is heard again after 25 s"


def test_one_that_is_back_before_the_syncer_missed_it_was_cut_off_since_it_was_last_heard() -> None:
    replaced = ev.MemberChanged("a", 1, "joining", "joined", 12 * S)
    state = state_of(*JOINED, (34.9, ev.LearnerLink("a", False)), (35, replaced), (35, ev.LearnerLink("a", True)))
    assert cut_off_s(state) == [12.0]


def test_a_connection_that_is_reset_and_made_again_is_a_short_cut() -> None:
    events: list[Timed] = [
        (30, ev.LearnerLink("a", False, "reset")),
        (30, ev.MemberChanged("a", 1, "away", "the connection broke", int(1.7 * S))),
        (30.1, ev.MemberChanged("a", 1, "joining", "joined")),
        (30.1, ev.LearnerLink("a", True)),
    ]
    assert cut_off_s(state_of(*JOINED, *events)) == [pytest.approx(0.1)]


def test_a_partition_of_the_plan_counts_even_if_nobody_noticed() -> None:
    fault = [(10, ev.FaultInjected("partition", "a", "both ways", 1)), (15, ev.FaultEnded("partition", "a"))]
    assert cut_off_s(state_of(*JOINED, *fault)) == [5.0]
    # It is over when the last of the three says so.
    late: list[Timed] = [away(14, 4), (16.5, ev.MemberChanged("a", 1, "active", "heard again"))]
    assert cut_off_s(state_of(*JOINED, *fault, *late)) == [6.5]


def test_a_process_that_stops_dies_or_leaves_is_not_cut_off() -> None:
    frozen: list[Timed] = [(8, ev.FaultInjected("freeze", "a", "", 1)), (40, ev.FaultEnded("freeze", "a"))]
    assert (
        cut_off_s(state_of(*JOINED, *frozen, away(23, 15), (40, ev.MemberChanged("a", 1, "active", "heard again"))))
        == []
    )
    died: list[Timed] = [away(20, 0), (20.1, ev.ProcessExited("learner", "a", 1, -9)), (25, ev.LearnerStarted("a", 2))]
    assert cut_off_s(state_of(*JOINED, *died, (26, ev.MemberChanged("a", 2, "active", "ready")))) == []
    # Elsewhere, with nobody to see it end: the next process says it.
    assert cut_off_s(state_of(*JOINED, away(20, 15), (60, ev.MemberChanged("a", 2, "joining", "joined")))) == []
    assert cut_off_s(state_of(*JOINED, away(20, 15), (60, ev.MemberChanged("a", 1, "left", "finished")))) == []


# ---------------------------------------------------------------- what it is called


def test_a_partitioned_learner_is_cut_off_and_not_slow() -> None:
    fault = (10, ev.FaultInjected("partition", "a", "both ways", 99 * S))
    state = state_of(*JOINED, *steps(2, 22), fault)
    assert state.states(22 * S) == {"a": "cut off"}
    assert state.comebacks.cut_off_since("a") == 10 * S
    over = state_of(*JOINED, *steps(2, 22), fault, (20, ev.FaultEnded("partition", "a")))
    assert over.states(22 * S) == {"a": "active"}


def test_a_guest_of_the_plan_is_not_slow_and_one_that_left_does_not_train() -> None:
    fault = (1, ev.FaultInjected("join", "a", "", 99 * S))
    assert state_of(*JOINED, fault, *steps(2, 9)).states(9 * S) == {"a": "active"}
    for end in (ev.LearnerFinished("a", 7, 70, "SIGTERM"), ev.MemberChanged("a", 1, "left", "SIGTERM")):
        assert state_of(*JOINED, fault, *steps(2, 9), (9, end)).states(9 * S) == {"a": "left"}


def test_a_guest_that_was_sent_away_before_its_first_step_does_not_join_for_ever() -> None:
    events = [*JOINED, *steps(2, 9), (3, ev.ProcessStarted("learner", "b", 5))]
    assert state_of(*events).states(9 * S)["b"] == "joining"
    assert state_of(*events, (7, ev.ProcessExited("learner", "b", 5, -15))).states(9 * S)["b"] == "left"
    # Killed together with its supervisor: nobody saw it end, but the run is over.
    assert state_of(*events, (9, ev.RunFinished("finished", 1.0, 9.0))).states(9 * S) == {"a": "left", "b": "left"}


def test_a_guest_that_has_left_is_not_among_the_others_that_a_fault_spared() -> None:
    left = (9, ev.LearnerFinished("a", 7, 70, "SIGTERM"))
    fault = (12, ev.FaultInjected("slow", "c", "", 99 * S))
    state = state_of(*JOINED, *steps(2, 9), left, *steps(2, 20, "b"), *steps(2, 20, "c"), fault)
    assert [other.learner for other in state.fault_costs()[0].others] == ["b"]


def test_learners_elsewhere_are_known_by_the_words_of_the_syncer_alone() -> None:
    joining: list[Timed] = [*SERVED, (1, ev.MemberChanged("a", 1, "joining", "joined"))]
    assert state_of(*joining).states() == {"a": "joining"}
    active = [*joining, (2, ev.MemberChanged("a", 1, "active", "ready at step 0"))]
    assert state_of(*active).states() == {"a": "active"}
    silent = state_of(*active, away(25, 15))
    assert silent.states() == {"a": "away"} and silent.comebacks.cut_off_since("a") == 10 * S
    lost = state_of(*active, away(25, 15), (85, ev.MemberChanged("a", 1, "lost", "away for 60 s")))
    assert lost.states() == {"a": "lost"}


def test_generations_read_as_people_count() -> None:
    state = state_of(
        (1, ev.LearnerJoined("a", 1, 0, 0)),
        *steps(2, 4),
        (5, ev.LearnerJoined("a", 1002, 3, 0)),
        (6, ev.LearnerJoined("a", 2003, 3, 0)),
        (7, ev.LearnerJoined("b", 2001, 3, 0)),
    )
    assert [state.nth("a", raw) for raw in (1, 1002, 2003)] == [1, 2, 3] and state.nth("b", 2001) == 1
    assert "a rejoined at step 3 (generation 3)" in [line.text for line in state.log]
    assert state.learners["a"].generation == 2003, "whoever reads the numbers gets the real one"
    assert state.in_words("a", "of step 3, generation 1002") == "of step 3, generation 2"


# ---------------------------------------------------------------- waiting for learners


def test_the_run_says_how_many_learners_it_waits_for() -> None:
    run: list[Timed] = [(0, ev.RunStarted("decoupled", 4, 0, 8, 1, "int4", "int4", 0)), *JOINED]
    state = state_of(*run)
    assert (state.joined, state.waits_for) == (1, 4)
    # A quorum of a plain number does not wait for all of them.
    assert state_of(*run, (5, ev.RoundLaunched(0, 1, 0, 4, ["a"], 1))).waits_for == 0
    coming: list[Timed] = [(3, ev.MemberChanged(name, 1, "joining", "joined")) for name in "bcd"]
    assert state_of(*run, *coming).joined == 1
    there: list[Timed] = [(4, ev.MemberChanged(name, 1, "active", "ready")) for name in "bcd"]
    assert state_of(*run, *coming, *there).waits_for == 0


# ---------------------------------------------------------------- learners that rounds do not wait for


def test_a_learner_that_is_set_aside_has_a_spell_with_what_was_merged_of_it() -> None:
    events: list[Timed] = [
        *JOINED,
        *steps(2, 30),
        (5, commit(["a", "b"])),
        (10, ev.MemberAside("a", 1, True, "has not answered 3 rounds")),
        (12, commit(["b"], 2)),
        (15, commit(["a", "b"], 3)),
    ]
    state = state_of(*events)
    assert state.states(30 * S)["a"] == "aside"
    state = state_of(*events, (20, ev.MemberAside("a", 1, False, "answered")), (22, commit(["a"], 4)))
    assert state.states(30 * S)["a"] == "active"
    (spell,) = state.notices.spells
    assert (spell.start_ns, spell.end_ns, spell.merged) == (10 * S, 20 * S, 1)
    assert [line.text for line in state.log if line.text.startswith("a ")][-2:] == [
        "a set aside: has not answered 3 rounds",
        "a counts again: answered",
    ]


@pytest.mark.parametrize(
    "end",
    [
        ev.SyncerStarted("run", "127.0.0.1:1", 2, 2),
        ev.MemberChanged("a", 1, "lost", "away for 60 s"),
        ev.LearnerFinished("a", 1, 1, "finished"),
        ev.ProcessExited("learner", "a", 1, -9),
    ],
)
def test_nobody_is_set_aside_who_is_not_there(end: ev.Event) -> None:
    state = state_of(*JOINED, (10, ev.MemberAside("a", 1, True, "why")), (20, end))
    assert state.notices.spell("a") is None and state.notices.spells[0].end_ns == 20 * S


def test_a_thin_link_is_thin_until_it_is_seen_or_said_to_be_wide_enough() -> None:
    thin = (5, ev.LinkThin("a", "up", 150_000, 6_250))
    state = state_of(*JOINED, thin)
    assert state.log[-1].text == "a link up too thin: needs 1.2 Mbit/s, gets 50 kbit/s"
    assert list(state.notices.thin) == [("a", "up")]
    state = state_of(*JOINED, thin, (9, ev.LinkThin("a", "up", 150_000, 150_000)))
    assert not state.notices.thin and list(state.notices.thin_ever) == [("a", "up")]
    slow = (8, ev.LearnerPushed("a", 0, 1, 1, 6_250, 8, 80, 1, S, "accepted"))
    assert list(state_of(*JOINED, thin, slow).notices.thin) == [("a", "up")]
    quick = (9, ev.LearnerPushed("a", 0, 2, 2, 6_250, 8, 80, 1, S // 100, "accepted"))
    assert not state_of(*JOINED, thin, slow, quick).notices.thin
    assert [bits_text(value) for value in (0, 100, 125_000, 12.5e9)] == [
        "0 bit/s",
        "800 bit/s",
        "1 Mbit/s",
        "100 Gbit/s",
    ]


def test_a_warning_that_is_said_again_is_counted() -> None:
    state = state_of(
        *((t_s, ev.Warned("syncer", "the disk is full")) for t_s in (1, 2, 3)), (4, ev.Warned("a", "other"))
    )
    assert [(one.t_ns, one.text, one.count) for one in state.notices.warnings] == [
        (S, "the disk is full", 3),
        (4 * S, "other", 1),
    ]


def test_a_rate_beyond_every_unit_is_a_plain_number() -> None:
    """A probe over loopback may measure no time at all."""
    assert bits_text(524e9) == "4,192 Gbit/s" and bits_text(6250) == "50 kbit/s"
