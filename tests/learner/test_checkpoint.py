"""A learner's checkpoint file under kills, full disks and rot; and the thread that writes it."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import LocalProtocolError
from atoll.learner import checkpoint
from atoll.learner.checkpoint import CheckpointFile, CheckpointWriter, WriteStats
from atoll.learner.inner import Captured, InnerAbout, pack, size_of

PATIENCE_S = 30.0


def make(step: int, *, size: int = 1000, run: str = "r", learner: str = "l0") -> Captured:
    """A capture all of whose numbers are its step."""
    about = InnerAbout(learner=learner, run=run, generation=1, step=step, bases=(step,), tokens=step * 10)
    extras = {"x": {"dict": [["a", {"tensor": "a"}], ["b", {"tensor": "b"}]]}}
    tensors = {"a": torch.full((size,), float(step)), "b": torch.full((3, 5), step, dtype=torch.int64)}
    return Captured(tensors, {"optimizer": None, "extras": extras, "rng": None}, about)


def check_whole(captured: Captured | None, step: int | None = None) -> int:
    """Everything in it is of one step; gives that step."""
    assert captured is not None
    assert all(bool((tensor == captured.about.step).all()) for tensor in captured.tensors.values())
    assert step is None or captured.about.step == step
    return captured.about.step


def names(file: CheckpointFile) -> list[str]:
    return sorted(entry.name for entry in file.folder.iterdir())


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# ---------------------------------------------------------------- the file


def test_the_newest_comes_back_and_two_are_kept(tmp_path: Path) -> None:
    file = CheckpointFile(tmp_path, "l0")
    assert file.load() == (None, [])
    for step in range(5):
        captured = make(step)
        stats = file.write(captured)
        assert stats.file.read_bytes() == bytes(pack(captured))
        assert stats.bytes == size_of(captured) and stats.write_ns >= stats.sync_ns > 0
        assert len(names(file)) == min(2, step + 1)
        loaded, problems = CheckpointFile(tmp_path, "l0").load(run="r")
        check_whole(loaded, step)
        assert problems == [] and loaded is not None and loaded.about == captured.about
    file.remove()
    assert not file.folder.exists() and file.load() == (None, [])
    file.remove()


def test_a_sequence_goes_on_after_a_restart_whatever_the_steps(tmp_path: Path) -> None:
    for step in (100, 50, 75):
        CheckpointFile(tmp_path, "l0").write(make(step))
        check_whole(CheckpointFile(tmp_path, "l0").load()[0], step)


def test_what_was_loaded_is_memory_of_its_own(tmp_path: Path) -> None:
    file = CheckpointFile(tmp_path, "l0")
    file.write(make(1))
    loaded, _ = file.load()
    assert loaded is not None
    loaded.tensors["a"].zero_()
    check_whole(file.load()[0], 1)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(max_size=150), min_size=2, max_size=5, unique=True))
def test_any_id_gets_a_folder_of_its_own(learners: list[str]) -> None:
    files = [CheckpointFile(Path("run"), learner) for learner in learners]
    assert len({file.folder for file in files}) == len(learners)
    for file in files:
        assert file.folder.parent == Path("run/learners") and ".." not in file.folder.parts
        assert 0 < len(file.folder.name.encode()) < 200 and not file.folder.name.startswith(".")


def test_odd_ids_are_written_and_read(tmp_path: Path) -> None:
    odd = ["", ".", "..", "a/b", "a_b", "../../x", "é", "x" * 300, "y\x00z", "\ud800"]
    for i, learner in enumerate(odd):
        CheckpointFile(tmp_path, learner).write(make(i, learner=learner))
    for i, learner in enumerate(odd):
        check_whole(CheckpointFile(tmp_path, learner).load()[0], i)
    assert len(list((tmp_path / "learners").iterdir())) == len(odd) and len(list(tmp_path.iterdir())) == 1


def test_another_run_or_learner_is_named_and_not_loaded(tmp_path: Path) -> None:
    file = CheckpointFile(tmp_path, "l0")
    file.write(make(1, run="old"))
    loaded, problems = file.load(run="new")
    assert loaded is None and len(problems) == 1 and "'old'" in problems[0] and "'new'" in problems[0]
    check_whole(file.load(run=None)[0], 1)
    file.write(make(2, learner="somebody else"))
    loaded, problems = file.load(run="old")
    check_whole(loaded, 1)
    assert len(problems) == 1 and "somebody else" in problems[0]


# ---------------------------------------------------------------- rot


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


@pytest.mark.parametrize("place", [0, 5, 20, 400, 1000, -1])
def test_one_flipped_bit_anywhere_is_noticed_and_the_one_before_is_used(tmp_path: Path, place: int) -> None:
    file = CheckpointFile(tmp_path, "l0")
    file.write(make(1))
    newest = file.write(make(2)).file
    flip(newest, place)
    loaded, problems = file.load()
    check_whole(loaded, 1)
    assert len(problems) == 1 and newest.name in problems[0] and "damaged" in problems[0]
    flip(file.folder / names(file)[0], place)
    loaded, problems = file.load()
    assert loaded is None and len(problems) == 2
    file.write(make(3))
    check_whole(file.load()[0], 3)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, -1])
def test_a_truncated_or_grown_file_is_noticed(tmp_path: Path, keep: int) -> None:
    file = CheckpointFile(tmp_path, "l0")
    file.write(make(1))
    newest = file.write(make(2)).file
    raw = newest.read_bytes()
    for changed in (raw[:keep], raw + b"\0"):
        newest.write_bytes(changed)
        loaded, problems = file.load()
        check_whole(loaded, 1)
        assert len(problems) == 1


def test_a_file_with_a_right_checksum_but_wrong_content_is_refused(tmp_path: Path) -> None:
    file = CheckpointFile(tmp_path, "l0")
    file.write(make(1))
    for i, raw in enumerate((b"", b"gASVAAAAAAAAAACMBXBvc2l4", b"\x02" + b"\0" * 7 + b"{}")):
        digest = checkpoint.xxhash.xxh3_64_hexdigest(raw)
        (file.folder / f"inner-{50 + i:08d}-{digest}.safetensors").write_bytes(raw)
    loaded, problems = file.load()
    check_whole(loaded, 1)
    assert len(problems) == 3 and all("no inner state" in problem for problem in problems)


def test_what_cannot_be_read_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    file = CheckpointFile(tmp_path, "l0")
    file.write(make(1))
    (file.folder / f"inner-00000009-{'0' * 16}.safetensors").mkdir()
    loaded, problems = file.load()
    check_whole(loaded, 1)
    assert len(problems) == 1 and "inner-00000009" in problems[0]


# ---------------------------------------------------------------- kills and full disks

CHILD = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoint import CheckpointFile, make

def say(text):  # a line in one write: print without a buffer makes two, and the kill may fall between them
    os.write(1, f"{text}\\n".encode())

# One process that has imported everything forks a writer whenever it is told to: 20 imports of torch take a minute.
say("ready")
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        say(f"pid {os.getpid()}")
        file, first = CheckpointFile(Path(sys.argv[1]), "l0"), int(line)
        for step in range(first + 1, first + 1000):
            file.write(make(step, size=1_000_000))
            say(step)
        os._exit(0)
    os.waitpid(pid, 0)
    say("dead")
"""


