"""What processes print, within bounds: a run of months must not fill its disk with it.

Logs are opened for appending by whoever started the process, and nobody can give that one another file. So the text is
copied aside and the file made empty, as logrotate's `copytruncate` does; a line that is written in between is lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

LOG_BYTES_MAX = 64 << 20
"""Of one log; as much again is kept beside it, as NAME.log.1. A process prints some kilobytes an hour."""


def bound_logs(folder: Path, bytes_max: int = LOG_BYTES_MAX) -> list[Path]:
    """Every log of this folder that has grown too long is begun anew. A full disk is no reason to stop a run."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.glob("*.log"):
            if path.is_file() and not path.is_symlink() and path.stat().st_size > bytes_max:
                _begin_anew(path)
                found.append(path)
    return found


def _begin_anew(path: Path) -> None:
    aside = path.with_name(f"{path.name}.partial")
    try:
        shutil.copyfile(path, aside)
        aside.replace(path.with_name(f"{path.name}.1"))
    except OSError:
        aside.unlink(missing_ok=True)  # there is no room for it: what is printed from now on is worth more
    os.truncate(path, 0)
