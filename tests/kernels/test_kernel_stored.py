"""Compiled kernels on disk: who finds them loads no numba; who cannot keep them compiles."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import atoll
from atoll import kernels
from atoll.kernels import disk, stored
from atoll.kernels.signatures import SIGNATURES

ADD_ONES = """
import sys
import numpy as np
from atoll import kernels
target = np.zeros(3, np.float32)
kernels.decode(kernels.FP32, np.ones(3, np.float32).view(np.uint8), target, add=True)
assert target.tolist() == [1.0, 1.0, 1.0]
"""


def run(code: str, **environment: str) -> None:
    source = str(Path(atoll.__file__).parent.parent)
    own = os.environ | {"PYTHONPATH": source} | environment
    result = subprocess.run([sys.executable, "-c", code], check=False, env=own, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_process_that_finds_the_kernels_loads_no_numba() -> None:
    kernels.warm_up()  # stored now, if they were not
    assert kernels.are_stored()
    assert set(stored._kernels) >= {
        name for name in SIGNATURES if name not in ("expand", "times_columns", "times_rows")
    }
    run(f"{ADD_ONES}kernels.warm_up()\nassert 'numba' not in sys.modules")


def test_they_are_compiled_once_and_stored_where_numba_was_told_to(tmp_path: Path) -> None:
    none_beside = f"from atoll.kernels import disk\ndisk.__file__ = {str(tmp_path / 'disk.py')!r}\n"
    run(f"{none_beside}{ADD_ONES}assert 'numba' in sys.modules", NUMBA_CACHE_DIR=str(tmp_path))
    assert [path.name.partition("-")[0] for path in tmp_path.glob("*.kernel")] == ["decode"]
    run(f"{none_beside}{ADD_ONES}assert 'numba' not in sys.modules", NUMBA_CACHE_DIR=str(tmp_path))


def test_kernels_work_where_no_folder_can_hold_them(tmp_path: Path) -> None:
    """An installed package in a read-only folder, and a home that does not exist: only the next process is slow."""
    no_place = "from atoll.kernels import disk\nimport pathlib\ndisk._places = lambda: [pathlib.Path('/dev/null/x')]\n"
    run(f"{no_place}{ADD_ONES}assert 'numba' in sys.modules", HOME=str(tmp_path / "none"))


def test_a_damaged_or_foreign_file_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_places", lambda: [tmp_path])
    disk.writable.cache_clear()
    try:
        disk.write("one-key", "entry sqrtf", b"code\nwith lines")
    finally:
        disk.writable.cache_clear()
    assert disk.stored("one-key") == ("entry sqrtf", b"code\nwith lines")
    path = tmp_path / "one-key.kernel"
    whole = path.read_bytes()
    for damaged in (
        whole[:-1],
        whole.replace(b"code", b"c0de"),
        whole.replace(b"kernel 2", b"kernel 1"),
        b"",
        b"\n\n\n",
    ):
        path.write_bytes(damaged)
        assert disk.stored("one-key") is None
    path.write_bytes(whole)
    (tmp_path / "other-key.kernel").write_bytes(whole)
    assert disk.stored("other-key") is None  # of another kernel, or for another processor
    path.chmod(0o664)
    assert disk.stored("one-key") is None  # others may have written it
    path.chmod(0o644)
    assert disk.stored("one-key") is not None
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    assert (disk.stored("one-key") is None) == (path.stat().st_uid != 0)  # of root anybody may take it


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which everybody writes."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setattr(disk, "_places", lambda: [folder])
    disk.writable.cache_clear()
    yield folder
    disk.writable.cache_clear()


def test_links_that_another_user_has_laid_lead_nowhere(shared: Path, tmp_path: Path) -> None:
    """Neither are our files overwritten through them, nor is what they lead to executed."""
    mine = tmp_path / "mine"
    mine.write_text("do not touch")
    disk.write("one-key", "entry", b"code")
    (shared / "one-key.kernel").replace(tmp_path / "elsewhere")
    (shared / "one-key.kernel").symlink_to(tmp_path / "elsewhere")
    assert disk.stored("one-key") is None
    for name in (f"one-key.{os.getpid()}.tmp", "one-key.lock"):
        (shared / name).symlink_to(mine)
    with disk.alone("one-key"):
        disk.write("one-key", "entry", b"code")
    assert mine.read_text() == "do not touch"
    assert disk.stored("one-key") == ("entry", b"code") and (tmp_path / "elsewhere").exists()


def test_a_pipe_in_the_place_of_a_kernel_or_of_its_lock_holds_nobody_up(shared: Path) -> None:
    for name in ("one-key.kernel", "one-key.lock"):
        os.mkfifo(shared / name)
    assert disk.stored("one-key") is None
    with disk.alone("one-key"):
        disk.write("one-key", "entry", b"code")
    assert disk.stored("one-key") == ("entry", b"code")


def test_a_lock_that_others_may_hold_is_not_waited_for(shared: Path) -> None:
    (shared / "one-key.lock").touch()
    (shared / "one-key.lock").chmod(0o666)
    with (shared / "one-key.lock").open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with disk.alone("one-key"):
            pass
    (shared / "one-key.lock").unlink()
    with disk.alone("one-key"):
        assert (shared / "one-key.lock").stat().st_mode & 0o077 == 0  # nobody else can hold ours


def test_a_full_disk_keeps_nothing_and_the_kernels_work(tmp_path: Path) -> None:
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    none_beside = f"from atoll.kernels import disk\ndisk.__file__ = {str(tmp_path / 'disk.py')!r}\n"
    run(f"{full}{none_beside}{ADD_ONES}assert 'numba' in sys.modules", NUMBA_CACHE_DIR=str(tmp_path))
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_a_user_without_a_home_stores_them_elsewhere_or_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no such user")))
    assert [place.name for place in disk._places()] == ["__pycache__"]


def test_a_kernel_that_needs_what_is_not_there_is_not_loaded() -> None:
    assert stored.can_load("entry sqrtf")
    assert not stored.can_load("entry sqrtf numba_no_such_function")


def test_one_process_compiles_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "writable", lambda: tmp_path)
    order, inside = list[str](), threading.Event()

    def other() -> None:
        inside.wait()
        with disk.alone("one-key"):
            order.append("second")

    waiting = threading.Thread(target=other)
    waiting.start()
    with disk.alone("one-key"):
        inside.set()
        waiting.join(0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


def test_arrays_of_another_type_are_a_mistake_and_no_wrong_numbers() -> None:
    segments = kernels.cut_segments(np.array([0, 1], np.int64), 1)
    payload = np.zeros(1024, np.uint8)
    with pytest.raises(AssertionError):
        kernels.direction([kernels.FP32], [payload], np.zeros((1, 1), np.float32), segments)


def test_a_syncer_loads_neither_numba_nor_a_framework() -> None:
    """What it imports before it serves, with kernels that are there already."""
    kernels.warm_up()
    heavy = "{'numba', 'torch', 'jax', 'pydantic', 'fsspec'} & set(sys.modules)"
    imports = "import sys, atoll.app, atoll.syncer.serve\nfrom atoll import kernels\n"
    run(f"{imports}kernels.warm_up()\nassert not {heavy}, {heavy}")