def test_kill_nine_in_the_middle_of_a_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    randomly = random.Random(7)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert child.stdin is not None and child.stdout is not None
    file, step, half_written = CheckpointFile(tmp_path, "l0"), 0, 0
    try:
        assert child.stdout.readline() == "ready\n"
        for _ in range(20):
            child.stdin.write(f"{step}\n")
            child.stdin.flush()
            pid = int(child.stdout.readline().split()[1])
            written = step + 1
            assert child.stdout.readline() == f"{written}\n"
            time.sleep(randomly.uniform(0, 0.03))
            os.kill(pid, signal.SIGKILL)
            while (line := child.stdout.readline()) != "dead\n":
                written = int(line)
            half_written += any(name.startswith("writing-") for name in names(file))
            loaded, problems = file.load(run="r")
            assert problems == [] and check_whole(loaded) in (written, written + 1)
            step = check_whole(loaded)
        assert half_written > 0, "no kill fell into a write: the test is not testing"
        file.write(make(500))
        assert len(names(file)) == 2 and all(name.startswith("inner-") for name in names(file))
    finally:
        child.stdin.close()
        child.wait(PATIENCE_S)
        child.stdout.close()


@pytest.fixture
def small_files_only() -> Iterator[Callable[[int], None]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_for_the_file(tmp_path: Path, small_files_only: Callable[[int], None]) -> None:
    file = CheckpointFile(tmp_path, "l0")
    file.write(make(1))
    small_files_only(100_000)
    for _ in range(3):
        with pytest.raises(OSError) as caught:
            file.write(make(2, size=100_000))
        assert caught.value.errno == errno.EFBIG
        assert len(names(file)) == 1
    check_whole(file.load()[0], 1)
    small_files_only(10_000_000)
    file.write(make(2, size=100_000))
    check_whole(file.load()[0], 2)


class FailingDisk:
    """Stands in for one function of os. It fails at its n-th call, and later ones; 0 is a healthy disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.calls, self.fail_at, self.code = 0, 0, errno.ENOSPC
        self._real = getattr(os, name)
        monkeypatch.setattr(checkpoint.os, name, self)

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.fail_at and self.calls >= self.fail_at:
            raise OSError(self.code, os.strerror(self.code))
        return self._real(*args)


@pytest.mark.parametrize(
    ("name", "fail_at", "left"),
    [("write", 1, 1), ("write", 2, 1), ("write", 3, 1), ("fsync", 1, 1), ("rename", 1, 1), ("fsync", 2, 2)],
)
def test_a_failure_at_any_point_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fail_at: int, left: int
) -> None:
    """The one before, or, once it has its name, the new one."""
    file = CheckpointFile(tmp_path, "l0")
    file.write(make(1))
    disk = FailingDisk(monkeypatch, name)
    disk.fail_at, disk.code = fail_at, errno.EIO
    with pytest.raises(OSError) as caught:
        file.write(make(2))
    assert caught.value.errno == errno.EIO
    assert not any(entry.startswith("writing-") for entry in names(file))
    check_whole(file.load()[0], left)
    disk.fail_at = 0
    file.write(make(3))
    check_whole(file.load()[0], 3)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(checkpoint.os, "write", lambda handle, data: real(handle, data[:1000]))
    file = CheckpointFile(tmp_path, "l0")
    file.write(make(4, size=5000))
    loaded, problems = file.load()
    assert problems == [] and check_whole(loaded, 4) == 4


def test_stale_temporaries_go_but_not_one_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = CheckpointFile(tmp_path, "l0")
    file.write(make(1))
    stale, used = file.folder / "writing-1-aa", file.folder / "writing-2-bb"
    stale.write_bytes(b"half a checkpoint")
    with used.open("wb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        file.write(make(2))
        assert not stale.exists() and used.exists()
    file.write(make(3))
    assert not used.exists()

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "no locks on this file system")

    monkeypatch.setattr(checkpoint.fcntl, "flock", no_locks)
    for path in (stale, used):
        path.write_bytes(b"")
    os.utime(stale, (0, 0))
    file.write(make(4))
    assert not stale.exists() and used.exists()
    check_whole(file.load()[0], 4)


# ---------------------------------------------------------------- the thread


class SlowFile(CheckpointFile):
    """Writes only when it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "l0")
        self.steps: list[int] = []
        self.started = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def write(self, captured: Captured) -> WriteStats:
        self.started.release()
        assert self.go.acquire(timeout=PATIENCE_S)
        self.steps.append(captured.about.step)
        return super().write(captured)


