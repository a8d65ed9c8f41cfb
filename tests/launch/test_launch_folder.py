"""The run folder: one run each, and a clear word when it cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.errors import LaunchError
from atoll.launch.folder import create_run_folder, without_nan


def test_a_given_folder_is_made_with_its_subfolders(tmp_path: Path) -> None:
    folder = create_run_folder(str(tmp_path / "a" / "b"), name="decoupled")
    assert folder.path == (tmp_path / "a" / "b").resolve()
    assert folder.events.is_dir() and folder.logs.is_dir()
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_unharmed(tmp_path: Path) -> None:
    folder = create_run_folder(str(tmp_path / "run"), name="decoupled")
    folder.write_config({"learners": 2}, {"learners": 2})
    before = sorted(path.name for path in folder.path.iterdir())
    with pytest.raises(LaunchError, match=r"already holds a run.*another --out"):
        create_run_folder(str(tmp_path / "run"), name="decoupled")
    assert sorted(path.name for path in folder.path.iterdir()) == before


def test_a_folder_with_other_files_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "stdout.txt").touch()
    assert create_run_folder(str(tmp_path), name="decoupled").path == tmp_path


def test_default_folders_never_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [create_run_folder("", name="dp").path for _ in range(3)]
    assert len(set(paths)) == 3
    assert all(path.parent == tmp_path / "runs" and "-dp-" in path.name for path in paths)


def test_a_folder_that_cannot_be_written_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/no-run-here")):
        with pytest.raises(LaunchError, match=r"cannot be written.*--out"):
            create_run_folder(str(bad), name="decoupled")


def test_processes_are_listed_as_json(tmp_path: Path) -> None:
    folder = create_run_folder(str(tmp_path / "run"), name="run")
    folder.write_processes([{"role": "learner", "id": "learner-0", "pid": 7}])
    assert json.loads(folder.processes_file.read_text()) == [{"role": "learner", "id": "learner-0", "pid": 7}]


def test_not_a_number_becomes_null() -> None:
    value = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": 2}, 3: None}
    assert without_nan(value) == {"a": None, "b": [None, 1.5], "c": {"d": 2}, "3": None}
