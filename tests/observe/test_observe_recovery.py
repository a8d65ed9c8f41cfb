"""What survived, as the events tell it: syncers, durability, learners that come back, bytes over several processes."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from synthetic_recovery import CUT_OFF, DAMAGED, HEALED, KILLS, SYNCER_AWAY, RecoveryRun
from synthetic_run import Timed, state_of

from atoll.observe import RunState
from atoll.observe import events as ev
from atoll.observe.lines import decode, encode
from atoll.observe.thin import THIN_PERIOD_NS, Thinner

S = 1_000_000_000


def whole() -> RunState:
    state = RunState()
    for t_ns, source, event in RecoveryRun().events:
        state.apply(t_ns, event, source)
    return state


def step(learner: str, seconds: float = 1.0) -> ev.LearnerSteps:
    return ev.LearnerSteps(learner, 1, 1, 1, 10, 10, 2.0, int(seconds * S), 0, 0, 0, 0, 0)


def stats(up: int, down: int, commits: int = 0) -> ev.SyncerStats:
    return ev.SyncerStats(0, 1, commits, 0, 0, 0, up, down, 100, 100, 0)


def started(epoch: int, pid: int, durability: str = "commit") -> ev.SyncerStarted:
    return ev.SyncerStarted("run", "127.0.0.1:1", pid, epoch, durability)


def recovered(source: str = "slots", exact: bool = True, problems: list[str] | None = None) -> ev.SyncerRecovered:
    return ev.SyncerRecovered(source, exact, [3, 3], 1000, S // 4, problems or [])


def commit(fragment: int, version: int, steps: dict[str, int], total: int | None = None) -> ev.Committed:
    whole_steps = total or sum(steps.values())
    weights = [count / whole_steps for count in steps.values()]
    return ev.Committed(
        fragment, version, version, list(steps), 10, 1, 1, 1.0, math.nan, 0, list(steps.values()), weights, 0, 0
    )


SERVED: list[Timed] = [
    (0, ev.ProcessStarted("syncer", "syncer", 1)),
    (1, started(1, 1)),
    (10, step("a", 10)),
    (11, stats(5, 5)),
]


# ---------------------------------------------------------------- the syncer


def test_the_time_without_a_syncer_is_from_its_exit_to_the_next_that_serves() -> None:
    events: list[Timed] = [*SERVED, (12, ev.ProcessExited("syncer", "syncer", 1, -9))]
    gone = state_of(*events, (14, step("a")))
    assert gone.syncer_state(14 * S) == "down"
    assert gone.syncer_away_s == 2
    events += [(13, ev.ProcessStarted("syncer", "syncer", 2)), (15, started(2, 2)), (15, recovered()), (20, step("a"))]
    back = state_of(*events)
    assert back.syncer_state(20 * S) == "up"
    assert back.syncer_away_s == 3
    (restart,) = back.syncer.restarts
    assert (restart.epoch, restart.exit_code, restart.source, restart.exact) == (2, -9, "slots", True)
    assert restart.load_ns == S // 4
    assert [line.text for line in back.log][-2:] == [
        "syncer serves again after 3.0 s (epoch 2)",
        "syncer recovered from its disk: no version lost",
    ]


def test_where_nobody_saw_it_end_the_time_counts_from_its_last_word() -> None:
    state = state_of(*SERVED, (15, started(2, 2)), (20, step("a")))
    assert state.syncer_away_s == 4
    assert state.syncer.restarts[0].exit_code is None


def test_recovery_may_be_told_before_or_after_it_serves() -> None:
    end: Timed = (12, ev.ProcessExited("syncer", "syncer", 1, -9))
    found = recovered("step-7", False, ["slot 3 is torn"])
    before = state_of(*SERVED, end, (14, found), (15, started(2, 2)))
    after = state_of(*SERVED, end, (15, started(2, 2)), (16, found))
    for state in (before, after):
        (restart,) = state.syncer.restarts
        assert (restart.source, restart.exact, restart.problems) == ("step-7", False, ["slot 3 is torn"])
        assert "syncer found: slot 3 is torn" in [line.text for line in state.log]
        assert state.syncer.recovery is restart


def test_a_run_that_begins_with_a_snapshot_of_another_has_recovered_without_an_absence() -> None:
    state = state_of((1, started(1, 1)), (1, recovered("step-7")), (5, step("a")))
    assert [(r.source, r.away_ns, r.resumed) for r in state.syncer.restarts] == [("step-7", 0, True)]
    assert state.syncer_away_s == 0


def test_a_syncer_that_was_fenced_out_long_ago_may_end_without_being_missed() -> None:
    state = state_of(*SERVED, (12, started(2, 2)), (13, ev.ProcessExited("syncer", "old", 1, 1)), (20, step("a")))
    assert state.syncer_state(20 * S) == "up"


def test_a_shell_around_the_syncer_that_ends_with_it_is_its_end() -> None:
    state = state_of((0, ev.ProcessStarted("syncer", "syncer", 7)), (1, started(1, 8)), (5, step("a")))
    state.apply(6 * S, ev.ProcessExited("syncer", "syncer", 7, -9))
    assert state.syncer_state(7 * S) == "down"


def test_of_two_that_take_turns_only_the_end_of_the_one_that_serves_is_missed() -> None:
    """One that stands by is killed; the other freezes, is overtaken, and says so when it wakes up."""
    state = state_of(*SERVED, (11, ev.ProcessStarted("syncer", "standby", 2)))
    state.apply(12 * S, ev.ProcessExited("syncer", "standby", 2, -9), "launcher")
    assert state.syncer.up
    state.apply(13 * S, ev.ProcessStarted("syncer", "standby", 3), "launcher")
    state.apply(20 * S, started(2, 3), "syncer-3")
    state.apply(21 * S, ev.SyncerStopped("overtaken", 1, 1), "syncer-1")
    state.apply(21 * S, ev.ProcessExited("syncer", "syncer", 1, 3), "launcher")
    state.apply(22 * S, ev.ProcessStarted("syncer", "syncer", 4), "launcher")
    state.apply(23 * S, ev.ProcessExited("syncer", "syncer", 4, -9), "launcher")
    assert state.syncer.up and state.syncer.epoch == 2
    state.apply(30 * S, ev.ProcessExited("syncer", "standby", 3, -9), "launcher")
    assert not state.syncer.up
    state.apply(33 * S, started(3, 5), "syncer-5")
    assert state.syncer.restarts[-1].away_ns == 3 * S


def test_a_recovery_told_early_in_a_file_of_its_own_belongs_to_the_next_syncer() -> None:
    state = RunState()
    state.apply(1 * S, started(1, 1), "syncer-1")
    state.apply(5 * S, step("a"), "learner-a-1")
    state.apply(20 * S, recovered(), "syncer-2")
    state.apply(21 * S, started(2, 2), "syncer-2")
    assert [(one.epoch, one.source) for one in state.syncer.restarts] == [(2, "slots")]


def test_learners_elsewhere_that_went_on_missed_the_syncer_of_a_launcher_that_was_killed() -> None:
    run = ev.RunStarted("decoupled", 2, 1000, 24, 4, "int4", "int4", 0)
    events: list[Timed] = [(0, run), *SERVED]
    events += [(t_s, step("a")) for t_s in range(12, 42)]
    events += [(42, run), (43, started(2, 2)), (43.5, step("a", 2.5)), (44, stats(1, 1))]
    state = state_of(*events)
    assert state.syncer_away_s == 30
    assert state.goodput().learners["a"].allocated_s == pytest.approx(43.5)
    assert state.syncer.away_times(state.end_ns) == [(11 * S, 41 * S)]


def test_one_that_is_stopped_and_started_again_in_order_was_missed_as_well() -> None:
    stopped: list[Timed] = [*SERVED, (12, ev.SyncerStopped("stopped", 3))]
    assert state_of(*stopped).syncer_state(13 * S) == "stopped"
    state = state_of(*stopped, (16, started(2, 2)), (20, step("a")))
    assert state.syncer_away_s == 4


def test_a_syncer_that_ends_after_the_last_step_is_not_missed() -> None:
    assert state_of(*SERVED, (12, ev.ProcessExited("syncer", "syncer", 1, -9))).syncer_away_s == 0


def test_without_a_launcher_silence_and_lost_links_tell() -> None:
    events: list[Timed] = [(1, started(1, 1)), (2, step("a")), (3, ev.LearnerLink("a", True)), (4, stats(1, 1))]
    assert state_of(*events).syncer_state(60 * S) == "up"
    assert state_of(*events, (5, ev.LearnerLink("a", False))).syncer_state(60 * S) == "silent"


def test_learners_without_a_syncer_are_not_away_from_it() -> None:
    events: list[Timed] = [
        *SERVED,
        (12, ev.ProcessExited("syncer", "syncer", 1, -9)),
        (12, ev.LearnerLink("a", False, "reset")),
    ]
    state = state_of(*events, (13, step("a")))
    assert state.states()["a"] == "active"
    state = state_of(*events, (13, step("a")), (14, started(2, 2)), (15, ev.LearnerLink("a", True)))
    assert not any("link" in line.text for line in state.log)


def test_rounds_that_died_with_the_syncer_are_not_open() -> None:
    launched: Timed = (11, ev.RoundLaunched(7, 1, 0, 24, ["a"], 1))
    assert len(state_of(*SERVED, launched).rounds.open) == 1
    assert len(state_of(*SERVED, launched, (12, started(2, 2))).rounds.open) == 0


# ---------------------------------------------------------------- bytes over several processes


def test_bytes_add_up_over_syncer_processes_and_other_counts_go_on() -> None:
    state = state_of((1, started(1, 1)), (2, stats(100, 10, 5)), (3, started(2, 2)), (4, stats(30, 20, 7)))
    assert (state.bytes_up, state.bytes_down) == (130, 30)
    assert state.stats is not None and state.stats.commits == 7


def test_a_counter_that_falls_is_a_new_process() -> None:
    state = state_of((1, stats(100, 10)), (2, stats(120, 12)), (3, stats(5, 1)), (4, stats(9, 2)))
    assert (state.bytes_up, state.bytes_down) == (129, 14)


def test_an_old_syncer_that_still_talks_is_not_taken_for_the_run() -> None:
    state = RunState()
    state.apply(1, started(1, 1), "syncer-1")
    state.apply(2, stats(100, 10, 5), "syncer-1")
    state.apply(3, started(2, 2), "syncer-2")
    state.apply(4, stats(30, 3, 7), "syncer-2")
    state.apply(5, stats(101, 11, 5), "syncer-1")
    state.apply(6, stats(31, 4, 8), "syncer-2")
    assert (state.bytes_up, state.bytes_down) == (132, 15)
    assert state.stats is not None and state.stats.commits == 8


# ---------------------------------------------------------------- durability, snapshots, data


def test_a_lapse_lasts_until_the_level_is_back() -> None:
    events: list[Timed] = [*SERVED, (12, ev.DurabilityChanged("degraded", "commit", "No space left on device"))]
    events += [(13, ev.DurabilityChanged("degraded", "commit", "Input/output error"))]
    degraded = state_of(*events).durability
    assert (degraded.level, degraded.wanted) == ("degraded", "commit")
    assert degraded.lapse is not None and degraded.lapse.reason == "No space left on device"
    back = state_of(*events, (20, ev.DurabilityChanged("commit", "commit", "written again"))).durability
    assert back.lapse is None
    (lapse,) = back.lapses
    assert (lapse.start_ns, lapse.end_ns) == (12 * S, 20 * S)


def test_a_new_syncer_ends_a_lapse_unless_it_says_otherwise() -> None:
    events: list[Timed] = [*SERVED, (12, ev.DurabilityChanged("degraded", "commit", "full")), (14, started(2, 2))]
    assert state_of(*events).durability.lapse is None
    again = state_of(*events, (15, ev.DurabilityChanged("degraded", "commit", "full"))).durability
    assert len(again.lapses) == 2 and again.lapse is not None


def test_what_commits_cost_counts_only_those_that_were_written() -> None:
    plain = commit(0, 1, {"a": 24})
    state = state_of(
        (1, plain),
        (2, replace(plain, store_ns=4_000_000, store_bytes=100)),
        (3, replace(plain, store_ns=8_000_000, store_bytes=300)),
    )
    cost = state.durability.commits
    assert (cost.count, cost.ns_mean, cost.ns_max, cost.bytes_mean) == (2, 6_000_000, 8_000_000, 200)
    assert state.rounds.commits == 3


def test_snapshots_healed_fragments_and_the_data_ledger() -> None:
    state = state_of(
        (1, ev.SnapshotWritten("memory://x", 3, 500, S, [1])),
        (2, ev.SnapshotWritten("memory://x", 4, 600, 2 * S, [2])),
        (3, ev.SnapshotFailed("memory://x", "no such bucket")),
        (4, ev.FragmentHealed(2, 10, 11, "a")),
        (5, ev.DataLedger("train", 10, 5, 2, 2, 1, 0, 0)),
        (6, ev.DataLedger("train", 10, 6, 4, 2, 0, 1, 0)),
        (6, ev.DataLedger("other", 0, 1, 0, 1, 0, 0, 0)),
    )
    book = state.durability
    assert (book.snapshots.count, book.snapshots_failed) == (2, 1)
    assert book.last_snapshot is not None and book.last_snapshot.label == 4
    assert [event.fragment for _, event in book.healed] == [2]
    assert {name: ledger.done for name, ledger in book.data.items()} == {"train": 4, "other": 0}


# ---------------------------------------------------------------- learners that come back


def test_a_restart_has_its_rung_and_how_long_it_took() -> None:
    state = state_of(
        (0, ev.ProcessStarted("learner", "a", 1)),
        (1, ev.LearnerRecovered("a", 1, 0, "fresh", "", 0)),
        (10, step("a", 9)),
        (11, ev.ProcessExited("learner", "a", 1, -9)),
        (12, ev.ProcessStarted("learner", "a", 2)),
        (15, ev.LearnerJoined("a", 2, 9, 0)),
        (15, ev.LearnerRecovered("a", 2, 9, "peer", "b", S)),
        (20, step("a", 4)),
    )
    (one,) = state.comebacks.recoveries
    assert (one.learner, one.rung, one.detail, one.away_ns, one.exit_code) == ("a", "peer", "b", 4 * S, -9)
    assert state.comebacks.rungs == {"peer": 1}
    assert (state.learners["a"].restarts, state.learners["a"].rung) == (1, "peer")
    assert [fault.rung for fault in state.faults] == ["peer"]
    assert state.log[-1].text == "a goes on with the optimizer state of a peer (b)"


def test_the_heaviest_contribution_after_a_lost_link_is_kept() -> None:
    events: list[Timed] = [
        (1, ev.LearnerLink("a", True)),
        (2, commit(0, 1, {"a": 24, "b": 24})),
        (3, ev.LearnerLink("a", False, "reset")),
        (77, ev.LearnerLink("a", True)),
        # Made before the link was lost, merged after it came back.
        (78, commit(0, 2, {"a": 20, "b": 20})),
        (79, commit(1, 2, {"a": 312, "b": 200})),
    ]
    (one,) = state_of(*events).comebacks.returns
    assert (one.steps, one.fragment, one.contributors) == (312, 1, 2)
    assert one.weight == pytest.approx(312 / 512)
    assert one.up_ns - one.down_ns == 74 * S
    # With the second commit of one fragment all that had gathered is in: what comes later is ordinary.
    (late,) = state_of(*events, (80, commit(0, 3, {"a": 24})), (99, commit(2, 9, {"a": 900}))).comebacks.returns
    assert late.steps == 312


def test_a_return_is_said_once_and_only_for_a_link_of_its_own() -> None:
    cut: list[Timed] = [
        (12, ev.LearnerLink("a", False)),
        (40, ev.LearnerLink("a", True)),
        (41, commit(0, 1, {"a": 50})),
    ]
    state = state_of(*SERVED, *cut, (42, commit(1, 1, {"a": 51})))
    said = [line.text for line in state.log if "came back" in line.text]
    assert said == ["a came back after 28 s with 50 steps in one contribution, weight 1.00"]
    syncer: list[Timed] = [(11.9, ev.ProcessExited("syncer", "syncer", 1, -9)), (39, started(2, 2))]
    state = state_of(*sorted([*SERVED, *cut, *syncer], key=lambda stamped: stamped[0]))
    assert not [line.text for line in state.log if "came back" in line.text]
    assert state.missed_syncer(state.comebacks.returns[0])


def test_a_new_process_has_no_part_in_the_absence_of_the_old_one() -> None:
    lost: Timed = (1, ev.LearnerLink("a", False))
    assert state_of(lost).comebacks.cut_off(10 * S) == [("a", S, 10 * S)]
    for end in (
        ev.LearnerStarted("a", 2),
        ev.ProcessExited("learner", "a", 1, -9),
        ev.LearnerFinished("a", 1, 1, "finished"),
    ):
        state = state_of(lost, (5, end), (6, ev.LearnerLink("a", True)))
        assert state.comebacks.returns == []
        assert state.comebacks.cut_off(10 * S) == []


def test_commits_that_do_not_say_who_weighed_what_are_no_returns() -> None:
    old = replace(commit(0, 1, {"a": 9}), steps=[], weights=[])
    state = state_of((1, ev.LearnerLink("a", False)), (2, ev.LearnerLink("a", True)), (3, old))
    assert state.comebacks.returns[0].commit_ns == 0


def test_checkpoints_are_summed_by_learner() -> None:
    state = state_of((1, ev.CheckpointWritten("a", 1, 100, 2_000, 1)), (2, ev.CheckpointWritten("a", 2, 300, 4_000, 1)))
    cost = state.comebacks.checkpoints["a"]
    assert (cost.count, cost.bytes, cost.ns, cost.ns_max) == (2, 400, 6_000, 4_000)


# ---------------------------------------------------------------- files


def test_files_of_an_older_version_still_read() -> None:
    def without(event: ev.Event, *names: str) -> ev.Event:
        raw = {name: value for name, value in json.loads(encode(1, event)).items() if name not in names}
        decoded = decode(json.dumps(raw).encode())
        assert decoded is not None
        return decoded[1]

    old = without(started(4, 9), "epoch", "durability")
    assert isinstance(old, ev.SyncerStarted) and (old.epoch, old.durability) == (1, "none")
    new = commit(0, 1, {"a": 24})
    bare = without(new, "steps", "weights", "store_ns", "store_bytes")
    assert isinstance(bare, ev.Committed) and (bare.steps, bare.weights, bare.store_bytes) == ([], [], 0)
    state = state_of((1, old), (2, bare), (3, step("a")))
    assert state.durability.commits.count == 0 and state.syncer.restarts == []


def test_weights_that_are_not_finite_survive_as_nan() -> None:
    event = replace(commit(0, 1, {"a": 1, "b": 2}), weights=[0.5, math.nan])
    decoded = decode(encode(1, event))
    assert decoded is not None and isinstance(decoded[1], ev.Committed)
    assert decoded[1].weights[0] == 0.5 and math.isnan(decoded[1].weights[1])


def test_every_event_of_a_recovery_survives_the_round_trip() -> None:
    for t_ns, _, event in RecoveryRun(resumed=False).events:
        decoded = decode(encode(t_ns, event))
        assert decoded is not None and repr(decoded) == repr((t_ns, event))


def test_a_full_file_keeps_the_newest_ledger_of_each_stream() -> None:
    thinner = Thinner()
    for second in range(30):
        assert thinner.take(second * S, ev.DataLedger("train", 0, second, second, 0, 0, 0, 0)) == []
    assert thinner.take(31 * S, ev.DataLedger("other", 0, 1, 0, 1, 0, 0, 0)) == []
    kept = thinner.take(THIN_PERIOD_NS, ev.DataLedger("train", 0, 60, 60, 0, 0, 0, 0))
    assert [(t_ns, event.stream, event.done) for t_ns, event in kept if isinstance(event, ev.DataLedger)] == [
        (31 * S, "other", 0),
        (THIN_PERIOD_NS, "train", 60),
    ]
    warned = ev.Warned("x", "y")
    assert thinner.take(THIN_PERIOD_NS + 1, warned) == [(THIN_PERIOD_NS + 1, warned)]


# ---------------------------------------------------------------- the whole


def test_the_synthetic_recovery() -> None:
    state = whole()
    away_s = sum(up_s - down_s - 0.05 for down_s, up_s in SYNCER_AWAY)
    assert state.syncer_away_s == pytest.approx(away_s)
    assert [(one.epoch, one.exact, one.resumed) for one in state.syncer.restarts] == [
        (2, True, False), (3, False, False), (4, True, True),
    ]  # fmt: skip
    assert state.syncer.restarts[1].problems == [DAMAGED]
    assert state.durability.healed_count == len(HEALED)
    kills = [one for one in state.comebacks.recoveries if one.exit_code is not None]
    assert {one.learner: one.rung for one in kills} == {learner: kill[2] for learner, kill in KILLS.items()}
    assert all(one.resumed for one in state.comebacks.recoveries if one not in kills)
    own = [one for one in state.comebacks.returns if not state.missed_syncer(one)]
    assert [one.learner for one in own] == [CUT_OFF[0]]
    assert own[0].weight > 0.5 and own[0].steps > 100
    assert len(state.pauses) == 1
    goodput = state.goodput()
    assert {round(one.allocated_s, 3) for one in goodput.learners.values()} == {round(goodput.window_s, 3)}
    assert goodput.window_s < 240
    assert {name: one.failures for name, one in goodput.learners.items()} == {
        learner: int(learner in KILLS) for learner in state.learners
    }