def test_a_newer_capture_replaces_the_one_that_waits(tmp_path: Path) -> None:
    file, said, told = SlowFile(tmp_path), [], []
    writer = CheckpointWriter(file, said.append, written=lambda about, stats: told.append((about.step, stats.bytes)))
    writer.offer(make(1))
    assert file.started.acquire(timeout=PATIENCE_S) and writer.busy
    for step in (2, 3, 4):
        writer.offer(make(step))
    file.go.release(5)
    assert writer.close(PATIENCE_S) and not writer.busy
    assert file.steps == [1, 4] and said == []
    check_whole(file.load()[0], 4)
    assert told == [(step, size_of(make(step))) for step in (1, 4)]
    with pytest.raises(LocalProtocolError, match="closed"):
        writer.offer(make(5))


def test_at_most_two_captures_exist(tmp_path: Path) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def tracked(step: int) -> Captured:
        captured = make(step)
        alive.add(captured.tensors["a"])
        gc.collect()
        assert len(alive) <= 2
        return captured

    file = SlowFile(tmp_path)
    writer = CheckpointWriter(file, lambda text: None)
    for step in range(1, 6):
        spare = writer.spare()
        assert spare is None or spare.about.step in (step - 1, step - 2)
        del spare  # a capture would be taken into its memory; this one takes memory of its own instead
        writer.offer(tracked(step))
        if step == 1:
            assert file.started.acquire(timeout=PATIENCE_S)
    file.go.release(9)
    eventually(lambda: not writer.busy)
    spare = writer.spare()
    assert spare is not None and spare.about.step == 5 and file.steps == [1, 5]
    assert writer.spare() is None
    assert writer.close(PATIENCE_S)


def test_close_has_a_bound_and_finishes_the_last(tmp_path: Path) -> None:
    file = SlowFile(tmp_path)
    writer = CheckpointWriter(file, lambda text: None)
    writer.offer(make(1))
    assert file.started.acquire(timeout=PATIENCE_S)
    writer.offer(make(2))
    assert not writer.close(0.01)
    file.go.release(2)
    assert writer.close(PATIENCE_S)
    check_whole(file.load()[0], 2)


def test_failures_are_said_once_and_so_is_the_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FailingDisk(monkeypatch, "write")
    said: list[str] = []
    file = CheckpointFile(tmp_path, "l0")
    writer = CheckpointWriter(file, said.append)

    def write(step: int) -> None:
        writer.offer(make(step))
        eventually(lambda: not writer.busy)

    write(1)
    assert said == []
    disk.fail_at = 1
    for step in (2, 3, 4):
        write(step)
    assert len(said) == 1 and "step 2" in said[0] and "No space left" in said[0] and str(file.folder) in said[0]
    disk.code = errno.EIO
    for step in (5, 6):
        write(step)
    assert len(said) == 2 and "step 5" in said[1]
    disk.fail_at = 0
    for step in (7, 8):
        write(step)
    assert len(said) == 3 and "again" in said[2] and "step 7" in said[2]
    assert writer.close(PATIENCE_S)
    check_whole(file.load()[0], 8)
