"""Moves between shards in one process: the same bits, and one owner whoever dies at whichever point."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import TrainingThread, check_books
from here import ShardsHere
from said import command
from shards import owners

from atoll.core import SyncConfig
from atoll.errors import RefusedError
from atoll.launch.export import _from_shards
from atoll.observe import NullWriter
from atoll.store import Loaded, failpoints
from atoll.syncer.shard_arrays import ShardArrays
from atoll.syncer.shard_fleet import Lead

SETTINGS = {"fragments": 4, "sync_every": 4, "learners_expected": 2}
EXACT = SyncConfig.from_dict({**SETTINGS, "overlap": 0, "quorum": "all", "grace_cap_steps": 0.0})
QUICK = SyncConfig.from_dict({**SETTINGS, "overlap": 1})
STEPS = 48


@pytest.fixture(autouse=True)
def _no_failpoints_after() -> Iterator[None]:
    yield
    failpoints.install(None)


def test_a_syncer_that_goes_away_while_it_attaches_leaves_no_run_behind() -> None:
    """With durability none the shard kept to a run that nobody had any more, for ever (draw 7, seed 3138)."""

    async def attach_twice() -> None:
        arrays = ShardArrays(None, NullWriter())

        def led_by(instance: str) -> Coroutine[Any, Any, dict[str, Any]]:
            lead = Lead("", 1, "none", 0.0, record=False, instance=instance)
            return arrays.attach(lead.greeting(), unled=True)

        await led_by("first")
        tensors, config = [["w", [512], "float32", "mean"]], {**SETTINGS, "fragments": 1}
        arrays.lay_out({"tensors": tensors, "config": config, "owned": [0], "run": "r1", "restore": False})
        assert arrays.state is not None
        arrays.state.put_seed(0, np.zeros(2048, np.uint8))
        await arrays.commit_seed()
        arrays.state.fragments[0].version = 3
        going = asyncio.create_task(led_by("second"))
        await asyncio.sleep(0)
        going.cancel()
        await asyncio.wait([going])
        assert going.cancelled() and (await led_by("third"))["fragments"] == {}
        arrays.close()

    asyncio.run(attach_twice())


def trained(folder: Path, moves: bool) -> list[tuple[int, int]]:
    run = ShardsHere(EXACT, folder, 2)
    pause_s = 0.05 if moves else 0.0
    learners = [TrainingThread(run.address, f"l{i}", seed=i, steps=STEPS, step_s=pause_s) for i in range(2)]
    if moves:
        move_around(run)
    for learner in learners:
        learner.thread.join(100)
        assert learner.error is None, learner.error
    published = [(arrays.version, arrays.checksum) for arrays in run.shell.state.fragments]
    run.stop()
    return published


def move_around(run: ShardsHere) -> None:
    run.wait_for(lambda s: min(s["versions"], default=0) >= 1, "a version of every fragment")
    new = run.do(run.add_shard())
    assert run.change("add", new.address)[0]
    for fragment in range(4):
        assert run.change("move", new.name, fragment)[0]
    assert new.on_disk() == {0, 1, 2, 3} and not run.shards[0].on_disk() | run.shards[1].on_disk()
    done, text = run.change("remove", new.name)
    assert done and not new.on_disk(), text
    assert max(run.status()["versions"]) < STEPS // 4, "all of this was while they trained"


def test_moves_change_no_bit(tmp_path: Path) -> None:
    assert trained(tmp_path / "without", moves=False) == trained(tmp_path / "with", moves=True)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ShardsHere]:
    run = ShardsHere(QUICK, tmp_path, 2)
    learners = [TrainingThread(run.address, f"l{i}", seed=i) for i in range(2)]
    run.wait_for(lambda s: min(s["versions"], default=0) >= 2, "two versions of every fragment")
    yield run
    for learner in learners:
        learner.stopping.set()
    for learner in learners:
        learner.thread.join(60)
    run.stop()
    assert [learner.error for learner in learners] == [None, None]


def other_than(status: dict[str, Any], owner: str) -> str:
    return next(shard["name"] for shard in status["shards"] if shard["name"] != owner)


def test_the_coordinator_dies_at_each_point_and_each_fragment_has_one_owner(run: ShardsHere) -> None:
    for point in ("move.described", "move.copied", "move.installed", "move.recorded", "move.told"):
        status = run.grows()
        owner = owners(status)[0]
        other = other_than(status, owner)
        run.dies_at(point)
        assert not run.change("move", other, 0)[0]
        before = run.status()["versions"]
        run.do(run.cut_off())
        run.do(run.lead())
        status = run.grows()
        assert all(now >= then for now, then in zip(status["versions"], before, strict=True)), "nothing is lost"
        assert owners(status)[0] == (other if point in ("move.recorded", "move.told") else owner), point
        one_copy(run)
        check_books(status)


def one_copy(run: ShardsHere) -> None:
    """On the disks, too, each fragment is there once."""
    found = [f for shard in run.shards for f in shard.on_disk()]
    assert sorted(found) == [0, 1, 2, 3], [shard.on_disk() for shard in run.shards]


def test_a_source_or_a_target_that_dies_leaves_the_fragment_where_it_was(run: ShardsHere) -> None:
    for victim in ("source", "target"):
        status = run.grows()
        owner = owners(status)[0]
        other = other_than(status, owner)
        dead = next(shard for shard in run.shards if shard.name == (owner if victim == "source" else other))
        for point in ("move.described", "move.copied"):
            run.do(dies_during(run, dead, point, other))
            run.do(dead.start())
            status = run.grows()
            assert owners(status)[0] == owner, (victim, point)
            one_copy(run)
            check_books(status)


async def dies_during(run: ShardsHere, dead: Any, point: str, other: str) -> None:
    """One of both goes away while the other waits for it: what is asked of it then is never answered."""
    changes = run.shell.shards.changes
    copy = changes._copy

    async def cut(item: Any, source: Any, target: Any) -> None:
        link = source if source.name == dead.name else target
        call = link.peer.call

        async def broken(method: str, values: Any, data: Any = b"") -> Any:
            if method == {"move.described": "receive", "move.copied": "install"}[point] or link is source:
                await dead.die()
            return await call(method, values, data)

        link.peer.call = broken
        await copy(item, source, target)

    changes._copy = cut
    await changes.asked("move", other, [0])
    await changes.rest()
    changes._copy = copy
    assert changes.failed, changes.text


def test_a_target_that_is_met_anew_while_the_tape_is_written_does_not_take_the_fragment_with_it(
    run: ShardsHere,
) -> None:
    """It has deleted its copy by then, because the fragment was another's when it was met."""
    status = run.grows()
    owner = owners(status)[0]
    other = other_than(status, owner)
    back = next(shard for shard in run.shards if shard.name == other)
    run.do(met_anew(run, back))
    status = run.grows()
    assert owners(status)[0] == owner
    one_copy(run)
    check_books(status)


