"""Every failpoint, ten times each, with a real SIGKILL: what is found is exactly before or after, never in between.

The children of one failpoint follow each other on the same folder, as a syncer that is restarted does. After each kill
this process reads the folder and compares it, bit for bit, with what the journal says was promised.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_child import handed
from safetensors.numpy import load_file
from store_helpers import arrays_of, assert_fragment, follow, rows_at, versions_of

from atoll.instruments.chaos import failpoints
from atoll.store import SnapshotTarget, read_state
from atoll.store.handover import Handover

KILLS = 10
ONCE = ("epoch.", "claims.")
"""Points that a child passes once, when it opens the store; the second pass would never come."""
FEW = ("slot.create", "slot.allocate", "slot.rename", "slot.folder.sync", "slot.older", "tape.", "snapshot.", "export.")
"""Points that a child passes at least twice; all others at least five times."""


@pytest.fixture(scope="module")
def zygote() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(Path(__file__).with_name("crash_child.py"))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where possible. A SIGKILL does not touch what the kernel was given, so syncs to a disk would only cost
    time here; what they are for is tested in test_store_power."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def run_child(zygote: subprocess.Popen[str], folder: Path, plan: str) -> bool:
    """True if the child was killed, False if it came to its end without meeting the point."""
    assert zygote.stdin is not None and zygote.stdout is not None
    zygote.stdin.write(f"{folder} {plan}\n")
    zygote.stdin.flush()
    status = int(zygote.stdout.readline())
    assert status in (0, signal.SIGKILL), f"the child failed with status {status}"
    return status == signal.SIGKILL


class Promises:
    """What the journal says: the last thing begun and the last thing finished, of each kind."""

    def __init__(self, journal: Path) -> None:
        self.last: dict[tuple[str, ...], list[int]] = {}
        for line in journal.read_text().splitlines() if journal.exists() else []:
            word, *numbers = line.split()
            per_fragment = word in ("commit", "committed", "loaded")
            key = (word, numbers.pop(0)) if per_fragment else (word,)
            self.last[key] = [int(number) for number in numbers]

    def number(self, *key: str, default: int = -1) -> int:
        return self.last.get(key, [default])[0]


def check(folder: Path, torn_is_told: bool) -> None:
    promises = Promises(folder / "journal")
    state = folder / "state"
    if not (state / "tape").is_dir():
        return  # killed while the folder was being made
    loaded = follow(read_state(state))
    for fragment in range(2):
        done, begun = (promises.number(word, str(fragment)) for word in ("committed", "commit"))
        done = max(done, promises.number("loaded", str(fragment)))  # what was found once does not go away again
        found = loaded.fragments.get(fragment)
        assert (found.version if found is not None else -1) in {done, begun}
        if found is not None:
            assert_fragment(found, fragment, found.version)
    count = loaded.rows.get("count", 0)
    assert promises.number("synced", default=0) <= count <= promises.number("remember", default=0)
    assert loaded.rows == (rows_at(count) if count else {})
    assert torn_is_told or loaded.problems == []
    check_handover(folder, promises)
    check_snapshots(folder, promises)


def check_handover(folder: Path, promises: Promises) -> None:
    found, problems = Handover(folder / "state" / "handover").load()
    done, begun = promises.number("handed"), promises.number("hand")
    assert problems == [] and (done < 0 or f"c{done}" in found)
    for name, (about, payload) in found.items():
        assert name == f"c{about['n']}" and about["n"] <= begun and payload.tobytes() == handed(about["n"]).tobytes()


def check_snapshots(folder: Path, promises: Promises) -> None:
    newest, problems = SnapshotTarget(str(folder / "snapshots")).load_newest()
    finished, begun = promises.number("finished"), promises.number("snapshot")
    assert (newest.label if newest is not None else -1) in {finished, begun}
    assert all("never finished" in problem for problem in problems)
    if newest is not None and newest.label == begun:
        label, *versions, count = promises.last[("snapshot",)]
        assert versions_of(newest) == dict(enumerate(versions)) and newest.rows == rows_at(count) and label == begun
    model = folder / "model.safetensors"
    if model.exists():
        tensors = load_file(model)
        known = [promises.last.get((word,)) for word in ("exported", "export")]
        expected = [[arrays_of(f, v)["theta"] for f, v in enumerate(versions)] for versions in known if versions]
        found = [tensors["w"].reshape(-1).tobytes(), tensors["b"].tobytes()]
        assert any(sorted(found) == sorted(theta.tobytes() for theta in thetas) for thetas in expected)


MOVES = ("move.", "drop.slots")
"""Of fragments between shards: tests/fabric has those."""


@pytest.mark.parametrize("point", [name for name in failpoints.FAILPOINTS if not name.startswith(MOVES)])
def test_a_kill_leaves_exactly_before_or_after(zygote: subprocess.Popen[str], folder: Path, point: str) -> None:
    spread = 1 if point.startswith(ONCE) else 2 if point.startswith(FEW) else 5
    kills = 0
    for attempt in range(3 * KILLS):
        kills += run_child(zygote, folder, f"{point}:{1 + attempt % spread}")
        check(folder, torn_is_told=point.endswith("mid"))
        if kills == KILLS:
            break
    assert kills == KILLS, f"{point} was met only {kills} times"
    assert not run_child(zygote, folder, f"{point}:1000000")  # and then a child that lives
    check(folder, torn_is_told=False)
    promises = Promises(folder / "journal")
    assert versions_of(follow(read_state(folder / "state"))) == {
        f: promises.number("committed", str(f)) for f in range(2)
    }
    assert not list((folder / "state").rglob("*.tmp"))
    assert len(list((folder / "state").glob("epoch-*"))) == 1
