"""Several JAX processes as one learner, through the real wire: each has its addressable parts of every array."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import WAIT_S, SyncerThread, spawn
from ports import quiet_port

pytest.importorskip("optax", reason="pip install 'atoll[jax]'")

from atoll.core import SyncConfig
from atoll.observe import events, read_events

SOURCE = (Path(__file__).parent / "two_processes.py").read_text()


def island(address: str, steps: int, *, size: int = 2, devices: int = 2, kind: str = "train", folder: str = "") -> Any:
    port = str(quiet_port())
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    env |= {"ATOLL_LEARNER": "island"}
    rows = [(address, str(rank), str(size), port, str(steps), folder, kind) for rank in range(size)]
    return [spawn(SOURCE, *row, env=env) for row in rows]


def ended(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    told = []
    for process in processes:
        out, _ = process.communicate(timeout=2 * WAIT_S)
        assert process.returncode == 0, out[-3000:]
        told.append(next(json.loads(line) for line in out.splitlines() if line.startswith("{")))
    return told


def config(**changes: Any) -> SyncConfig:
    return SyncConfig.from_dict({"sync_every": 4, "fragments": 2, "learners_expected": 1, **changes})


def test_an_island_of_jax_processes_contributes_the_same_bits_as_one_process() -> None:
    found = {}
    for size, devices in ((1, 1), (2, 1), (2, 2)):
        synchronous = {"overlap": 0, "quorum": "all", "grace_cap_steps": 0}
        syncer = SyncerThread(config(**synchronous, codec_up="int4", codec_down="int4"))
        told = ended(island(syncer.address, 12, size=size, devices=devices, kind="moved"))
        assert [(one["size"], one["rank"], one["step"]) for one in told] == [(size, rank, 12) for rank in range(size)]
        ledger = syncer.check_ledger()
        assert ledger["tokens_processed"] == ledger["tokens_merged"] == 12 * 8 * size, "every process says what it read"
        found[size, devices] = syncer.ask(lambda shell: [(f.version, f.checksum) for f in shell.state.fragments])
        syncer.stop()
    assert found[2, 1] == found[1, 1] and found[2, 2] == found[1, 1]


def test_processes_publish_one_model_and_a_restarted_island_continues_from_its_own_state(tmp_path: Path) -> None:
    syncer = SyncerThread(config())
    first = ended(island(syncer.address, 30, folder=str(tmp_path)))
    assert first[0]["versions"] == first[1]["versions"] and min(first[0]["versions"]) >= 1
    parts = [dict(one["here"]["rows"]) for one in first]
    assert len(parts[0]) == len(parts[1]) == 2 and not parts[0].keys() & parts[1].keys(), "each has rows of its own"
    assert first[0]["here"]["whole"] == first[1]["here"]["whole"]
    second = ended(island(syncer.address, first[0]["step"] + 4, folder=str(tmp_path)))
    assert [one["generation"] for one in second] == [2, 2]
    recovered = [one for _, _, one in read_events(tmp_path) if isinstance(one, events.LearnerRecovered)]
    assert [one.rung for one in recovered] == ["fresh", "checkpoint"]
    assert second[0]["began"] == second[1]["began"] == first[0]["ended"] != second[0]["ended"]
    before = second
    for size, devices in ((1, 1), (4, 1)):  # parts of another mesh are put together
        others = island(syncer.address, before[0]["step"] + 4, size=size, devices=devices, folder=str(tmp_path))
        before, last = ended(others), before
        assert before[0]["size"] == size and before[0]["began"] == last[0]["ended"]
    recovered = [one for _, _, one in read_events(tmp_path) if isinstance(one, events.LearnerRecovered)]
    assert [one.rung for one in recovered] == ["fresh"] + ["checkpoint"] * 3
    syncer.check_ledger()
    syncer.stop()


def test_a_process_that_dies_ends_the_others_of_its_island_at_once(tmp_path: Path) -> None:
    syncer = SyncerThread(config())
    ranks = island(syncer.address, 100_000)
    syncer.wait_for(lambda shell: shell.machine.committed, "the island has joined")
    time.sleep(1.0)  # it steps, or is about to
    os.kill(ranks[1].pid, signal.SIGKILL)
    killed_s = time.monotonic()
    out, _ = ranks[0].communicate(timeout=WAIT_S)
    assert ranks[0].returncode != 0 and time.monotonic() - killed_s < WAIT_S / 2, "JAX's own patience is 100 s"
    said = (
        "rank 1 of this learner has ended",
        "cannot go on together",
        "Gloo all",
    )  # the last is JAX's, if it is first
    assert any(words in out for words in said), out[-2000:]
    syncer.check_ledger()
    syncer.stop()


@pytest.mark.parametrize(
    ("kind", "who", "said"),
    [
        ("raises", 1, "ValueError: a defect of the script"),
        ("idle", 0, "has not come for 5 s"),
        ("absent", 0, "the 2 processes of this learner did not meet (one has not come for 5 s)"),
    ],
)
def test_a_process_that_goes_wrong_alone_ends_them_all_although_jax_has_each_wait_for_the_others(
    kind: str, who: int, said: str
) -> None:
    syncer = SyncerThread(config())
    ranks = island(syncer.address, 100_000, devices=1, kind=kind)
    began_s = time.monotonic()
    told = [rank.communicate(timeout=2 * WAIT_S)[0] for rank in ranks]
    assert said in told[who] and all(rank.returncode != 0 for rank in ranks), told
    assert time.monotonic() - began_s < 2 * WAIT_S, "JAX's own patience is 300 s"
    syncer.stop()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("alone", "leaf 'whole' is on 1 of 2 processes"),
        ("differ", "the ranks of this learner differ in their model"),
        ("recut", "leaf 'rows' was"),
    ],
)
def test_what_cannot_be_an_island_is_refused_by_name_in_every_process(kind: str, said: str) -> None:
    syncer = SyncerThread(config())
    ranks = island(syncer.address, 8, devices=1, kind=kind)
    for rank in ranks:
        out, _ = rank.communicate(timeout=WAIT_S)
        assert rank.returncode != 0 and said in out, out[-2000:]
    syncer.stop()


STRAY = """
import os, signal, sys, time
import atoll.jax
atoll.jax.initialize()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(5)
print("lived on")
"""


def test_a_process_that_has_not_joined_yet_ends_at_a_sigterm(tmp_path: Path) -> None:
    (tmp_path / "stray.py").write_text(STRAY)
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(quiet_port())]
    done = subprocess.run([*argv, str(tmp_path / "stray.py")], capture_output=True, text=True, timeout=2 * WAIT_S)
    assert done.returncode != 0 and "lived on" not in done.stdout, "JAX hears SIGTERM itself and goes on"
    assert "SIGTERM" in done.stderr