async def met_anew(run: ShardsHere, target: Any) -> None:
    changes, link = run.shell.shards.changes, run.shell.fleet.find(target.name)
    record = changes._record

    async def recorded(*row: Any) -> None:
        await record(*row)
        changes._record = record
        before = link.connection
        await target.die()
        await target.start()
        while link.connection is before or target.service.arrays.state is None:
            await asyncio.sleep(0.05)

    changes._record = recorded
    await changes.asked("move", target.name, [0])
    await changes.rest()
    assert changes.failed and "is back; move it again" in changes.text, changes.text


def test_a_lost_shard_is_given_up_and_learners_bring_its_fragments_to_the_others(run: ShardsHere) -> None:
    status = run.grows()
    lost, kept = run.shards
    own = next(shard["fragments"] for shard in status["shards"] if shard["name"] == lost.name)
    run.shell.shards.changes.lost_after_s = 1.0
    run.do(watched(run))
    before = run.status()["versions"]
    run.do(lost.die())
    status = run.wait_for(lambda s: len(s["shards"]) == 1, "it is given up")
    assert owners(status).keys() == {0, 1, 2, 3} and own

    def goes_on(status: dict[str, Any]) -> bool:
        return all(now > then for now, then in zip(status["versions"], before, strict=True))

    status = run.wait_for(lambda s: goes_on(s) or run.shell.must_begin_anew(), "every fragment goes on")
    if goes_on(status):
        assert "momentum is lost" in status["shard_change"]["text"]
    else:  # its last version was published and fetched by nobody: `atoll syncer` begins anew, with the one before
        run.do(run.cut_off())
        run.do(run.lead())
    status = run.grows()
    assert all(now >= then for now, then in zip(status["versions"], before, strict=True))
    check_books(status)
    # A coordinator that begins anew knows it, and so does the lost shard when it is back: its copies do not count.
    run.do(run.cut_off())
    run.do(lost.start())
    run.do(run.lead())
    assert len(run.grows()["shards"]) == 1
    assert run.change("add", lost.address)[0]
    status = run.grows()
    assert {shard["name"] for shard in status["shards"] if shard["fragments"]} == {lost.name, kept.name}
    one_copy(run)


