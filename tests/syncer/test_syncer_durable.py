"""A real syncer process is killed, frozen, given a full disk and a damaged one, with real learners attached."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster import WAIT_S, SyncerProcess, TrainingThread, check_books, spawn
from safetensors import safe_open
from safetensors.numpy import load_file

from atoll.instruments.chaos import failpoints
from atoll.syncer import read_committed

OPTIONS = ("--learners", "2", "--sync-every", "6", "--fragments", "3")
RARE = ("slot.create", "slot.allocate", "slot.rename", "slot.folder.sync", "slot.older.delete")
RARE += ("tape.append.mid", "tape.append.sync", "tape.appended", "log.create", "log.folder.sync")
"""Points that a syncer's life passes only a few times: while files are made, or when somebody joins."""
COMMIT_POINTS = tuple(p for p in failpoints.FAILPOINTS if p.startswith(("slot.", "log.", "tape.append", "commit.")))
COMMIT_POINTS = tuple(p for p in COMMIT_POINTS if p != "log.drop")  # a log of this size has one segment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def learners(syncer: SyncerProcess, count: int = 2, **options: object) -> list[TrainingThread]:
    return [TrainingThread(syncer.address, f"t{i}", seed=i, **options) for i in range(count)]  # type: ignore[arg-type]


def train_on(threads: list[TrainingThread], steps: int) -> None:
    for thread in threads:
        thread.wait_steps(steps)


def held(threads: list[TrainingThread]) -> dict[tuple[int, int], set[bytes]]:
    """What learners hold as published: by fragment and version, the bytes."""
    found: dict[tuple[int, int], set[bytes]] = {}
    for thread in threads:
        vault = thread.learner._shell.vault
        assert vault is not None
        for fragment, published in enumerate(vault.current):
            assert published is not None
            found.setdefault((fragment, published.version), set()).add(published.theta.tobytes())
    return found


def check_state(folder: Path, threads: list[TrainingThread]) -> None:
    """Nothing that a learner holds is missing on disk, and what both hold is the same to the bit."""
    stored = read_committed(folder / "state")
    assert all("never finished" in problem for problem in stored.problems), stored.problems
    for (fragment, version), values in held(threads).items():
        assert len(values) == 1, "learners hold different parameters under one version"
        on_disk = stored.fragments[fragment]
        assert version <= on_disk.version, "a learner received a version that is not on disk"
        if version == on_disk.version:
            assert {on_disk.arrays["theta"].tobytes()} == values


def finish(syncer: SyncerProcess, threads: list[TrainingThread], *, uncertain: bool = False) -> dict[str, object]:
    """Stop everything in order; every token that was processed was merged. Where the record was lost, what may be
    inside a version that a learner brought back is given up by name instead."""
    for thread in threads:
        thread.stop()
        assert thread.error is None, thread.error
    status = syncer.wait_for(lambda s: s["active"] == 0 and not s["tokens_pending"], "everything handed over is merged")
    check_books(status)
    given_up = status["tokens_discarded"].get("uncertain", 0) if uncertain else 0
    assert status["tokens_processed"] == 32 * sum(thread.taken for thread in threads)
    assert status["tokens_merged"] + given_up == status["tokens_processed"], status
    assert syncer.stop() == 0, syncer.output()
    return status


def test_kill_nine_again_and_again_loses_nothing(folder: Path) -> None:
    syncer = SyncerProcess(folder, *OPTIONS)
    threads = learners(syncer)
    train_on(threads, 30)
    versions = [0, 0, 0]
    for number in range(4):
        syncer.kill()
        train_on(threads, 10)  # nobody waits for it
        check_state(folder, threads)
        syncer.again()
        before = sum(versions)
        status = syncer.wait_for(lambda s, v=before: s["committed"] and sum(s["versions"]) > v, "rounds go on")
        assert status["epoch"] == number + 2 and status["recovered_from"] == "slots"
        check_books(status)
        assert all(new >= old for new, old in zip(status["versions"], versions, strict=True))
        versions = status["versions"]
        train_on(threads, 20)
    finish(syncer, threads)
    saved = load_file(folder / "model.safetensors")
    assert all(np.isfinite(values).all() for values in saved.values())


