"""What only its owner may read: tokens, credentials, and what a run leaves on disk.

A secret comes by environment, or from a file that nobody else can read. A command line is no place for one: every user
of the machine can read it (/proc/PID/cmdline).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from atoll.errors import ConfigError

FOLDER_MODE = 0o700
FILE_MODE = 0o600
UMASK = 0o077
"""Nothing for the group, nothing for others."""
_USERINFO = re.compile(r"(?<=://)[^/?#\s\"'@]+@")
_users_umask = -1


def check_private(path: Path, descriptor: int) -> None:
    """Refuse a file of ours that others can read, as ssh does with keys: what is in it is no secret. A file of another
    owner (root's, say) has the mode that he chose."""
    if is_open_to_others(os.fstat(descriptor)):
        raise ConfigError(
            f"other users of this machine can read {path}, so that what is in it is no secret; use: chmod 600 {path} "
            "(and put a new one into it)"
        )


def is_open_to_others(found: os.stat_result) -> bool:
    """Whether a file of this user may be used by others."""
    return found.st_uid == os.geteuid() and bool(stat.S_IMODE(found.st_mode) & UMASK)


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner can enter, and what is missing above it; one that is there stays as it is."""
    path.mkdir(FOLDER_MODE, parents=True, exist_ok=True)


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """What this process makes within the block is its owner's alone. Processes that it starts get `users_umask`: a
    user's script may write for others, too."""
    global _users_umask
    before = os.umask(UMASK)
    outer, _users_umask = _users_umask, before if _users_umask < 0 else _users_umask
    try:
        yield
    finally:
        os.umask(before)
        _users_umask = outer


def users_umask() -> int:
    """The umask outside of any `private_umask`; -1 if there is none, as `subprocess` takes it."""
    return _users_umask


def redacted(text: str) -> str:
    """The same text with the user and the password of every URL in it left out."""
    return _USERINFO.sub("***@", text)
