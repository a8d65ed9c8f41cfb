"""A standby, shards and a relay in virtual time: they do what they promise, and checkers can tell if they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fabric_mutants import (
    BEGUN_FULL,
    BEGUN_TWICE,
    CUT_SHORT,
    DIVIDED,
    FABRIC_MUTANTS,
    FOLDER,
    FORGOTTEN,
    GIVEN_UP,
    HELD_LONG,
    LED_TWICE,
    MOVED,
    NOT_ADDED,
    NOT_MOVED,
    NOT_REMOVED,
    RELAYED,
    REPLICATED,
    SHARDED,
    SITE_AND_SHARDS,
    WIPED_TWICE,
    scenario,
)

from atoll.core import Refusal
from atoll.errors import ConfigError, RefusedError
from atoll.instruments.check import Violation, all_checkers, facts
from atoll.instruments.sim.drawing import draw
from atoll.instruments.sim.run import run_scenario, world_of
from atoll.instruments.sim.scenario import SimFault, load, to_json
from atoll.instruments.sim.store import FolderDisk
from atoll.syncer import SHARDS_ROW, FragmentMoves

SOUND = {
    "folder": FOLDER,
    "replicate": REPLICATED,
    "divided": DIVIDED,
    "shards": SHARDED,
    "shards-standby": LED_TWICE,
    "relay": RELAYED,
    "relay-held": HELD_LONG,
    "relay-shards": SITE_AND_SHARDS,
    "wiped-twice": WIPED_TWICE,
    "moved": MOVED,
    "not-moved": NOT_MOVED,
    "cut-short": CUT_SHORT,
    "given-up": GIVEN_UP,
    "not-added": NOT_ADDED,
    "not-removed": NOT_REMOVED,
    "begun-twice": BEGUN_TWICE,
    "begun-full": BEGUN_FULL,
    "forgotten": FORGOTTEN,
}


@pytest.mark.parametrize("name", SOUND)
def test_a_fabric_keeps_every_invariant_and_its_trace(name: str) -> None:
    first, again = (run_scenario(SOUND[name], tracing=True) for _ in range(2))
    assert not first.violations, first.violations[0]
    assert first.commits > 4 and first.digest == again.digest


def test_what_nobody_listens_to_takes_no_room_on_a_link() -> None:
    """A shard was away for 22 s; what was tried meanwhile kept the link to it busy for 370 s (draw 7, seed 2981)."""
    made = scenario(SimFault("kill", "shard-0", 8.0, 15.0), shards=1, config={"quorum": "all"})
    thin = tuple(replace(learner, up_bits_per_s=100_000.0) for learner in made.learners)
    world = world_of(replace(made, learners=thin))
    world.begin()
    world.clock.run(22 * 10**9)
    world.close()
    busy_ns = [way._free_ns[0] - world.now_ns for key, way in world._ways.items() if "shard-0" in key]  # type: ignore[attr-defined]
    assert busy_ns and max(busy_ns) <= 0


def test_what_a_full_disk_has_set_back_is_never_who_has_what() -> None:
    """Both came on the tape at one moment, and the first was taken for a move (draw 7, seed 5725)."""
    told: list[str] = []
    disk = FolderDisk(mapped=lambda disk: told.append(disk.rows[SHARDS_ROW]))
    for names in (["s002"], ["s001"]):
        disk.append(0, {SHARDS_ROW: names})
    disk.sync()
    assert told == ['["s001"]']


def test_a_shard_that_could_not_be_taken_out_is_looked_for_after_a_restart() -> None:
    """It was forgotten in memory, and with the next change on the tape (draw 7, seed 4442)."""
    world = world_of(NOT_REMOVED)
    world.begin()
    world.clock.run(12 * 10**9)
    moves = world.syncer.shards.moves  # type: ignore[union-attr]
    world.close()
    assert moves.places([]) == ["shard-2:7077"] and not moves.removed


def test_where_no_shard_takes_what_a_lost_one_had_the_coordinator_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on half way: a shard put what it did not have on disk as the newest version (draw 7, seed 3706)."""
    adopt, asked = FragmentMoves.adopt, list[list[int]]()

    def refuse(self: FragmentMoves, fragments: list[int]) -> None:
        asked.append(fragments)
        if len(asked) == 2:
            raise RefusedError(Refusal.NOT_READY, "not now")
        adopt(self, fragments)

    monkeypatch.setattr(FragmentMoves, "adopt", refuse)
    world = world_of(replace(GIVEN_UP, shards=3, config=replace(GIVEN_UP.config, fragments=6)))
    world.begin()
    world.clock.run(20 * 10**9)
    epoch = world.syncer.machine.epoch if world.syncer is not None else 0
    world.close()
    assert len(asked) == 2 and not world.checkers.violations and epoch == 2


