"""`python -m atoll.launch.rank COMMAND ...`: become the command, and die with whoever started it.

torchrun gives each rank a session of its own. If it is killed, nobody would end them, and they would train on under an
id that the launcher gives to others."""

from __future__ import annotations

import os
import signal
import sys

from atoll.launch.process import die_with


def main(command: list[str]) -> None:
    die_with(os.getppid(), signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]!r} ({error.strerror}); check that the command exists and may be executed")


if __name__ == "__main__":
    main(sys.argv[1:])
