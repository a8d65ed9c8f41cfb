"""Where compiled kernels lie on disk. Nothing here is loaded with them: a launcher only asks whether they are there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import xxhash

MAGIC = b"atoll kernel 1\n"
SUFFIX = ".kernel"
WAIT_S_MAX = 300.0
"""For another process that compiles: all kernels take some 15 s of a processor."""
LOOK_S = 0.05
LAST_MADE = "outer_step"
"""What `warm_up` compiles last."""


def are_stored() -> bool:
    """Whether some process has compiled the kernels here, as far as their files tell."""
    return any(True for place in _places() for _ in place.glob(f"{LAST_MADE}-*{SUFFIX}"))


def stored(name: str) -> tuple[str, bytes] | None:
    """Names (of its entry, and of what it needs) and object code, wherever they were stored."""
    found = (_read(place / f"{name}{SUFFIX}") for place in _places())
    return next((one for one in found if one is not None), None)


@lru_cache(maxsize=1)
def writable() -> Path | None:
    """Where kernels are stored; None if no place takes them."""
    for place in _places():
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            if os.access(place, os.W_OK | os.X_OK):
                return place
    return None


def _places() -> list[Path]:
    """Where numba would keep its own: an image may bring them along in a folder that is not to be written to."""
    given, home = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    beside = Path(__file__).parent / "__pycache__"
    return [*([Path(given)] if given else []), beside, *([] if given else [Path(home).expanduser() / "atoll"])]


def _read(path: Path) -> tuple[str, bytes] | None:
    """None if there is no such file, or not all of it, or if another user wrote it: it will be executed."""
    try:
        with path.open("rb") as file:
            trusted = os.fstat(file.fileno()).st_uid in (0, os.getuid())
            head, names, code = file.read().removeprefix(MAGIC).split(b"\n", 2)
    except (OSError, ValueError):
        return None
    whole = head == xxhash.xxh3_64_hexdigest(names + code).encode()
    return (names.decode("ascii"), code) if whole and trusted else None


def write(name: str, names: str, code: bytes) -> None:
    """In one piece. A disk that takes nothing means that the next process compiles, too."""
    place = writable()
    if place is None:
        return
    head = xxhash.xxh3_64_hexdigest(names.encode() + code)
    path, temporary = place / f"{name}{SUFFIX}", place / f"{name}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError):
        temporary.write_bytes(MAGIC + f"{head}\n{names}\n".encode() + code)
        temporary.replace(path)


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """One process at a time, as far as that can be had: two that compile the same cost time and nothing else. What a
    dead process held is free."""
    place = writable()
    with contextlib.ExitStack() as held:
        if place is not None:
            with contextlib.suppress(OSError):
                _wait_for(held.enter_context((place / f"{name}.lock").open("wb")))
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
