"""A relay on real processes: the syncer sees learners, updates cross the link once, and its death costs nothing."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cluster import WAIT_S, Proxy, SyncerProcess, TrainingThread, _remembered, check_books, small_model
from ports import quiet_port
from safetensors.numpy import load_file
from shards import ShardProcess, sharded_syncer
from torch import nn

from atoll.core import (
    PROTOCOL_VERSION,
    SECOND_NS,
    ContributionId,
    Hello,
    SyncConfig,
    TensorSpec,
    Welcome,
    build_layout,
)
from atoll.core import effects as fx
from atoll.syncer.log_replay import read_committed
from atoll.syncer.relay import Relay
from atoll.syncer.relay_links import RelayLinks
from atoll.syncer.relay_peers import AtRelay
from atoll.syncer.state import ModelState
from atoll.wire import ClientOptions, ShardPeer, fetch_status

WIDE = 2400
"""Makes updates too large to travel inside their notices."""
TENSORS = (TensorSpec("w", (256,), "float32"),)


class RelayProcess:
    def __init__(self, upstream: str, log: Path, *options: str, address: str = "") -> None:
        self.address = address or f"127.0.0.1:{quiet_port()}"
        self.log = log.open("a")
        argv = [sys.executable, "-m", "atoll", "relay", "--upstream", upstream, "--listen", self.address, *options]
        self.process = _remembered(subprocess.Popen(argv, stdout=self.log, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + WAIT_S
        while "listens on" not in log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def status(self) -> dict[str, Any]:
        return asyncio.run(fetch_status(ClientOptions(address=self.address)))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def same_model() -> nn.Module:
    """Whoever comes with the run's first parameters need not fetch them."""
    torch.manual_seed(0)
    return small_model(WIDE)


