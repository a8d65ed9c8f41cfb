"""What fails beside others is run again alone: the run passes if that passes, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "pytest_again.py"
FAILS_ONCE = """
from pathlib import Path

def test_of_a_busy_machine():
    before = Path(__file__).with_suffix(".seen")
    first = not before.exists()
    before.touch()
    assert not first
"""
FAILS_TWICE = "def test_of_a_defect():\n    assert False\n"
MANY = "import pytest\n\n@pytest.mark.parametrize('number', range({count}))\ndef test_of_many(number):\n    {body}\n"


def run(folder: Path, **files: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command, bare = [sys.executable, str(SCRIPT), "-q"], {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=bare, capture_output=True, text=True, timeout=120, check=False)


def listed(output: str, title: str) -> list[str]:
    """The tests under this line of the summary."""
    lines = iter(output.splitlines())
    for line in lines:
        if title in line:
            break
    found = []
    for line in lines:
        if not line.startswith("    "):
            break
        found.append(line.strip())
    return found


def test_a_test_that_passes_alone_does_not_fail_the_run_and_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, once=FAILS_ONCE, good="def test_good():\n    pass\n")
    assert done.returncode == 0
    assert listed(done.stdout, "failed beside others, passed alone") == ["test_once.py::test_of_a_busy_machine"]
    assert "FAILED TWICE" not in done.stdout


def test_a_test_that_fails_alone_too_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, once=FAILS_ONCE, twice=FAILS_TWICE)
    assert done.returncode == 1
    assert listed(done.stdout, "failed beside others, passed alone") == ["test_once.py::test_of_a_busy_machine"]
    assert listed(done.stdout, "FAILED TWICE") == ["test_twice.py::test_of_a_defect"]


def test_so_many_failures_are_not_repeated(tmp_path: Path) -> None:
    once = FAILS_ONCE.split("def test")[0] + MANY.format(count=11, body="assert False")
    done = run(tmp_path, many=once)
    assert done.returncode == 1
    assert "11 TESTS FAILED, more than the 10 that are repeated" in done.stdout
    assert "once more" not in done.stdout


@pytest.mark.parametrize("text, status", [("def test_good():\n    pass\n", 0), ("", 5)])
def test_a_run_without_failures_ends_as_pytest_does(tmp_path: Path, text: str, status: int) -> None:
    done = run(tmp_path, one=text)
    assert done.returncode == status and "====" * 10 not in done.stdout