@pytest.mark.parametrize("name", FABRIC_MUTANTS)
def test_a_defect_of_the_fabric_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = FABRIC_MUTANTS[name]
    mutant.apply(monkeypatch)
    report = run_scenario(mutant.scenario)
    assert report.violations, f"{mutant.breaks}: nobody sees it any more"
    assert report.violations[0].invariant in mutant.invariants, report.violations[0]


@pytest.mark.parametrize("made", [FOLDER, REPLICATED], ids=["folder", "replicate"])
def test_the_standby_serves_and_a_primary_that_wakes_up_ends(made: Any) -> None:
    lines = [line.split(maxsplit=2) for line in run_scenario(made, tracing=True).lines]
    assert any(who.startswith("syncer-") and what.startswith("ends, fenced") for _, who, what in lines)
    assert any(who.startswith("standby-") and what == "notes Committed" for _, who, what in lines)


def test_shards_have_the_fragments_and_a_relay_merges() -> None:
    for made in (replace(SHARDED, faults=()), replace(RELAYED, faults=()), replace(SITE_AND_SHARDS, faults=())):
        seen: list[facts.Fact] = []
        world = world_of(made)
        observe = world.observe

        def keep(fact: facts.Fact, kept: Any = seen, told: Any = observe) -> None:
            kept.append(fact)
            told(fact)

        world.observe = keep  # type: ignore[method-assign]
        world.begin()
        world.clock.run((30 if made.shards and made.relayed else 10) * 10**9)
        world.close()
        owners = {fact.shard for fact in seen if isinstance(fact, facts.Owned)}
        groups = [fact for fact in seen if isinstance(fact, facts.RelayMerged) and len(fact.contributions) > 1]
        assert owners == ({"shard-0", "shard-1"} if made.shards else set())
        assert bool(groups) == bool(made.relayed)


def test_fragments_move_and_shards_come_and_go() -> None:
    said = [line.split(" says ")[1] for line in run_scenario(MOVED, tracing=True).lines if " says " in line]
    assert any("moved" in text for text in said) and any("is in, and has" in text for text in said)
    assert any("is out, and others have its" in text for text in said)
    world: Any = world_of(MOVED)
    world.begin()
    world.clock.run(19 * 10**9)
    world.close()
    assert world.moves >= 3 and "shard-0" not in world._owners.values() and "shard-2" in world._owners.values()


def test_a_move_that_cannot_be_and_a_shard_that_is_given_up() -> None:
    said = [line for line in run_scenario(NOT_MOVED, tracing=True).lines if "this did not go through" in line]
    assert said and "cannot be written there" in said[0]
    lines = run_scenario(GIVEN_UP, tracing=True).lines
    assert any("learners bring its 2 fragments to others" in line for line in lines)
    assert any("HealCommitted" in line for line in lines)
    by_itself = replace(GIVEN_UP, faults=GIVEN_UP.faults[:1], lost_after_s=3.0)
    assert any("is away for 3 s, and given up" in line for line in run_scenario(by_itself, tracing=True).lines)


