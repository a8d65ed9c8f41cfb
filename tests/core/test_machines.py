"""Both machines together over a fake link: the behaviour that users rely on, without sockets, arrays or time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from world import STEP_NS, TENSORS, FakeLearner, World

from atoll.core.config import SyncConfig
from atoll.core.effects import FetchBroken, FromLearner, FromSyncer, LeaveAsked, SessionOpened, Tick, ToLearner
from atoll.core.events import ContributionRefused, MemberChanged, Warned
from atoll.core.messages import PROTOCOL_VERSION, Progress, PushHeader, PushKind, Refused, Reseed, TensorSpec


def config(**changes: object) -> SyncConfig:
    values: dict[str, object] = {
        "sync_every": 4,
        "fragments": 4,
        "overlap": 2,
        "quorum": "all",
        "learners_expected": 2,
    }
    return SyncConfig.from_dict({**values, **changes})


@pytest.mark.parametrize("adopt", ["rebase", "overwrite", "mix:0.5", "mix:1"])
@pytest.mark.parametrize("quorum", ["1", "50%", "all"])
def test_a_run_commits_and_the_ledger_adds_up(adopt: str, quorum: str) -> None:
    world = World(config(adopt=adopt, quorum=quorum), 2)
    world.join_all()
    world.everyone_steps(40)
    assert world.syncer.book.commits >= 30
    assert all(track.version >= 7 for track in world.syncer.book.tracks)
    world.check_ledger()
    if adopt == "rebase":
        world.check_rebase()
        assert world.syncer.ledger.totals().discarded == {}
    for learner in world.learners.values():
        assert learner.machine.versions_behind <= 2


def test_pacing_keeps_the_effective_period_at_sync_every() -> None:
    world = World(config(sync_every=8), 2)
    world.join_all()
    world.everyone_steps(80)
    for track in world.syncer.book.tracks:
        assert 9 <= track.version <= 10


def test_synchronous_learners_wait_for_the_merge_and_stay_equal() -> None:
    world = World(config(overlap=0, fragments=1, grace_cap_steps=0.0), 2)
    world.join_all()
    first, second = world.learners.values()
    for _ in range(4):
        world.step(first)
    assert first.machine.must_wait
    for _ in range(4):
        assert not second.machine.must_wait
        world.step(second)
    world.boundary(first)
    world.boundary(second)
    assert not first.machine.must_wait and not second.machine.must_wait
    assert first.theta == second.theta == {0: 4.0}


def test_a_learner_that_answers_late_is_carried_into_the_next_round() -> None:
    world = World(config(quorum="1", sync_every=4, grace_cap_steps=0.0), 2)
    world.join_all()
    slow = list(world.learners.values())[1]
    slow.push_delay = 3 * STEP_NS
    world.everyone_steps(40)
    assert world.syncer.book.contributions_late > 5
    assert sum(i.learner == "l1" for i in world.merged_ids) > 10
    world.check_ledger()
    world.check_rebase()


def test_a_learner_ten_times_slower_still_contributes_to_every_fragment() -> None:
    world = World(config(quorum="1"), 2)
    world.join_all()
    fast, slow = world.learners.values()
    for step in range(200):
        world.step(fast)
        if step % 10 == 9:
            world.step(slow)
        world.advance(STEP_NS)
    fragments = {i.fragment for i in world.merged_ids if i.learner == "l1"}
    assert fragments == {0, 1, 2, 3}
    assert sum(i.learner == "l1" for i in world.merged_ids) >= 40
    world.check_ledger()
    world.check_rebase()


def test_a_killed_learner_costs_only_its_own_pending_tokens_and_comes_back_with_a_new_generation() -> None:
    world = World(config(), 2)
    world.join_all()
    world.everyone_steps(10)
    victim = next(iter(world.learners.values()))
    world.kill(victim)
    commits = world.syncer.book.commits
    world.everyone_steps(10)
    assert world.syncer.book.commits > commits
    world.add("l0", instance="l0-2")
    world.join_all()
    again = world.learners["l0@l0-2"]
    assert again.machine.generation == 2
    assert again.machine.step >= 18
    world.everyone_steps(10)
    assert any(i.learner == "l0" and i.generation == 2 for i in world.merged_ids)
    totals = world.syncer.ledger.totals()
    assert 0 < totals.discarded["learner_lost"] <= 40
    world.check_ledger()


def test_two_processes_with_one_id_the_newer_wins_and_the_older_cannot_come_back() -> None:
    world = World(config(), 2)
    world.join_all()
    world.everyone_steps(6)
    old = world.learners["l0@l0-1"]
    world.add("l0", instance="other")
    assert old.code == "fenced" and "its own id" in old.stopped
    old.session = -1
    world.connect(old)
    assert old.code == "fenced"
    world.join_all()
    world.everyone_steps(6)
    assert world.learners["l0@other"].machine.joined
    world.check_ledger()


def test_link_loss_loses_nothing_under_rebase() -> None:
    world = World(config(quorum="1"), 2)
    world.join_all()
    world.everyone_steps(10)
    cut = world.learners["l1@l1-1"]
    world.disconnect(cut)
    world.everyone_steps(60)
    assert cut.machine.steps == 70
    world.connect(cut)
    world.boundary(cut)
    world.everyone_steps(12)
    world.check_ledger()
    world.check_rebase()
    totals = world.syncer.ledger.totals()
    assert totals.discarded == {}
    assert totals.processed == 10 * (82 + 82)
    assert totals.pending <= 10 * 2 * 8


def test_leaving_hands_everything_over_and_the_rest_is_merged_without_a_quorum() -> None:
    world = World(config(tokens_budget=2 * 10 * 10), 2)
    world.join_all()
    world.everyone_steps(14)
    for learner in world.learners.values():
        assert learner.stopped
        world.close(learner)
        assert learner.left
    assert world.finished
    totals = world.syncer.ledger.totals()
    assert totals.merged == totals.processed == sum(x.machine.tokens for x in world.learners.values())
    world.check_ledger()


def test_a_link_that_breaks_while_a_learner_leaves_costs_nothing_though_the_run_is_over() -> None:
    """The others have left, so that the run is finished; then the last one is back, with what it has to hand over."""
    world = World(config(tokens_budget=2 * 10 * 10), 2)
    world.join_all()
    world.everyone_steps(14)
    last, other = world.learners.values()
    world.close(other)
    world.disconnect(last)
    world.advance(STEP_NS)
    assert world.finished and world.syncer.ledger.totals().merged < last.machine.tokens + other.machine.tokens
    world.connect(last)
    world.close(last)
    assert last.left
    totals = world.syncer.ledger.totals()
    assert totals.merged == totals.processed == last.machine.tokens + other.machine.tokens
    world.check_ledger()


def test_a_new_process_does_not_come_into_a_run_that_is_over() -> None:
    world = World(config(tokens_budget=2 * 10 * 10), 2)
    world.join_all()
    world.everyone_steps(14)
    gone = next(iter(world.learners.values()))
    world.kill(gone)
    again = world.add(gone.machine.learner, "another-instance")
    assert again.code == "run_closed"


def test_quorum_lost_by_timeout_aborts_and_asks_again() -> None:
    world = World(config(quorum="2", quorum_timeout_ns=5 * STEP_NS), 2)
    world.join_all()
    slow = world.learners["l1@l1-1"]
    slow.push_delay = 8 * STEP_NS
    world.everyone_steps(40)
    assert world.syncer.book.aborts > 0
    assert world.syncer.book.commits > 0
    world.check_ledger()


@pytest.mark.parametrize("partial", ["scaled", "full"])
def test_partial_merges_add_up_to_one_of_all(partial: str) -> None:
    """Every round closes with the first of four contributions, and the others count in the next one. A learner moves by
    one per step, and so would the published parameters if all were merged together."""
    world = World(config(quorum="1", learners_expected=4, grace_cap_steps=0.0, partial=partial), 4)
    world.join_all()
    for index, name in enumerate(sorted(world.learners)):
        world.learners[name].push_delay = index * STEP_NS // 4
    world.everyone_steps(120)
    assert any(len(merge.contributions) == 1 for merge in world.merges)
    assert all(105 < moved < 120 for moved in world.theta.values()) == (partial == "scaled")
    assert all(moved > 200 for moved in world.theta.values()) == (partial == "full")


def test_a_learner_whose_contributions_are_refused_does_not_shorten_the_steps_of_the_others() -> None:
    """As long as rounds wait for its answer: nobody can tell from one that has not answered whether it will."""
    world = World(config(quorum="all", learners_expected=2), 2)
    world.join_all()
    world.everyone_steps(20)
    done = len(world.merges)
    bad = world.learners["l1@l1-1"]
    real = world.complete_push
    world.complete_push = lambda h, v, norm=1.0, finite=True: real(h, v, norm, finite=h.learner != "l1")  # type: ignore[method-assign]
    world.everyone_steps(40)
    shares = [sum(merge.weights) for merge in world.merges[done + 2 :]]
    assert bad.machine.steps > 0 and len(shares) > 5 and shares == pytest.approx([1.0] * len(shares))


def test_nan_and_huge_contributions_are_quarantined_and_the_learner_is_reseeded() -> None:
    world = World(config(quorum="1", norm_outlier_factor=10.0), 2)
    world.join_all()
    world.everyone_steps(40)
    bad = world.learners["l0@l0-1"]
    bad.theta = dict.fromkeys(bad.theta, float("nan"))
    real = world.complete_push
    world.complete_push = lambda h, v, norm=1.0, finite=True: real(h, v, norm, finite=v == v)  # type: ignore[method-assign]
    world.everyone_steps(12)
    assert all(v == v for v in world.theta.values()), "a NaN was committed"
    assert all(v == v for v in bad.theta.values()), "the learner was not re-seeded"
    assert world.syncer.ledger.totals().discarded["quarantined"] > 0
    world.complete_push = lambda h, v, norm=1.0, finite=True: real(h, v, 1e9 if h.learner == "l0" else 1.0)  # type: ignore[method-assign]
    merged = sum(i.learner == "l0" for i in world.merged_ids)
    world.everyone_steps(12)
    assert sum(i.learner == "l0" for i in world.merged_ids) == merged
    refused = [event.code for event in world.noted(ContributionRefused)]
    assert "not_finite" in refused and "norm_outlier" in refused
    world.check_ledger()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (TENSORS[:3], "lacks tensor 'w3'"),
        ((*TENSORS[:3], TensorSpec("w3", (512,), "float32")), "tensor 'w3' is float32[512]"),
        ((*TENSORS, TensorSpec("more", (256,), "float32")), "extra tensor 'more'"),
    ],
)
def test_another_model_is_refused_with_the_difference(tensors: tuple[TensorSpec, ...], words: str) -> None:
    world = World(config(), 1)
    stranger = world.add("stranger", tensors=tensors)
    assert stranger.code == "wrong_layout"
    assert words in stranger.stopped and "same model" in stranger.stopped


@pytest.mark.parametrize("wrapped", ["module._orig_mod", "_checkpoint_wrapped_module"])
def test_a_run_of_an_older_builds_names_is_told_from_another_model(wrapped: str) -> None:
    world = World(config())
    world.add("old", tensors=tuple(TensorSpec(f"{wrapped}.{t.name}", t.shape, t.dtype) for t in TENSORS))
    refused = world.add("new")
    assert refused.code == "wrong_layout"
    assert f"'w0' for '{wrapped}.w0'" in refused.stopped and "atoll.load_model" in refused.stopped


def test_frozen_parameters_that_differ_are_told_once_for_each_process() -> None:
    def told() -> list[str]:
        return [event.text for event in world.noted(Warned) if "frozen" in event.text]

    def join(name: str, frozen: int) -> FakeLearner:
        learner = world.add_later(name)
        learner.machine.frozen = frozen
        world.connect(learner)
        return learner

    world = World(config())
    for name, frozen in (("a", 0), ("b", 5), ("c", 5), ("d", 0)):
        join(name, frozen)
    assert told() == []
    odd = join("e", 6)
    assert len(told()) == 1 and "'e' differ from those of 'b'" in told()[0]
    world.join_all()
    world.everyone_steps(12)
    assert world.syncer.book.commits > 0, "it is told, not refused"
    world.disconnect(odd)
    world.connect(odd)
    assert len(told()) == 1


def test_frozen_parameters_of_a_run_that_never_began_are_nobodys_measure() -> None:
    world = World(config())
    world.gives_seed = lambda learner: False  # type: ignore[method-assign]
    for name, frozen in (("gone", 9), ("next", 5)):
        learner = world.add_later(name)
        learner.machine.frozen = frozen
        world.connect(learner)
        world.kill(learner)
    assert not [event for event in world.noted(Warned) if "frozen" in event.text]


def test_the_next_learner_seeds_when_the_first_dies_before_it_did() -> None:
    world = World(config())
    first = world.add("a")
    assert world.seeds
    world2 = World(config())
    world2.gives_seed = lambda learner: False  # type: ignore[method-assign]
    first = world2.add("a")
    world2.add("b")
    del world2.gives_seed
    world2.kill(first)
    assert world2.syncer.committed


# ---------------------------------------------------------------- found by review: each of these once went wrong


def test_a_merged_contribution_whose_reply_was_lost_is_not_counted_again_however_old_it_is() -> None:
    world = World(config(quorum="1", carry_versions_max=1), 2)
    world.join_all()
    world.everyone_steps(6)
    away = world.learners["l1@l1-1"]
    # The reply to its next push is lost together with the link, and the run goes on for many versions.
    real = away.machine.handle
    away.machine.handle = lambda e, n: [] if type(e).__name__ in ("PushDone", "FromSyncer") else real(e, n)  # type: ignore[method-assign]
    world.everyone_steps(3)
    away.machine.handle = real  # type: ignore[method-assign]
    world.disconnect(away)
    world.everyone_steps(40)
    world.connect(away)
    world.boundary(away)
    world.everyone_steps(12)
    world.check_ledger()
    world.check_rebase()
    processed = world.syncer.ledger.totals().processed
    assert processed == sum(x.machine.tokens for x in world.learners.values())


def test_rounds_go_on_at_once_when_the_fastest_learner_dies() -> None:
    world = World(config(quorum="50%"), 2)
    world.join_all()
    fast, slow = world.learners.values()
    for step in range(200):
        world.step(fast)
        if step % 10 == 9:
            world.step(slow)
        world.advance(STEP_NS)
    world.kill(fast)
    commits = world.syncer.book.commits
    for _ in range(12):
        world.step(slow)
        world.advance(STEP_NS)
    assert world.syncer.book.commits >= commits + 4


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_refused_contribution_is_an_answer(overlap: int) -> None:
    world = World(config(quorum="all", overlap=overlap, quorum_timeout_ns=10**12), 2)
    world.join_all()
    world.everyone_steps(40)
    real = world.complete_push
    world.complete_push = lambda h, v, norm=1.0, finite=True: real(h, v, 1e9 if h.learner == "l0" else 1.0)  # type: ignore[method-assign]
    world.everyone_steps(10)
    world.complete_push = real  # type: ignore[method-assign]
    commits = world.syncer.book.commits
    world.everyone_steps(40)
    assert world.syncer.book.commits >= commits + 20
    world.check_ledger()


def test_a_learner_that_pauses_collects_only_a_few_versions_and_catches_up() -> None:
    world = World(config(quorum="1"), 2)
    world.join_all()
    active, paused = world.learners.values()
    for _ in range(100):
        world.step(active)
        world.advance(STEP_NS)
    assert all(len(p.prepared) <= 2 for p in paused.machine.fragments)
    for _ in range(20):
        world.step(paused)
        world.advance(STEP_NS)
    assert paused.machine.versions_behind <= 4
    world.check_ledger()
    world.check_rebase()


def test_a_joiner_that_raises_the_quorum_does_not_make_the_syncer_spin() -> None:
    world = World(config(quorum="50%", overlap=8, grace_cap_steps=100.0), 2)
    world.join_all()
    for learner in world.learners.values():
        learner.push_delay = 3 * STEP_NS
    world.everyone_steps(2)
    for index in range(2, 6):
        world.add(f"l{index}")
    world.join_all()
    for _ in range(3):
        wake = world.syncer.next_wake_ns()
        assert wake is None or wake > world.now_ns or world.syncer.handle(Tick(), world.now_ns)
    world.everyone_steps(20)
    world.check_ledger()


def test_a_reseed_is_adopted_whole_or_not_at_all() -> None:
    world = World(config(), 1)
    world.join_all()
    learner = next(iter(world.learners.values()))
    real = world.fetch
    world.fetch = lambda x, r, done: real(x, r, done) if r.fragment != 3 else None  # type: ignore[method-assign]
    world.learner_input(learner, FromSyncer(Reseed("test")))
    world.run()
    learner.theta = dict.fromkeys(learner.theta, 99.0)
    world.boundary(learner)
    assert set(learner.theta.values()) == {99.0}, "a part of the re-seed was adopted"
    world.fetch = real  # type: ignore[method-assign]
    world.learner_input(learner, FetchBroken(3, 0, gone=False))
    world.run()
    world.boundary(learner)
    assert learner.theta == world.theta


# ---------------------------------------------------------------- bad input: refused with a reason, the run unharmed


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"learner": "nobody"}, "unknown_learner"),
        ({"generation": 7}, "stale_generation"),
        ({"codec": "fp32"}, "wrong_codec"),
        ({"codec": "zip"}, "wrong_codec"),
        ({"round": 10_000}, "unknown_round"),
        ({"steps": 0}, "bad_counters"),
        ({"tokens": 0}, "bad_counters"),
        ({"base_version": 99}, "unknown_version"),
        ({"base_version": -1}, "unknown_version"),
        ({"base_version": 0}, "stale_base"),
        ({"fragment": 4}, "unknown_fragment"),
        ({"seq": 0}, "duplicate"),
        ({"kind": PushKind.SEED}, "not_ready"),
        ({"secret": ""}, "wrong_secret"),
        ({"secret": "s2"}, "wrong_secret"),
        ({"secret": "", "kind": PushKind.SEED}, "wrong_secret"),
        ({"secret": "", "kind": PushKind.HEAL}, "wrong_secret"),
        ({"secret": "", "kind": PushKind.INNER}, "wrong_secret"),
    ],
)
def test_a_forged_contribution_is_refused_and_the_run_goes_on(changes: dict[str, Any], code: str) -> None:
    world = World(config(carry_versions_max=4), 2)
    world.join_all()
    world.everyone_steps(40)
    header = PushHeader(
        kind=PushKind.CONTRIBUTION,
        learner="l0",
        generation=1,
        fragment=0,
        round=1,
        attempt=0,
        seq=1000,
        base_version=world.syncer.book.tracks[0].version,
        steps=1,
        tokens=1,
        codec="int4",
        size=1,
        checksum=1,
        secret=world.secret_of("l0"),
    )
    reply = world.complete_push(replace(header, **changes), 1.0)
    assert not reply.accepted and reply.code == code and len(reply.detail) > 20
    commits = world.syncer.book.commits
    world.everyone_steps(8)
    assert world.syncer.book.commits > commits
    world.check_ledger()


def test_counters_that_go_backwards_end_the_session_and_nothing_else() -> None:
    world = World(config(), 2)
    world.join_all()
    world.everyone_steps(10)
    liar = world.learners["l0@l0-1"]
    world.to_syncer(FromLearner(liar.session, Progress(5, 5, 50, STEP_NS, 1.0, (0, 0, 0, 0))))
    world.run()
    assert liar.code == "bad_counters" and "backwards" in liar.stopped
    world.check_ledger()


def test_another_protocol_version_is_refused_before_any_state_is_touched() -> None:
    world = World(config(), 1)
    members = dict(world.syncer.membership.members)
    hello = replace(
        world.learners["l0@l0-1"].machine.hello(), learner="new", instance="x", protocol=PROTOCOL_VERSION + 1
    )
    out = world.to_syncer(SessionOpened(99, hello))
    refused = next(e.message for e in out if isinstance(e, ToLearner))
    assert isinstance(refused, Refused) and refused.code == "protocol_version" and "same version" in refused.detail
    assert world.syncer.membership.members == members


def test_one_learner_is_asked_to_leave_and_the_others_train_on() -> None:
    world = World(config(), 3)
    world.join_all()
    world.everyone_steps(10)
    asked, others = world.learners["l0@l0-1"], [world.learners["l1@l1-1"], world.learners["l2@l2-1"]]
    world.to_syncer(LeaveAsked("l0"))
    world.run()
    assert asked.machine.dismissed and not any(other.machine.stopped for other in others)
    world.close(asked)
    commits = world.syncer.book.commits
    world.everyone_steps(20)
    assert world.syncer.membership.members["l0"].state == "left" and world.syncer.book.commits > commits
    assert not world.syncer.stopping
    world.check_ledger()


def test_one_that_is_away_is_told_to_leave_when_it_is_back_and_its_successor_is_not() -> None:
    world = World(config(), 2)
    world.join_all()
    world.everyone_steps(5)
    away = world.learners["l0@l0-1"]
    world.disconnect(away)
    world.to_syncer(LeaveAsked("l0"))
    world.to_syncer(LeaveAsked("nobody"))
    assert not away.machine.dismissed
    world.connect(away)
    world.boundary(away)
    assert away.machine.dismissed
    world.close(away)
    successor = world.add("l0", "l0-2")
    world.join_all()
    world.everyone_steps(5)
    assert successor.machine.joined and not successor.machine.stopped


def test_whoever_goes_away_is_told_with_how_long_nothing_was_heard_of_it() -> None:
    """A view needs it to say how long a learner was cut off: the silence began long before anybody noticed."""
    world = World(config(quorum="1"), 2)
    world.join_all()
    world.everyone_steps(4)
    silent, other = world.learners["l0@l0-1"], world.learners["l1@l1-1"]
    world.advance(world.config.lease_ns)
    world.step(other)
    world.disconnect(other)
    told = {event.learner: event.silent_ns for event in world.noted(MemberChanged) if event.state == "away"}
    assert world.config.lease_ns <= told["l0"] < world.config.lease_ns + STEP_NS
    assert told["l1"] == 0
    world.advance(world.config.lease_ns)
    world.step(silent)
    world.notes.clear()
    world.advance(7 * STEP_NS)
    world.connect(silent)  # over the old session, which nobody has missed yet
    back = next(event for event in world.noted(MemberChanged) if event.learner == "l0")
    assert (back.state, back.silent_ns) == ("joining", 7 * STEP_NS)