def die_at_every_point(folder: Path, times: int) -> None:
    """One run, in which the syncer dies at every step of a commit, and everything published is there each time."""
    syncer = SyncerProcess(folder, *OPTIONS)
    threads = learners(syncer)
    train_on(threads, 20)
    dice = random.Random(times)
    for point in COMMIT_POINTS:
        for _ in range(times):
            syncer.kill()
            hit = 1 if point in RARE else dice.randint(1, 12)
            syncer.again(ATOLL_FAILPOINT=f"{point}:{hit}")
            assert syncer.wait_dead() == -signal.SIGKILL, f"{point}:{hit} {syncer.output()}"
            check_state(folder, threads)
    syncer.again()
    train_on(threads, 20)
    for thread in threads:
        thread.stop()
        assert thread.error is None, thread.error
    status = syncer.wait_for(lambda s: s["active"] == 0, "everybody has left")
    check_books(status)
    assert syncer.stop() == 0, syncer.output()


def test_death_at_every_step_of_a_commit(folder: Path) -> None:
    die_at_every_point(folder, 1)


@pytest.mark.soak
def test_death_at_every_step_of_a_commit_ten_times(folder: Path) -> None:
    die_at_every_point(folder, 10)


def test_a_full_disk_is_told_and_healed(folder: Path) -> None:
    room = folder / "room"
    full = "log.*:20:enospc,slot.*:40:enospc,tape.*:40:enospc"
    syncer = SyncerProcess(folder, *OPTIONS, ATOLL_FAILPOINT=full, ATOLL_FAILPOINT_UNTIL=str(room))
    threads = learners(syncer)
    status = syncer.wait_for(lambda s: bool(s["degraded"]), "the disk is full")
    train_on(threads, 40)
    later = syncer.wait_for(lambda s: sum(s["versions"]) > sum(status["versions"]) + 10, "rounds go on all the same")
    assert later["degraded"] and "No space left" in syncer.output()
    room.touch()
    syncer.wait_for(lambda s: not s["degraded"], "the disk has room again")
    train_on(threads, 20)
    syncer.kill()
    check_state(folder, threads)
    syncer.again()
    train_on(threads, 20)
    finish(syncer, threads)


def test_what_a_dead_disk_missed_comes_back_from_learners(folder: Path) -> None:
    syncer = SyncerProcess(folder, *OPTIONS, ATOLL_FAILPOINT="log.*:20:eio,slot.*:40:eio,tape.*:40:eio")
    threads = learners(syncer)
    syncer.wait_for(lambda s: bool(s["degraded"]), "the disk fails")
    train_on(threads, 60)
    syncer.kill()
    published = dict(sorted(held(threads)))
    syncer.again()
    status = syncer.wait_for(lambda s: s["committed"], "learners have brought back what they hold")
    assert all(status["versions"][fragment] >= version for fragment, version in published.items())
    wait_event(folder, "fragment_healed")
    train_on(threads, 20)
    finish(syncer, threads, uncertain=True)


def test_a_damaged_slot_is_named_and_the_snapshot_is_used(folder: Path) -> None:
    url = str(folder / "snapshots")
    options = (*OPTIONS, "--snapshots", url, "--snapshot-every", "1s", "--keep", "2")
    syncer = SyncerProcess(folder, *options)
    threads = learners(syncer)
    train_on(threads, 60)
    wait_event(folder, "snapshot_written")
    for thread in threads:
        thread.stop()
    assert syncer.stop() == 0
    slots = sorted((folder / "state").rglob("fragment-0001.slots"))[-1]
    data = bytearray(slots.read_bytes())
    for at in range(8192, len(data), 512):
        data[at] ^= 0xFF
    slots.write_bytes(bytes(data))
    syncer.again()
    assert "fragment-0001" in syncer.output() and "snapshot" in syncer.output()
    fresh = TrainingThread(syncer.address, "new")
    fresh.wait_steps(20)
    status = syncer.wait_for(lambda s: s["committed"] and s["active"] == 1, "the run goes on from the snapshot")
    assert status["recovered_from"].startswith("snapshot-")
    check_books(status)
    fresh.stop()
    syncer.stop()
    assert len(list((folder / "snapshots").glob("snapshot-*"))) <= 4  # two, and two of the epoch before


def test_a_lost_state_folder_comes_back_from_a_snapshot_and_the_learners(folder: Path) -> None:
    options = (*OPTIONS, "--snapshots", str(folder / "snapshots"), "--snapshot-every", "1s")
    syncer = SyncerProcess(folder, *options)
    threads = learners(syncer)
    train_on(threads, 30)
    syncer.kill()
    syncer.again()  # learners have seen epoch 2 from here on
    train_on(threads, 30)
    wait_event(folder, "snapshot_written")
    syncer.kill()
    published = dict(sorted(held(threads)))
    shutil.rmtree(folder / "state")
    for _ in range(2):  # and the folder that is made anew outlives a restart
        syncer.again()
        status = syncer.wait_for(lambda s: s["committed"] and s["active"] == 2, "the run goes on")
        assert all(status["versions"][fragment] >= version for fragment, version in published.items())
        train_on(threads, 20)
        syncer.kill()
    syncer.again()
    for thread in threads:
        thread.stop()
        assert thread.error is None, thread.error
    check_books(syncer.wait_for(lambda s: s["active"] == 0 and not s["tokens_pending"], "all is merged"))
    assert syncer.stop() == 0