def test_a_learner_that_went_past_its_relay_goes_back_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job starts everything at once, and a relay is upgraded while its site trains."""
    monkeypatch.setattr("atoll.wire.limits.RELAY_LOOK_S", 0.5)
    syncer = SyncerProcess(tmp_path, "--fragments", "1", "--sync-every", "4", "--learners", "1")
    address = f"127.0.0.1:{quiet_port()}"
    learner = TrainingThread(f"{address},{syncer.address}", "a", step_s=0.02)
    try:
        learner.wait_steps(10)  # straight to the syncer: nobody listens at the relay's address yet
        for number in range(2):
            relay = RelayProcess(syncer.address, tmp_path / f"relay-{number}.log", address=address)
            deadline = time.monotonic() + WAIT_S
            while relay.status()["learners"] != ["a"]:
                assert time.monotonic() < deadline and learner.error is None
                time.sleep(0.1)
            before = min(syncer.status()["versions"])
            told = syncer.wait_for(lambda s, before=before: min(s["versions"]) > before + 2, "merges by the relay")
            check_books(told)
            assert told["relays"][0]["learners"] == ["a"] and told["relays"][0]["from"].startswith("127.0.0.1:")
            relay.kill()
        syncer.wait_for(lambda s: s["relays"] == [], "the relay to be gone")
    finally:
        learner.stop()
        syncer.stop()
    assert learner.error is None


def test_a_syncer_that_comes_first_is_not_gone_back_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.wire.limits.RELAY_LOOK_S", 0.2)
    folders = [tmp_path / "run", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    syncer, other = (SyncerProcess(folder, "--fragments", "1", "--sync-every", "4") for folder in folders)
    other.kill()
    learner = TrainingThread(f"{other.address},{syncer.address}", "a", step_s=0.02)
    try:
        learner.wait_steps(10)
        other.again()
        other.wait_for(lambda s: True, "the other one to answer")
        learner.wait_steps(50)
        assert other.status()["members"] == [] and syncer.status()["members"][0]["state"] == "active"
    finally:
        learner.stop()
        syncer.stop()
        other.stop()


def test_a_site_fetches_each_update_once_and_outlives_its_relay(tmp_path: Path) -> None:
    rhythm = ("--fragments", "1", "--sync-every", "4", "--overlap", "2", "--quorum", "all", "--learners", "2")
    syncer, shards = sharded_syncer(tmp_path, 1, *rhythm, "--new-run")
    relay = RelayProcess(syncer.address, tmp_path / "relay.log")
    places = f"{relay.address},{syncer.address}"
    learners = [TrainingThread(places, f"l{i}", seed=i, step_s=0.05, model=same_model()) for i in range(2)]
    try:
        status = syncer.wait_for(lambda s: min(s["versions"], default=0) >= 8, "eight versions through the relay")
        members = {one["learner"]: one for one in status["members"]}
        assert members.keys() == {"l0", "l1"} and status["contributions_merged"] >= 16
        check_books(status)
        told = relay.status()
        assert told["learners"] == ["l0", "l1"]
        # Both learners were served every update; the link to the syncer carried each once.
        assert told["bytes_served"] >= 1.8 * told["bytes_fetched"] > 0
        relay.kill()
        after = syncer.wait_for(lambda s: min(s["versions"]) >= status["versions"][0] + 4, "they go on without it")
        assert {one["learner"] for one in after["members"] if one["state"] == "active"} == {"l0", "l1"}
        check_books(after)
    finally:
        for learner in learners:
            learner.stop()
        syncer.stop()
        shards[0].stop()
    assert all(learner.error is None for learner in learners)


EXACT = ("--fragments", "2", "--sync-every", "4", "--overlap", "0", "--quorum", "all", "--grace-cap", "0", "--new-run")
"""Synchronous: what is merged follows from the data alone, never from who was faster."""
STEPS = 16


def train_a_site(
    folder: Path, *options: str, relayed: bool, shards: int = 0, tree: bool = False
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Two learners of a site and one elsewhere, over a few rounds: the model, the syncer's status, the relay's. In a
    `tree` there is a third of the site, and the first two reach its relay through one of their own."""
    folder.mkdir()
    told, processes = (*EXACT, *options, "--learners", "4" if tree else "3"), []
    if shards:
        syncer, processes = sharded_syncer(folder, shards, *told)
    else:
        syncer = SyncerProcess(folder, *told)
    relay = RelayProcess(syncer.address, folder / "relay.log") if relayed else None
    site = relay.address if relay is not None else syncer.address
    inner = RelayProcess(site, folder / "inner.log") if relayed and tree else None
    first = inner.address if inner is not None else site
    places = [first, first, *([site] if tree else []), syncer.address]
    step_s = 0.1 if tree else 0.01  # the inner relay asks for its link when its first learner comes
    learners = [
        TrainingThread(place, f"l{i}", seed=i, steps=STEPS, step_s=step_s, model=same_model())
        for i, place in enumerate(places)
    ]
    try:
        for learner in learners:
            learner.thread.join(WAIT_S)
            assert learner.error is None
        status = syncer.wait_for(lambda s: min(s["versions"]) >= STEPS // 4, "every version")
        seen = relay.status() if relay is not None else {}
        seen["inner"] = inner.status() if inner is not None else {}
    finally:
        if inner is not None:
            inner.kill()
        if relay is not None:
            relay.kill()
        syncer.stop()
        for shard in processes:
            shard.stop()
    return load_file(syncer.folder / "model.safetensors"), status, seen


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Relative to the second."""
    far = sum(float(np.square(one[name] - other[name]).sum()) for name in other)
    return math.sqrt(far / sum(float(np.square(values).sum()) for values in other.values()))


@pytest.mark.parametrize("shards", [0, 2])
def test_a_site_merges_to_the_model_of_the_flat_merge(tmp_path: Path, shards: int) -> None:
    flat, expected, _ = train_a_site(tmp_path / "flat", "--codec-up", "fp32", relayed=False)
    merged, status, told = train_a_site(tmp_path / "site", "--codec-up", "fp32", relayed=True, shards=shards)
    assert told["merged_payloads"] >= 2 * (STEPS // 4 - 1) and told["merges"], told
    assert 0.0 < distance(merged, flat) < 1e-6
    for name in ("versions", "contributions_merged", "tokens_processed", "tokens_merged", "tokens_discarded"):
        assert status[name] == expected[name], name
    assert {m["learner"] for m in status["members"]} == {m["learner"] for m in expected["members"]}
    check_books(status)


@pytest.mark.parametrize("shards", [0, 2])
def test_a_site_costs_one_payload_a_round_in_the_codec_of_the_run(tmp_path: Path, shards: int) -> None:
    flat, _, _ = train_a_site(tmp_path / "flat", "--codec-up", "int4", relayed=False)
    merged, status, told = train_a_site(tmp_path / "site", "--codec-up", "int4", relayed=True, shards=shards)
    model, _, _ = train_a_site(tmp_path / "exact", "--codec-up", "fp32", relayed=False)
    assert distance(merged, model) < 2.0 * distance(flat, model)  # the same error once more
    one = sum(values.size for values in model.values()) / 2 * (0.5 + 4 / 256)  # of one of the two fragments
    # One for each round; and what both have on hand when they leave comes alone, for the syncer's disk.
    assert told["bytes_up"] <= 1.05 * (sum(status["versions"]) + 2) * one + seed_bytes(model)
    check_books(status)


def test_a_relay_merges_for_the_relay_behind_which_it_stands(tmp_path: Path) -> None:
    flat, expected, _ = train_a_site(tmp_path / "flat", "--codec-up", "fp32", relayed=False, tree=True)
    merged, status, told = train_a_site(tmp_path / "tree", "--codec-up", "fp32", relayed=True, tree=True)
    assert min(told["inner"]["merged_payloads"], told["merged_payloads"]) >= 2 * (STEPS // 4 - 1), told
    assert 0.0 < distance(merged, flat) < 1e-6
    for name in ("versions", "contributions_merged", "tokens_processed", "tokens_merged", "tokens_discarded"):
        assert status[name] == expected[name], name
    one = sum(values.nbytes for values in flat.values()) / 2  # of one of the two fragments
    for relay in (told, told["inner"]):  # one for each round, and what each has on hand when it leaves
        assert relay["bytes_up"] <= 1.05 * (sum(status["versions"]) + 3 * 2) * one + seed_bytes(flat)
    check_books(status)


def test_what_a_dead_inner_relay_held_is_given_again(tmp_path: Path) -> None:
    """The outer one goes on merging for its own learners: it is not taken for one that does not send."""
    rhythm = ("--fragments", "2", "--sync-every", "4", "--overlap", "2", "--quorum", "all", "--learners", "4")
    syncer = SyncerProcess(tmp_path, *rhythm, "--new-run")
    outer, link = RelayProcess(syncer.address, tmp_path / "outer.log"), Proxy(syncer.address)
    inner = RelayProcess(outer.address, tmp_path / "inner.log")
    site = f"{outer.address},{syncer.address}"
    places = [f"{inner.address},{site}"] * 2 + [site, link.address]
    learners = [
        TrainingThread(place, f"l{i}", seed=i, step_s=0.03, model=same_model()) for i, place in enumerate(places)
    ]
    try:
        syncer.wait_for(lambda s: min(s["versions"], default=0) >= 3, "versions through both relays")
        link.bytes_per_s = 400
        syncer.wait_for(lambda _: inner.status()["held"] >= 2, "contributions wait at the inner relay")
        inner.kill()
        syncer.wait_for(lambda _: "relay_gone" in events_of(tmp_path), "what it held is given again")
        link.bytes_per_s = 0
        before, merged = syncer.status(), outer.status()["merged_payloads"]
        after = syncer.wait_for(lambda s: min(s["versions"]) >= max(before["versions"]) + 3, "they go on without it")
        assert outer.status()["merges"] and outer.status()["merged_payloads"] > merged
        assert {one["learner"] for one in after["members"] if one["state"] == "active"} == {"l0", "l1", "l2", "l3"}
        check_books(after)
        assert not after["tokens_discarded"]
    finally:
        for learner in learners:
            learner.stopping.set()
        for learner in learners:
            learner.stop()
        outer.kill()
        syncer.stop()
        link.stop()
    assert all(learner.error is None for learner in learners)


def seed_bytes(model: dict[str, Any]) -> int:
    """The first parameters, which one learner of the site may have brought."""
    return sum(values.nbytes for values in model.values())


def test_what_a_dead_relay_held_is_given_again(tmp_path: Path) -> None:
    """Killed while it holds contributions of both: nothing is merged twice or lost, and the books balance."""
    rhythm = ("--fragments", "2", "--sync-every", "4", "--overlap", "2", "--quorum", "all", "--learners", "3")
    syncer = SyncerProcess(tmp_path, *rhythm, "--new-run")
    relay, link = RelayProcess(syncer.address, tmp_path / "relay.log"), Proxy(syncer.address)
    places = [f"{relay.address},{syncer.address}"] * 2 + [link.address]
    learners = [
        TrainingThread(place, f"l{i}", seed=i, step_s=0.03, model=same_model()) for i, place in enumerate(places)
    ]
    try:
        syncer.wait_for(lambda s: min(s["versions"], default=0) >= 3, "versions through the relay")
        link.bytes_per_s = 4000  # the third learner's takes ten seconds now, and its round waits for it
        syncer.wait_for(lambda _: relay.status()["held"] >= 2, "the site's contributions wait at the relay")
        relay.kill()
        link.bytes_per_s = 0
        dropped = syncer.wait_for(lambda _: "relay_gone" in events_of(tmp_path), "what it held is given again")
        after = syncer.wait_for(lambda s: min(s["versions"]) >= min(dropped["versions"]) + 3, "they go on without it")
        assert {one["learner"] for one in after["members"] if one["state"] == "active"} == {"l0", "l1", "l2"}
        check_books(after)
        assert not after["tokens_discarded"]  # given again, not given up
    finally:
        for learner in learners:
            learner.stopping.set()
        for learner in learners:
            learner.stop()
        syncer.stop()
        link.stop()
    assert all(learner.error is None for learner in learners)


@pytest.mark.parametrize("dies", ["relay", "shard"])
def test_what_waits_at_a_relay_for_shards_outlives_either(tmp_path: Path, dies: str) -> None:
    """The coordinator counts, and neither it nor a shard has the bytes: what dies with the relay, or for a shard that
    died, is its learners' again."""
    rhythm = ("--fragments", "2", "--sync-every", "4", "--overlap", "2", "--quorum", "all", "--learners", "3")
    syncer, shards = sharded_syncer(tmp_path, 2, *rhythm, "--new-run")
    relay, link = RelayProcess(syncer.address, tmp_path / "relay.log"), Proxy(syncer.address)
    places = [f"{relay.address},{syncer.address}"] * 2 + [link.address]
    learners = [
        TrainingThread(place, f"l{i}", seed=i, step_s=0.03, model=same_model()) for i, place in enumerate(places)
    ]
    try:
        syncer.wait_for(lambda s: min(s["versions"], default=0) >= 3, "versions through the relay")
        link.bytes_per_s = 400  # the third learner hears of rounds seconds late, and they wait for it
        syncer.wait_for(lambda _: relay.status()["held"] >= 2, "the site's contributions wait at the relay")
        if dies == "relay":
            relay.kill()
            syncer.wait_for(lambda _: "relay_gone" in events_of(tmp_path / "run"), "what it held is given again")
        else:
            shards[0].kill()
            syncer.wait_for(lambda s: s["shards"][0]["away"], "the shard to be missed")
            shards[0].start()
        link.bytes_per_s = 0
        before = syncer.wait_for(lambda s: not any(one["away"] for one in s["shards"]), "all shards")
        wanted = max(before["versions"]) + 3
        after = syncer.wait_for(lambda s: min(s["versions"]) >= wanted, "they go on")
        assert {one["learner"] for one in after["members"] if one["state"] == "active"} == {"l0", "l1", "l2"}
        if dies == "shard":
            merged = relay.status()["merged_payloads"]
            syncer.wait_for(lambda _: relay.status()["merged_payloads"] >= merged + 4, "the relay merges on")
        check_books(syncer.status())
        assert not after["tokens_discarded"]  # given again, not given up
    finally:
        for learner in learners:
            learner.stopping.set()
        for learner in learners:
            learner.stop()
        syncer.stop()
        for shard in shards:
            shard.stop()
        if dies == "shard":
            relay.kill()
        link.stop()
    assert all(learner.error is None for learner in learners)


def events_of(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "events").glob("syncer*.jsonl"))


