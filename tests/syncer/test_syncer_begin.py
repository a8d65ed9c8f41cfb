"""Real syncers that lost their state, their machine, or the right to a snapshot location."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import WAIT_S, Proxy, SyncerProcess, TrainingThread, small_model

from atoll.store import SnapshotTarget

OPTIONS = ("--learners", "2", "--sync-every", "6", "--fragments", "3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def threads() -> Iterator[list[TrainingThread]]:
    started: list[TrainingThread] = []
    yield started
    for thread in started:
        thread.stopping.set()


def start(threads: list[TrainingThread], syncer: SyncerProcess, count: int = 2) -> None:
    threads += [TrainingThread(syncer.address, f"t{i}", seed=i) for i in range(count)]
    for thread in threads:
        thread.wait_steps(30)


def newcomer(syncer: SyncerProcess) -> TrainingThread:
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(100.0)
    return TrainingThread(syncer.address, "new", model=model)


def held(threads: list[TrainingThread]) -> list[int]:
    """The newest version of each fragment that somebody holds."""
    machines = [thread.learner._machine for thread in threads]
    return [max(versions) for versions in zip(*([p.newest for p in m.fragments] for m in machines), strict=True)]


def refused(folder: Path, *options: str, **environment: str) -> tuple[int, str]:
    """`atoll syncer`, which is to end by itself: its status and what it said."""
    command = [sys.executable, "-m", "atoll", "syncer", "--listen", "127.0.0.1:0", "--run-folder", str(folder)]
    done = subprocess.run(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "COLUMNS": "1000", **environment},
    )
    return done.returncode, done.stdout


def warnings_of(folder: Path) -> str:
    lines = [line for path in (folder / "events").glob("syncer-*.jsonl") for line in path.read_text().splitlines()]
    return "\n".join(line for line in lines if '"warned"' in line)


def test_a_lost_state_folder_comes_back_from_learners_although_a_newcomer_is_first(
    folder: Path, threads: list[TrainingThread]
) -> None:
    syncer = SyncerProcess(folder, *OPTIONS)
    start(threads, syncer)
    run = syncer.status()["run"]
    syncer.kill()
    newest = held(threads)
    shutil.rmtree(folder / "state")
    threads.append(newcomer(syncer))
    syncer.again()
    status = syncer.wait_for(lambda s: s["committed"] and s["active"] == 3, "everybody is in the run")
    assert status["run"] == run and status["recovered_from"] == "learners"
    assert all(now >= before for now, before in zip(status["versions"], newest, strict=True))
    threads[2].wait_steps(12)
    assert max(float(p.detach().abs().max()) for p in threads[2].model.parameters()) < 50.0
    syncer.kill()
    syncer.again()  # and there is a state again
    status = syncer.wait_for(lambda s: s["committed"] and s["active"] == 3, "the run goes on")
    assert status["run"] == run and status["recovered_from"] == "slots"
    for thread in threads:
        thread.stop()
        assert thread.error is None, thread.error
    assert syncer.stop() == 0


def test_a_lost_run_folder_comes_back_from_learners_although_a_newcomer_is_first(
    folder: Path, threads: list[TrainingThread]
) -> None:
    """Nothing on the disk tells of the run any more; those who hold it say so."""
    (folder / "run").mkdir()
    syncer = SyncerProcess(folder / "run", *OPTIONS)
    link = Proxy(syncer.address)
    threads += [TrainingThread(link.address, f"t{i}", seed=i) for i in range(2)]
    for thread in threads:
        thread.wait_steps(30)
    run = syncer.status()["run"]
    syncer.kill()
    link.cut()
    newest = held(threads)
    shutil.rmtree(folder / "run")
    (folder / "run").mkdir()
    threads.append(newcomer(syncer))
    syncer.again()
    status = syncer.wait_for(lambda s: bool(s["waits"]), "the newcomer is told to wait")
    assert not status["committed"] and "no state in" in status["waits"]
    link.mend()
    status = syncer.wait_for(lambda s: s["committed"] and s["active"] == 3, "everybody is in the run")
    assert status["run"] == run and status["recovered_from"] == "learners"
    assert all(now >= before for now, before in zip(status["versions"], newest, strict=True))


def test_a_run_that_had_versions_begins_with_a_newcomer_only_by_the_operators_word(
    folder: Path, threads: list[TrainingThread]
) -> None:
    syncer = SyncerProcess(folder, *OPTIONS)
    start(threads, syncer, 1)
    run = syncer.status()["run"]
    threads[0].stop()
    syncer.kill()
    shutil.rmtree(folder / "state")
    syncer.again()
    threads[:] = [newcomer(syncer)]
    status = syncer.wait_for(lambda s: bool(s["waits"]), "the newcomer is told to wait")
    assert not status["committed"] and "--new-run" in status["waits"]
    syncer.kill()
    assert "had versions" in syncer.output() and "--new-run" in syncer.output()
    syncer.again("--new-run")
    status = syncer.wait_for(lambda s: s["committed"] and s["active"] == 1, "a new run begins")
    assert status["run"] != run
    threads[0].stop()
    assert syncer.stop() == 0


def test_an_empty_snapshot_location_is_named_and_with_must_continue_an_error(folder: Path) -> None:
    url = str(folder / "mistyped")
    syncer = SyncerProcess(folder, *OPTIONS, "--snapshots", url)
    told = f"no snapshot found at {url}; this begins a new run"
    assert told in syncer.output()
    learner = newcomer(syncer)
    syncer.wait_for(lambda s: bool(s["committed"]), "a new run begins")
    learner.stop()
    assert syncer.stop() == 0
    assert syncer.output().count("no snapshot found") == 1, "the wait for learners does not say it again"
    assert told in warnings_of(folder)
    (folder / "launched").mkdir()
    launched = SyncerProcess(folder / "launched", *OPTIONS, "--snapshots", f"{url}-too", "--first-start")
    assert launched.stop() == 0  # it can be nothing but a new run: that is said, and is no warning
    assert "a new run begins" in launched.output() and warnings_of(folder / "launched") == ""
    code, said = refused(folder / "other", *OPTIONS, "--snapshots", f"{url}-again", "--must-continue")
    assert code != 0 and f"no snapshot found at {url}-again, and --must-continue was given" in said, said
    assert "Traceback" not in said and len(said.strip().splitlines()) == 1
    assert refused(folder / "other", "--must-continue")[0] != 0
    assert "give one of them" in refused(folder / "other", "--must-continue", "--new-run")[1]


def test_a_location_that_cannot_be_reached_is_not_called_empty(folder: Path) -> None:
    pytest.importorskip("s3fs", reason="pip install 'atoll[s3]'")
    options = {"key": "a", "secret": "b", "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1}}
    code, said = refused(
        folder,
        *("--snapshots", "s3://bucket/run"),
        ATOLL_SNAPSHOT_OPTIONS=json.dumps(options),
        AWS_ENDPOINT_URL="http://127.0.0.1:9",
        AWS_MAX_ATTEMPTS="1",
        AWS_CONFIG_FILE=str(folder / "none"),
    )
    assert code != 0 and "the snapshots at s3://bucket/run cannot be reached" in said, said
    assert "no snapshot found" not in said and "Traceback" not in said


def move(syncer: SyncerProcess, folder: Path, *options: str) -> SyncerProcess:
    """The same command on another machine, at the same address."""
    folder.mkdir()
    syncer.folder = folder
    syncer.again(*options)
    return syncer


def test_a_lost_host_comes_back_from_snapshots_and_the_old_folder_is_not_taken_for_the_run(
    folder: Path, threads: list[TrainingThread]
) -> None:
    snapshots = ("--snapshots", str(folder / "snapshots"), "--snapshot-every", "1s", "--keep", "1")
    before = folder / "before"
    before.mkdir()
    syncer = SyncerProcess(before, *OPTIONS, *snapshots)
    start(threads, syncer)
    run = syncer.status()["run"]
    wait_until(syncer, lambda: finished(folder / "snapshots"))
    syncer.kill()
    newest = held(threads)
    move(syncer, folder / "after", "--must-continue")
    status = syncer.wait_for(lambda s: s["committed"] and s["active"] == 2, "the run goes on")
    assert status["run"] == run and status["epoch"] > 1
    assert all(now >= old for now, old in zip(status["versions"], newest, strict=True))
    wait_until(
        syncer, lambda: any(f"snapshot-{status['epoch']:02}" in str(path) for path in finished(folder / "snapshots"))
    )
    for thread in threads:
        thread.stop()
        assert thread.error is None, thread.error
    assert syncer.stop() == 0
    code, said = refused(before, *OPTIONS, *snapshots)
    assert code != 0 and "has gone on with this run" in said and "--take-over" in said, said


def finished(snapshots: Path) -> list[Path]:
    """A folder without a manifest is a snapshot in the making: a syncer that dies now leaves none."""
    return list(snapshots.glob("snapshot-*/manifest.json"))


def wait_until(syncer: SyncerProcess, condition: Any) -> None:
    syncer.wait_for(lambda status: bool(condition()), "a snapshot")


def test_a_second_syncer_on_one_snapshot_location_is_refused_and_with_take_over_ends_the_first(
    folder: Path, threads: list[TrainingThread]
) -> None:
    snapshots = ("--snapshots", str(folder / "snapshots"), "--snapshot-every", "1s", "--keep", "2")
    for name in ("first", "second"):
        (folder / name).mkdir()
    first = SyncerProcess(folder / "first", *OPTIONS, *snapshots)
    start(threads, first)
    target = SnapshotTarget(str(folder / "snapshots"))
    wait_until(first, lambda: len(finished(folder / "snapshots")) >= 2)
    code, said = refused(folder / "second", *OPTIONS, *snapshots)
    assert code not in (0, 3) and "is using the snapshots at" in said and "--take-over" in said, said
    before = first.status()
    second = SyncerProcess(folder / "second", *OPTIONS, *snapshots, "--take-over")
    assert first.wait_dead() == 3, first.output()
    assert "a newer syncer" in first.output() and "has taken over the snapshots" in first.output()
    assert not (folder / "first" / "model.safetensors").exists()
    status = second.status()
    assert status["run"] == before["run"] and status["epoch"] > before["epoch"]
    loaded, _ = target.load_newest()
    assert loaded is not None, "nothing that the run needs was deleted"
    assert second.stop() == 0


def test_who_cannot_serve_takes_nobodys_place(folder: Path) -> None:
    url = folder / "snapshots"
    first = SyncerProcess(folder, *OPTIONS, "--snapshots", str(url))
    none = str(folder / "none")
    reasons = {
        "would let the network reach": ("--listen", "0.0.0.0:0"),
        "is in use by another process": ("--listen", first.address),
        "none": ("--tls-certificate", none, "--tls-key", none),
        "atoll keys": ("--keys", none, "--tls-certificate", none, "--tls-key", none),
    }
    held = (sorted(url.glob("claim-*.json")), (folder / "state" / "epoch.json").read_text())
    for number, (why, options) in enumerate(reasons.items()):
        place = folder if number % 2 else folder / "second"  # what both share: the run folder, or the snapshots alone
        code, said = refused(place, *OPTIONS, "--snapshots", str(url), "--take-over", *options)
        assert code not in (0, 3) and why in said and "Traceback" not in said, said
        assert (sorted(url.glob("claim-*.json")), (folder / "state" / "epoch.json").read_text()) == held, why
    assert first.stop() == 0


def test_who_fails_after_it_has_claimed_a_location_lets_it_go(folder: Path) -> None:
    url = folder / "snapshots"
    code, said = refused(folder, "--snapshots", str(url), "--learners", "2", "--quorum", "9")
    assert code not in (0, 3) and "Traceback" not in said, said
    (claim,) = url.glob("claim-*.json")
    assert json.loads(claim.read_text())["ended"], "the next syncer need not watch whether it lives"
