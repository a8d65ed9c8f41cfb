"""Run pytest beside others; what fails there is run once more, alone, and both outcomes are said.

    python scripts/pytest_again.py -q -n 3 --dist worksteal

A test that fails only while the machine is full says something about the test (a deadline, a wait for the wrong thing)
and is worth mending; it is no reason to refuse a change. So the run passes if all of them pass alone. It does not if
more than REPEATED_MAX fail: then something is broken, and repeating would hide how much.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

REPEATED_MAX = 10
"""Of five thousand tests a busy machine makes one or two fail; ten are a defect."""
FAILED = 1
"""pytest's exit status when tests failed; any other is about the run itself."""


def run(arguments: list[str], cache: Path) -> tuple[int, list[str]]:
    """pytest's exit status, and what failed."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    status = subprocess.run(command, check=False).returncode
    noted = cache / "v" / "cache" / "lastfailed"
    return status, sorted(json.loads(noted.read_text())) if noted.exists() else []


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        status, failed = run(arguments, Path(folder) / "beside")
        if status != FAILED or not failed:
            return status
        if len(failed) > REPEATED_MAX:
            say(f"{len(failed)} TESTS FAILED, more than the {REPEATED_MAX} that are repeated", failed)
            return status
        say(f"{len(failed)} TESTS FAILED BESIDE OTHERS; they run once more, alone", failed)
        again, still = run(["-q", *failed], Path(folder) / "alone")
    say("failed beside others, passed alone (mend them: they do not bear a busy machine)", sorted({*failed} - {*still}))
    say("FAILED TWICE", still)
    return again


def say(what: str, tests: list[str]) -> None:
    if tests:
        print("\n".join(["", "=" * 100, f"{what}:", *(f"    {test}" for test in tests), "=" * 100]), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