def test_what_a_relay_merged_is_on_disk_before_anybody_hears_of_it(tmp_path: Path) -> None:
    """The log makes a version again from single contributions, and a relay has sent none: such a version has a slot."""
    rhythm = ("--fragments", "2", "--sync-every", "4", "--overlap", "2", "--quorum", "all", "--learners", "2")
    syncer = SyncerProcess(tmp_path, *rhythm, "--durability", "commit")
    relay = RelayProcess(syncer.address, tmp_path / "relay.log")
    places = f"{relay.address},{syncer.address}"
    learners = [TrainingThread(places, f"l{i}", seed=i, step_s=0.02, model=same_model()) for i in range(2)]
    try:
        told = syncer.wait_for(lambda s: min(s["versions"], default=0) >= 4, "versions from the relay")
        assert relay.status()["merged_payloads"] >= 6
        syncer.kill()
        loaded = read_committed(tmp_path / "state")
        syncer.again()
        assert not loaded.problems, loaded.problems
        assert all(loaded.fragments[f].version >= version for f, version in enumerate(told["versions"]))
    finally:
        for learner in learners:
            learner.stopping.set()
        for learner in learners:
            learner.stop()
        relay.kill()
        syncer.stop()


def test_a_run_that_needs_single_contributions_gets_them(tmp_path: Path) -> None:
    _, status, told = train_a_site(tmp_path / "robust", "--robust", "cosine", relayed=True)
    assert not told["merges"] and "--robust" in told["passes_on_because"]
    assert status["contributions_merged"] >= 3 * (STEPS // 4)
    check_books(status)


def test_a_relay_to_nowhere_says_so() -> None:
    argv = [sys.executable, "-m", "atoll", "relay", "--upstream", f"127.0.0.1:{quiet_port()}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no syncer listens on that port" in done.stderr


def test_a_relay_to_a_shard_says_whom_it_needs(tmp_path: Path) -> None:
    shard = ShardProcess(tmp_path / "shard")
    shard.wait_ready()
    try:
        argv = [sys.executable, "-m", "atoll", "relay", "--upstream", shard.address, "--listen", "127.0.0.1:0"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    finally:
        shard.kill()
    assert done.returncode == 2 and "is a shard" in done.stderr and "--upstream" in done.stderr


def test_newcomers_are_led_where_the_last_session_found_the_syncer(tmp_path: Path) -> None:
    """The first address of the list is dead. Whoever joins later must not send the whole site's transfers there."""
    syncer = SyncerProcess(tmp_path, "--fragments", "1", "--sync-every", "4", "--learners", "1")
    dead = f"127.0.0.1:{quiet_port()}"

    async def join_twice() -> list[str]:
        relay = Relay(ClientOptions(address=f"{dead},{syncer.address}"), 2**20)
        moved: list[str] = []

        async def move(place: ClientOptions) -> None:
            moved.append(place.address)

        relay._bulk.move = move  # type: ignore[method-assign]
        for number in range(2):
            got: list[object] = []
            relay.open_session(number, Hello(f"l{number}", f"l{number}", PROTOCOL_VERSION, TENSORS), got.append)
            async with asyncio.timeout(WAIT_S):
                while not got:
                    await asyncio.sleep(0.01)
            assert isinstance(got[0], Welcome)
        assert [place.address for place in relay._places()] == [syncer.address, dead]
        await relay.close()
        return moved

    try:
        assert asyncio.run(join_twice()) == [syncer.address] * 2
    finally:
        syncer.stop()


def test_a_merge_does_not_wait_for_ever_for_a_frozen_relay() -> None:
    """What it holds counts as lost after the round's quorum timeout, and its link is given up."""
    identities = tuple(ContributionId(name, 1, 0, 0) for name in ("l0", "l1"))

    async def gather() -> tuple[object, str]:
        config = SyncConfig(fragments=1, quorum_timeout_ns=SECOND_NS // 10)
        driver: Any = SimpleNamespace(machine=SimpleNamespace(config=config))
        state = ModelState(build_layout(list(TENSORS), 1), config, owned=())
        silent: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def write(_data: bytes) -> None: ...
        async def answer(*_: object) -> Any: ...
        async def read() -> bytes:
            return await silent

        peer = ShardPeer(read, write, answer)
        merge = fx.Merge(0, 1, 1, identities, (0.5, 0.5))
        async with asyncio.timeout(WAIT_S):
            found = await RelayLinks(driver, lambda: state).gather(merge, [AtRelay(peer, 1.0), AtRelay(peer, 1.0)])
        return found, peer.closed

    found, closed = asyncio.run(gather())
    assert found == identities and "--no-merge" in closed