def test_a_coordinator_that_never_met_the_lost_shard_gives_it_up_as_well(run: ShardsHere) -> None:
    lost, kept = run.shards
    before = run.grows()["versions"]
    run.do(run.cut_off())
    run.do(lost.die())
    run.do(run.lead(lost_after_s=1.0))
    run.wait_for(lambda _: run.shell.must_begin_anew(), "it begins anew without that shard")
    run.do(run.cut_off())
    run.do(run.lead())
    status = run.grows()
    assert set(owners(status).values()) == {kept.name}
    assert all(now >= then for now, then in zip(status["versions"], before, strict=True))
    run.do(lost.start())


def test_the_model_is_exported_from_whoever_has_a_fragment_and_not_from_a_copy_that_is_left(
    run: ShardsHere, tmp_path: Path
) -> None:
    """The second of two shards dies before it has deleted what went to the first, which goes on with it."""
    status = run.grows()
    first, second = run.shards
    fragment = next(f for f, name in owners(status).items() if name == second.name)
    run.dies_at("move.told")
    run.change("move", first.name, fragment)
    run.do(run.cut_off())
    run.do(second.die())
    run.do(run.lead())
    before = run.status()["versions"][fragment]
    run.wait_for(lambda s: s["versions"][fragment] >= before + 3, "it goes on where it went")
    run.do(run.cut_off())
    run.do(first.die())
    assert fragment in first.on_disk() & second.on_disk()
    seen: list[Loaded] = []
    states = [tmp_path / f"shard-{number}" / "state" for number in range(2)]
    _from_shards(tmp_path / "run" / "state", states, lambda loaded, source: seen.append(loaded))  # type: ignore
    assert seen[0].fragments.keys() == {0, 1, 2, 3}
    assert seen[0].fragments[fragment].version >= before + 3
    run.do(first.start())
    run.do(second.start())
    run.do(run.lead())
    run.grows()
    one_copy(run)


def test_learners_that_do_not_follow_say_hello_again(run: ShardsHere) -> None:
    """Those of a version before moves: their next Welcome says where fragments are."""
    status = run.grows()
    changes = run.shell.shards.changes
    changes._follows = dict.fromkeys(changes._follows, False)
    generations = {member["learner"]: member["generation"] for member in status["members"]}
    assert run.change("move", other_than(status, owners(status)[0]), 0)[0]
    status = run.grows()
    assert {member["learner"]: member["generation"] for member in status["members"]} == generations
    assert len(changes._follows) == 2 and all(changes._follows.values())
    check_books(status)


async def watched(run: ShardsHere) -> None:
    run.shell.shards.changes.watch()