def test_a_frozen_syncer_that_wakes_up_is_fenced_out(folder: Path) -> None:
    old = SyncerProcess(folder, *OPTIONS)
    threads = learners(old)
    train_on(threads, 20)
    os.kill(old.process.pid, signal.SIGSTOP)
    (folder / "syncer.json").unlink()
    new = SyncerProcess(folder, *OPTIONS, "--take-over")
    assert new.address != old.address
    os.kill(old.process.pid, signal.SIGCONT)
    assert old.wait_dead() == 3
    assert "newer" in new.output()
    moved = TrainingThread(new.address, "moved")
    moved.wait_steps(20)
    status = new.wait_for(lambda s: s["active"] >= 1, "the new one works")
    assert status["epoch"] == 2
    for thread in threads:
        thread.stopping.set()
    moved.stop()
    assert new.stop() == 0


@pytest.mark.parametrize("told", [True, False], ids=["told to stop", "left alone"])
def test_an_idle_syncer_that_was_overtaken_ends_and_leaves_the_newer_ones_model(folder: Path, told: bool) -> None:
    old = SyncerProcess(folder, *OPTIONS)
    threads = learners(old)
    train_on(threads, 20)
    for thread in threads:
        thread.stop()
    old.wait_for(lambda s: s["active"] == 0 and not s["tokens_pending"], "all is merged")
    os.kill(old.process.pid, signal.SIGSTOP)
    (folder / "syncer.json").unlink()
    new = SyncerProcess(folder, *OPTIONS, "--take-over")
    threads = learners(new)
    train_on(threads, 20)
    for thread in threads:
        thread.stop()
    status = new.wait_for(lambda s: s["active"] == 0 and not s["tokens_pending"], "all is merged")
    assert new.stop() == 0
    if told:
        old.process.terminate()
    os.kill(old.process.pid, signal.SIGCONT)
    assert old.wait_dead() == 3
    with safe_open(folder / "model.safetensors", framework="numpy") as model:
        assert model.metadata()["atoll_versions"] == ",".join(map(str, status["versions"]))


SLOW_TO_LISTEN = """
import os, signal, sys
from atoll.app import main
from atoll.syncer import serve
real = serve.{where}
def frozen(*arguments):
    os.kill(os.getpid(), signal.SIGSTOP)
    return real(*arguments)
serve.{where} = frozen
sys.argv = ["atoll", "syncer", "--listen", "127.0.0.1:0", "--learners", "1", "--run-folder", sys.argv[1]]
main()
"""


@pytest.mark.parametrize("where", ["agree_on_settings", "_overtaken", "_take_the_word"])
def test_a_syncer_that_is_overtaken_while_it_starts_never_says_where_it_is(folder: Path, where: str) -> None:
    slow = spawn(SLOW_TO_LISTEN.format(where=where), str(folder))
    assert os.WIFSTOPPED(os.waitpid(slow.pid, os.WUNTRACED)[1])
    new = SyncerProcess(folder, *OPTIONS, "--take-over")
    announced = (folder / "syncer.json").read_text()
    os.kill(slow.pid, signal.SIGCONT)
    said, _ = slow.communicate(timeout=WAIT_S)
    assert slow.returncode == 3 and "a newer syncer (epoch 2" in said
    assert (folder / "syncer.json").read_text() == announced
    assert new.status()["epoch"] == 2
    assert new.stop() == 0


def test_a_second_syncer_on_the_same_folder_is_refused_with_the_remedy(folder: Path) -> None:
    first = SyncerProcess(folder, *OPTIONS)
    with pytest.raises(AssertionError, match="--take-over"):
        SyncerProcess(folder, *OPTIONS)
    assert first.status()["epoch"] == 1
    first.stop()


def test_the_model_is_exported_from_the_state_alone(folder: Path) -> None:
    syncer = SyncerProcess(folder, *OPTIONS)
    threads = learners(syncer)
    train_on(threads, 30)
    syncer.kill()
    for thread in threads:
        thread.stopping.set()
    from atoll.store import export_model

    stored = read_committed(folder / "state")
    export_model(stored.rows, stored.fragments, folder / "out.safetensors")
    model = threads[0].model
    loaded = {name: torch.from_numpy(values) for name, values in load_file(folder / "out.safetensors").items()}
    for thread in threads:
        thread.thread.join(WAIT_S)
    missing = model.load_state_dict(loaded)
    assert not missing.missing_keys and not missing.unexpected_keys
    flat = torch.cat([loaded[name].flatten() for name, _ in model.named_parameters()])
    theta = np.concatenate([fragment.arrays["theta"] for fragment in stored.fragments.values()])
    assert np.isclose(np.abs(theta).sum(dtype=np.float64), flat.abs().sum(dtype=torch.float64).item(), rtol=1e-12)


