"""Where compiled kernels lie on disk. Nothing here is loaded with them: a launcher only asks whether they are there.

What is read here will be executed, and the folder may be one in which others write. So a file counts only if it is
whole, says its own name, and can have been written by nobody but us and root. Nothing is read or written through a
link.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import xxhash

MAGIC = b"atoll kernel 2\n"
SUFFIX = ".kernel"
WAIT_S_MAX = 300.0
"""For another process that compiles: all kernels take some 15 s of a processor."""
LOOK_S = 0.05
BYTES_MAX = 16 << 20
"""Of a file: the largest kernel has some 100 KiB."""
LAST_MADE = "outer_step"
"""What `warm_up` compiles last."""


def are_stored() -> bool:
    """Whether some process has compiled the kernels here, as far as their files tell."""
    return any(True for place in _places() for _ in place.glob(f"{LAST_MADE}-*{SUFFIX}"))


def stored(name: str) -> tuple[str, bytes] | None:
    """Names (of its entry, and of what it needs) and object code, wherever they were stored."""
    found = (_read(place, name) for place in _places())
    return next((one for one in found if one is not None), None)


@lru_cache(maxsize=1)
def writable() -> Path | None:
    """Where kernels are stored; None if no place takes them."""
    for place in _places():
        with contextlib.suppress(OSError):
            place.mkdir(0o755, parents=True, exist_ok=True)
            if os.access(place, os.W_OK | os.X_OK):
                return place
    return None


def _places() -> list[Path]:
    """Where numba would keep its own: an image may bring them along in a folder that is not to be written to."""
    beside = Path(__file__).parent / "__pycache__"
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(given), beside]
    try:
        return [beside, Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "atoll"]
    except RuntimeError:  # a user without a home
        return [beside]


def _read(place: Path, name: str) -> tuple[str, bytes] | None:
    """None if there is no such file, or if it is not to be trusted."""
    try:
        with open(place / f"{name}{SUFFIX}", "rb", opener=_no_link) as file:
            trusted = _only_ours(file)
            said, names, code = file.read(BYTES_MAX).split(b"\n\n", 2)
    except (OSError, ValueError):
        return None
    return (names.decode("ascii"), code) if trusted and said == _head(name, names, code) else None


def _head(name: str, names: bytes, code: bytes) -> bytes:
    """What a file says of itself: the code of another kernel, or for another processor, has another name."""
    return MAGIC + f"{name} {xxhash.xxh3_64_hexdigest(names + code)}".encode()


def _no_link(path: str, flags: int) -> int:
    """Of a pipe the end is not waited for. What is there stays until it is replaced as a whole."""
    return os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _only_ours(file: BinaryIO) -> bool:
    """Whether nobody but root and us can have written here."""
    found = os.fstat(file.fileno())
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.getuid()) and not others_write


def write(name: str, names: str, code: bytes) -> None:
    """In one piece. A disk that takes nothing means that the next process compiles, too."""
    place = writable()
    if place is None:
        return
    import tempfile  # only whoever compiles needs it

    with contextlib.suppress(OSError):
        number, temporary = tempfile.mkstemp(".tmp", f"{name}.", place)
        try:
            with os.fdopen(number, "wb") as file:
                os.fchmod(number, 0o644)
                file.write(b"\n\n".join((_head(name, names.encode(), code), names.encode(), code)))
            Path(temporary).replace(place / f"{name}{SUFFIX}")
        except OSError:
            Path(temporary).unlink()


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """One process at a time, as far as that can be had: two that compile the same cost time and nothing else. What a
    dead process held is free."""
    place = writable()
    with contextlib.ExitStack() as held:
        if place is not None:
            with contextlib.suppress(OSError):
                file = held.enter_context(open(place / f"{name}.lock", "wb", opener=_no_link))
                if _only_ours(file):  # another's lock would hold us up for as long as he likes
                    _wait_for(file)
        yield


def _wait_for(file: BinaryIO) -> None:
    until_s = time.monotonic() + WAIT_S_MAX
    while not _locked(file) and time.monotonic() < until_s:
        time.sleep(LOOK_S)


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
