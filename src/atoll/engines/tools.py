"""Running an engine's own commands (sbatch, kubectl, ssh), and waiting."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence

from atoll.errors import LaunchError

TOOL_S_MAX = 120.0
"""A scheduler under load answers late; one that has not answered by then will not."""
POLL_S = 0.5
ERROR_CHARS_MAX = 2000


def run_tool(argv: Sequence[str], *, stdin: str = "", remedy: str, timeout_s: float = TOOL_S_MAX) -> str:
    """What the command printed. Raises LaunchError with what it said and the remedy if it fails. One that was asked to
    wait for others may take as long as those."""
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout_s)
    except FileNotFoundError:
        raise LaunchError(f"{argv[0]} is not installed on this machine; {remedy}") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{argv[0]} has not answered within {timeout_s:g} s; {remedy}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-ERROR_CHARS_MAX:]
        raise LaunchError(f"{argv[0]} failed with status {done.returncode}: {said}; {remedy}")
    return done.stdout


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it came true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True