def test_an_operator_sees_and_moves_fragments_with_one_command(
    run: ShardsHere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    atoll = command(monkeypatch=monkeypatch, capsys=capsys)
    before = owners(run.status())
    listed = atoll("shards", "list", run.address)
    assert listed.code == 0 and all(f"{shard.name}  {shard.address}" in listed.stdout for shard in run.shards)
    other = other_than(run.status(), before[2])
    moved = atoll("shards", "move", run.address, other, "2")
    assert moved.code == 0 and "1 fragment moved" in moved.stdout
    assert owners(run.status())[2] == other
    wrong = atoll("shards", "move", run.address, "nobody", "2")
    assert wrong.code == 2 and "has no shard 'nobody'" in wrong.stderr
    assert atoll("shards", "remove", run.address, other).code == 0
    told = json.loads(atoll("shards", "list", run.address, "--json").stdout)
    assert [shard["fragments"] for shard in told["shards"]] == [[0, 1, 2, 3]] and told["change"]["state"] == "done"


def test_what_cannot_be_moved_is_refused_in_words(run: ShardsHere) -> None:
    first, second = run.shards
    for action, shard, fragments, said in (
        ("move", "nobody", [0], "has no shard 'nobody'"),
        ("move", first.name, [7], "has no fragment 7"),
        ("move", first.name, [], "no fragment is given"),
        ("give-up", first.name, [], "is there; take it out with remove"),
        ("dance", first.name, [], "none of move, add, remove, give-up"),
    ):
        with pytest.raises(RefusedError, match=said):
            run.change(action, shard, *fragments)
    assert "one of this run's already" in run.change("add", first.address)[1]
    assert run.change("remove", second.name)[0]
    with pytest.raises(RefusedError, match="only shard that is there"):
        run.change("remove", first.name)
    run.grows()


@pytest.mark.parametrize(("name", "said"), [("r2", "holds fragments of run r2"), ("r1", "led by a newer syncer")])
def test_a_shard_of_another_run_or_syncer_is_refused_and_both_go_on(
    run: ShardsHere, tmp_path: Path, name: str, said: str
) -> None:
    other = ShardsHere(QUICK, tmp_path / "other", 2, run=name)
    learner = TrainingThread(other.address, "l0")
    other.do(waived(other))
    other.grows()
    done, text = run.change("add", other.shards[0].address)
    assert not done and said in text, text
    other.grows()
    run.grows()
    learner.stopping.set()
    learner.thread.join(60)
    other.stop()
    assert learner.error is None


async def waived(run: ShardsHere) -> None:
    run.shell.machine.book.waive_expected()


def test_two_shards_of_one_folder_and_one_that_claims_what_another_has_are_refused(
    run: ShardsHere, tmp_path: Path
) -> None:
    """A copy of a shard's folder has its name; with another name it claims its fragments, as new as theirs."""
    run.grows()
    run.do(run.cut_off())
    first = run.shards[0]
    run.do(first.die())
    shutil.copytree(tmp_path / "shard-0", tmp_path / "shard-2")
    run.do(first.start())
    run.do(run.lead())
    run.grows()
    twin = run.do(run.add_shard())
    done, text = run.change("add", twin.address)
    assert not done and "on a copy of its folder" in text
    twin.service.arrays.row["name"] = "other"
    own = owners(run.status())
    newer = {f: {"version": 10**6, "checksum": 1} for f in own if own[f] == first.name}
    run.do(claims(run, twin.address, newer))
    run.do(twin.die())
    run.shards.remove(twin)


async def claims(run: ShardsHere, address: str, newer: dict[int, dict[str, int]]) -> None:
    changes, fleet = run.shell.shards.changes, run.shell.fleet
    meet = fleet.meet

    async def met(address: str, patience_s: float) -> Any:
        link = await meet(address, patience_s)
        link.records = newer
        return link

    fleet.meet = met
    await changes.asked("add", address, [])
    await changes.rest()
    assert changes.failed and "newer than those who have them now" in changes.text
