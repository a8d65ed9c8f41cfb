"""What a learner can make the syncer keep or write down has a bound."""

from __future__ import annotations

from dataclasses import replace

from world import TENSORS, World, config

from atoll.core import effects as fx
from atoll.core import membership, note_budget
from atoll.core.contribution_intake import KEPT_LEARNERS_MIN, KEPT_PER_LEARNER_MAX
from atoll.core.events import ContributionRefused, MemberChanged, Warned
from atoll.core.messages import DataReport, Hello, Leave, PushHeader, PushKind, Ready
from atoll.core.note_budget import NOTE_NS, NOTES_BURST, NoteBudget
from atoll.core.syncer_machine import REPORT_NS, REPORTS_BURST
from atoll.core.syncer_state import REASON_CHARS_MAX


def header(world: World, name: str, seq: int) -> PushHeader:
    member, track = world.syncer.membership.members[name], world.syncer.book.tracks[0]
    fields = (member.generation, 0, 0, 0, seq, track.version, 1, 10, world.config.codec_up, 1, 1)
    return PushHeader(PushKind.CONTRIBUTION, name, *fields)


def stranger(world: World, name: str, instance: str = "1") -> int:
    """Somebody who has joined and does nothing by itself."""
    world.sessions += 1
    world.to_syncer(fx.SessionOpened(world.sessions, Hello(name, instance, 2, TENSORS)))
    versions = tuple(track.version for track in world.syncer.book.tracks)
    world.to_syncer(fx.FromLearner(world.sessions, Ready(0, versions)))
    return world.sessions


def running(**changes: object) -> World:
    world = World(config(fragments=1, learners_expected=2, **changes), 2)
    world.join_all()
    world.everyone_steps(2)  # before the first round: nothing is merged
    return world


def test_one_learner_has_a_few_contributions_in_the_air_whatever_its_generation() -> None:
    world = running()
    codes = []
    for instance in range(3):
        stranger(world, "liar", str(instance))
        codes += [world.complete_push(header(world, "liar", seq), 1.0).code for seq in range(3)]
    assert codes == [""] * KEPT_PER_LEARNER_MAX + ["busy"] * (9 - KEPT_PER_LEARNER_MAX)
    assert len(world.driver.held) == KEPT_PER_LEARNER_MAX
    world.everyone_steps(8)
    assert len(world.merges) >= 1 and not any(i.learner == "liar" for i in world.driver.held), "merged, and done with"
    world.check_ledger()


def test_what_all_ids_together_have_in_the_air_is_bounded() -> None:
    world = running()
    accepted = 0
    for index in range(KEPT_PER_LEARNER_MAX * KEPT_LEARNERS_MIN + 20):
        stranger(world, f"x{index}")
        accepted += world.complete_push(header(world, f"x{index}", 0), 1.0).accepted
    # Each that was accepted has answered, and makes room for its next ones; so ids are what is bounded elsewhere.
    assert accepted <= KEPT_PER_LEARNER_MAX * max(KEPT_LEARNERS_MIN, accepted)
    assert len(world.driver.held) == accepted
    for index in range(accepted):
        for seq in range(1, 20):
            world.complete_push(header(world, f"x{index}", seq), 1.0)
    assert len(world.driver.held) <= KEPT_PER_LEARNER_MAX * (accepted + 2)


def test_ids_are_forgotten_by_the_fragments_that_each_costs(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(membership, "MEMBERS_MIN", 20)
    monkeypatch.setattr(membership, "MEMBER_FRAGMENTS_MAX", 20)
    world = running()
    for index in range(200):
        session = stranger(world, f"x{index}")
        world.to_syncer(fx.FromLearner(session, Leave("bye")))
        world.run()
    assert len(world.syncer.membership.members) <= 21
    assert sum(key.startswith("member/") for key in world.disk_rows) <= 21
    world.check_ledger()


def test_who_never_did_anything_is_in_no_record_of_a_fragment() -> None:
    world = running()
    world.everyone_steps(8)
    for index in range(50):
        stranger(world, f"x{index}")
    world.everyone_steps(8)
    assert {line[0] for line in world.disk_records[0]["accounts"]} == {"l0", "l1"}


def test_a_reason_of_a_thousand_words_is_cut() -> None:
    world = running()
    session = stranger(world, "liar")
    world.to_syncer(fx.FromLearner(session, Leave("x" * 4000)))
    (left,) = [event for event in world.noted(MemberChanged) if event.state == "left"]
    assert len(left.reason) == REASON_CHARS_MAX and left.reason.endswith("…")


def test_reports_on_data_that_come_too_fast_are_passed_over() -> None:
    world = running()
    session = stranger(world, "liar")
    answered = 0
    for serial in range(2000):
        said = world.to_syncer(fx.FromLearner(session, DataReport("books", serial, 10**6, 1)))
        answered += any(isinstance(effect, fx.ToLearner) for effect in said)
    assert answered == REPORTS_BURST
    world.advance(REPORT_NS)
    said = world.to_syncer(fx.FromLearner(session, DataReport("books", 3000, 10**6, 1)))
    assert any(isinstance(effect, fx.ToLearner) for effect in said)


def test_refusals_without_end_do_not_fill_the_disk_and_are_counted() -> None:
    world = running()
    stranger(world, "liar")
    bad = replace(header(world, "liar", 0), tokens=0)
    for _ in range(NOTES_BURST + 500):
        world.driver.complete_push(bad, 1.0, finite=True, norm=1.0)
    assert len(world.noted(ContributionRefused)) == NOTES_BURST
    world.advance(NOTE_NS)
    world.driver.complete_push(bad, 1.0, finite=True, norm=1.0)
    assert len(world.noted(ContributionRefused)) == NOTES_BURST + 1
    assert any("500 more events of learner 'liar'" in event.text for event in world.noted(Warned))


def test_the_notes_of_others_are_told_meanwhile(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(note_budget, "KEYS_MAX", 10)
    budget = NoteBudget()
    for _ in range(2 * NOTES_BURST):
        budget.take(MemberChanged("liar", 1, "active", "again"), 0)
    assert budget.take(MemberChanged("honest", 1, "active", "ready"), 0)
    for index in range(100):
        budget.take(MemberChanged(f"x{index}", 1, "active", "ready"), 0)
    assert len(budget._left) <= 11