def wait_event(folder: Path, kind: str) -> None:
    """Events are written a moment after they happen."""
    deadline = time.monotonic() + WAIT_S
    while not any(f'"{kind}"' in path.read_text() for path in (folder / "events").glob("syncer-*.jsonl")):
        assert time.monotonic() < deadline, f"no event {kind}"
        time.sleep(0.1)


def test_a_run_keeps_its_settings_where_the_command_names_none(folder: Path) -> None:
    """Defaults change from one version to the next, and a run that is started again with the same command must not."""
    odd = ("--merge", "rda", "--outer-lr", "0.6", "--outer-momentum", "0.4")
    syncer = SyncerProcess(folder, *OPTIONS, *odd)
    threads = learners(syncer)
    train_on(threads, 20)
    begun = syncer.status()["config"]
    assert (begun["merge"], begun["outer_lr"], begun["sync_every"], begun["fragments"]) == ("rda", 0.6, 6, 3)
    syncer.kill()
    syncer._options = ("--outer-momentum", "0.1", "--quorum", "2")  # as if the rest had been defaults
    syncer.again()
    assert "settings changed: quorum 50% -> 2, outer_momentum 0.4 -> 0.1" in syncer.output()
    wanted = {**begun, "outer_momentum": 0.1, "quorum": "2"}
    assert syncer.status()["config"] == wanted
    versions = sum(syncer.status()["versions"])
    syncer.wait_for(lambda s: s["committed"] and sum(s["versions"]) > versions + 6, "rounds go on")
    syncer.kill()
    syncer._options = ()
    syncer.again()  # what was changed is what the run has now
    assert syncer.status()["config"] == wanted and syncer.output().count("settings changed") == 1
    syncer.wait_for(lambda s: s["committed"], "rounds go on")
    finish(syncer, threads)


def test_what_came_from_a_snapshot_is_in_the_state_folder_soon(folder: Path) -> None:
    """Nobody is there to bring anything back: a second restart must find on disk what the first took from it."""
    places = ("--snapshots", str(folder / "snapshots"), "--snapshot-every", "1h")
    syncer = SyncerProcess(folder, *OPTIONS, *places, "--outer-momentum", "0.4")
    threads = learners(syncer)
    train_on(threads, 20)
    for thread in threads:
        thread.stop()
    before = syncer.wait_for(lambda s: s["active"] == 0 and not s["tokens_pending"], "everything is merged")
    assert syncer.stop() == 0  # with a last snapshot
    shutil.rmtree(folder / "state")
    syncer._options = (*places, "--outer-momentum", "0.1")
    syncer.again()
    assert syncer.status()["recovered_from"].startswith("snapshot")
    deadline = time.monotonic() + WAIT_S
    while len(read_committed(folder / "state").fragments) < 3 or "run" not in read_committed(folder / "state").rows:
        assert time.monotonic() < deadline, "what came from the snapshot was never written"
        time.sleep(0.1)
    syncer.kill()
    shutil.rmtree(folder / "snapshots")
    syncer._options = ()
    syncer.again()
    status = syncer.status()
    assert (status["run"], status["versions"]) == (before["run"], before["versions"])
    assert status["recovered_from"] == "slots" and status["config"]["outer_momentum"] == 0.1
    assert status["tokens_merged"] == before["tokens_merged"]
    assert syncer.stop() == 0


def test_what_was_handed_over_is_merged_in_its_own_codec_although_the_run_has_another_now(folder: Path) -> None:
    syncer = SyncerProcess(folder, *OPTIONS, "--quorum", "all")
    quick = TrainingThread(syncer.address, "quick", seed=0)
    slow = TrainingThread(syncer.address, "slow", seed=1, step_s=2.0)
    slow.wait_steps(1)
    quick.wait_steps(12)
    quick.stop()
    syncer.kill()
    waiting = list((folder / "state" / "handover").glob("*.held"))
    assert waiting, "the other one's next step is two seconds away, and nothing can have been merged before"
    syncer._options = ("--codec-up", "int8")
    syncer.again()
    assert syncer.status()["config"]["codec_up"] == "int8"
    finish(syncer, [slow, quick])