def test_older_learners_say_hello_again_after_a_move() -> None:
    report = run_scenario(replace(MOVED, follows=False), tracing=True)
    assert not report.violations and report.commits > 4
    assert sum("SessionOpened" in line for line in report.lines) > sum(
        "SessionOpened" in line for line in run_scenario(MOVED, tracing=True).lines
    )


# ---------------------------------------------------------------- scenarios as data


def test_a_fabric_survives_its_file(tmp_path: Path) -> None:
    for made in SOUND.values():
        file = tmp_path / "scenario.json"
        file.write_text(to_json(made))
        assert load(file) == made


def test_draw_6_draws_every_party_and_leaves_what_it_found() -> None:
    drawn = [draw(seed, 6) for seed in range(400)]
    fabric = [made for made in drawn if made.fabric]
    assert 0.2 < len(fabric) / len(drawn) < 0.5
    assert {made.standby for made in fabric} == {"", "folder", "replicate"}
    assert {made.shards for made in fabric} >= {0, 1, 2, 3} and {made.relay_merges for made in fabric} == {True, False}
    targets = {fault.target for made in fabric for fault in made.faults}
    assert {"standby", "shard-0", "relay-0", "syncer~standby", "syncer~shard-0"} <= targets
    for made in fabric:
        before = draw(made.seed, 5)
        assert made.learners == before.learners and made.config == before.config
    for made in [made for made in drawn if not made.fabric][:50]:
        assert replace(made, draw=5) == draw(made.seed, 5)


def test_draw_7_moves_fragments_and_cuts_every_pair_that_talks() -> None:
    fabric = [made for made in (draw(seed, 7) for seed in range(1500)) if made.fabric]
    sharded = [made for made in fabric if made.shards]
    kinds = {fault.kind for made in sharded for fault in made.faults}
    assert kinds >= {"move", "add", "remove", "give-up"}
    assert {made.spares for made in sharded} >= {0, 1, 2} and {made.follows for made in sharded} == {True, False}
    assert {made.lost_after_s for made in sharded} >= {0.0, 5.0, 15.0}
    cut = {
        (frozenset(end.split("-")[0] for end in fault.target.split("~")), fault.direction)
        for made in fabric
        for fault in made.faults
        if fault.kind == "partition" and "~" in fault.target
    }
    pairs = ["learner shard", "learner syncer", "learner standby", "learner relay", "syncer shard"]
    pairs += ["syncer standby", "relay syncer", "relay standby", "relay shard"]
    assert (frozenset({"standby", "shard"}), "both") in cut  # few have both; one way is the last of 2,500 seeds
    for pair in pairs:
        for direction in ("both", "up", "down"):
            assert (frozenset(pair.split()), direction) in cut, (pair, direction)
    for made in fabric[:50]:
        assert draw(made.seed, 6).learners == made.learners and draw(made.seed, 6).config == made.config
        assert set(draw(made.seed, 6).faults) <= set(made.faults)


