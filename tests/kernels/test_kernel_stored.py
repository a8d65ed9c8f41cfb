"""Compiled kernels on disk: who finds them loads no numba; who cannot keep them compiles."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
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
    for damaged in (whole[:-1], whole.replace(b"code", b"c0de"), b"", b"\n\n"):
        path.write_bytes(damaged)
        assert disk.stored("one-key") is None
    path.write_bytes(whole)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    assert (disk.stored("one-key") is None) == (path.stat().st_uid != 0)  # of root anybody may take it


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