@pytest.mark.parametrize(
    ("changes", "faults", "why"),
    [
        ({"standby": "twice"}, (), "standby"),
        ({"standby": "replicate", "shards": 2}, (), "not with shards"),
        ({"standby": "folder", "durability": "none"}, (), "nothing to go on from"),
        ({"relayed": 2, "keys": True}, (), "leave out keys"),
        ({"relayed": 4}, (), "relayed"),
        ({"shards": 2, "arrays": False}, (), "has arrays"),
        ({}, (SimFault("kill", "shard-0", 1.0),), "correct its target"),
        ({}, (SimFault("partition", "syncer", 1.0, 2.0),), "cannot hit the syncer"),
        ({"shards": 2}, (SimFault("kill", "syncer~shard-0", 1.0),), "hits no link"),
        ({"shards": 2}, (SimFault("slow", "shard-0", 1.0, 2.0, 2.0),), "name a learner"),
        ({}, (SimFault("add", "shard-0", 1.0),), "correct its target"),
        ({"spares": 1}, (), "are of runs with shards"),
        ({"lost_after_s": 5.0}, (), "are of runs with shards"),
        ({"shards": 2}, (SimFault("move", "shard-1", 1.0, variant="9"),), "has fragments 0 to 3"),
    ],
)
def test_a_fabric_that_cannot_be(changes: dict[str, Any], faults: tuple[SimFault, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        scenario(*faults, **changes)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"kind": "move", "target": "learner-0", "variant": "0"}, "is about a shard"),
        ({"kind": "remove", "target": "syncer"}, "is about a shard"),
        ({"kind": "move", "target": "shard-0"}, "which fragments move"),
        ({"kind": "move", "target": "shard-0", "variant": "0,x"}, "which fragments move"),
        ({"kind": "add", "target": "shard-0", "lasts_s": 1.0}, "is an instant"),
    ],
)
def test_a_change_that_makes_no_sense(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        SimFault(at_s=1.0, **values)


# ---------------------------------------------------------------- the checkers alone


def complaints(*given: facts.Fact) -> list[Violation]:
    checkers = all_checkers(sync_every=8)
    for fact in given:
        checkers.feed(fact)
    return checkers.violations


def test_the_new_checkers_complain_and_do_not() -> None:
    seed, first = facts.Committed(1, 0, 0, 10), facts.Committed(1, 0, 1, 11, (("a", 1, 1),), (4,))
    durable = (facts.Durable(1, 0, 0), facts.Durable(1, 0, 1))
    told, copied = facts.Told(1, 0, 1, 11, True, True), facts.Copied(0, 1, 11)
    sound = (facts.Opened(1), seed, durable[0], first, durable[1], copied, told)
    assert not complaints(*sound)
    assert complaints(*sound[:5], told)[0].invariant == "I17"
    assert not complaints(*sound, facts.Opened(2), replace(told, copied=False))
    other = facts.Told(1, 0, 1, 12, True)
    assert "I16" in {one.invariant for one in complaints(*sound, facts.Opened(2), other)}
    assert complaints(facts.Owned(1, 0, "a"), facts.Owned(1, 0, "b"))[0].invariant == "I18"
    assert not complaints(facts.Owned(1, 0, "a"), facts.Moved(0, "b"), facts.Owned(1, 0, "b"))
    relayed = replace(first, at_relays=(("a", 1, 1),))
    gathered = facts.RelayMerged("relay-0", 0, 1, (("a", 1, 1),))
    assert complaints(seed, relayed)[0].invariant == "I19"
    assert not complaints(seed, gathered, relayed)


def test_moves_lose_nothing_and_failed_ones_change_nothing() -> None:
    mine = (facts.Moved(0, "a"), facts.Owned(1, 0, "a", 4, 44))
    copy, goes = facts.Arrived(0, "b", 4, 44), facts.Moved(0, "b", whole=True)
    assert not complaints(*mine, copy, goes, facts.Dropped(0, "a"), facts.Owned(1, 0, "b", 5, 55))
    for wrong in (
        (*mine, goes),
        (*mine, facts.Arrived(0, "b", 3, 33), goes),
        (*mine, facts.Arrived(0, "b", 4, 45), goes),
        (*mine, copy, facts.Dropped(0, "b"), goes),
        (*mine, copy, facts.Dropped(0, "a")),
        (*mine, facts.NotMoved(0, "a", "b", True)),
        (*mine, facts.NotMoved(0, "a", "a", False)),
    ):
        assert [one.invariant for one in complaints(*wrong)] == ["I20"], wrong
    assert not complaints(*mine, facts.Moved(0, "b")), "something was lost on a disk"
    assert complaints(*mine, copy, goes, facts.Owned(1, 0, "a", 5, 55))[0].invariant == "I18"
