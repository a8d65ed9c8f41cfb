"""What leaving learners handed over and no round has merged yet: one file per contribution, whole or not there.

A learner that stays keeps its contribution until it hears that it was merged, so the syncer may forget it in a crash.
One that leaves cannot give it again: its contributions are put on disk before it is let go, and deleted once they are
merged.

A file is a line of JSON (what the contribution is, its size and checksum), then its bytes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.store import files

SUFFIX = ".held"
HEADER_BYTES_MAX = 4096
FORMAT = 1


class Handover:
    """The folder RUN/state/handover. Methods block: worker threads only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, about: Mapping[str, Any], payload: NDArray[np.uint8]) -> None:
        """Durable on return."""
        files.make_folders(self._folder, "epoch.folder")
        header = {
            "format": FORMAT,
            "about": dict(about),
            "about_checksum": _checksum_of(about),
            "size": int(payload.nbytes),
            "checksum": xxhash.xxh3_64_intdigest(payload.data),
        }
        line = json.dumps(header).encode() + b"\n"
        if len(line) > HEADER_BYTES_MAX:
            raise ValueError(f"the description of a contribution takes {len(line)} bytes")
        with files.Replacement(self._folder / (name + SUFFIX), "handover") as file:
            file.write(line)
            file.write(payload.data)

    def drop(self, name: str) -> None:
        """It was merged, or will never be. A file that cannot be deleted is recognised as merged when it is read."""
        with contextlib.suppress(OSError):
            files.remove(self._folder / (name + SUFFIX))

    def load(self) -> tuple[dict[str, tuple[dict[str, Any], NDArray[np.uint8]]], list[str]]:
        """Everything that is here, by name, and what could not be read, in words."""
        found: dict[str, tuple[dict[str, Any], NDArray[np.uint8]]] = {}
        problems: list[str] = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")) if self._folder.is_dir() else []:
            try:
                found[path.name.removesuffix(SUFFIX)] = _read(path)
            except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                problems.append(f"{path.name}: a contribution of a learner that left cannot be read ({error})")
        return found, problems


def _read(path: Path) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    with path.open("rb") as file:
        header = json.loads(file.readline(HEADER_BYTES_MAX))
        if header["format"] != FORMAT or not 0 <= int(header["size"]) <= path.stat().st_size:
            raise ValueError("its first line is damaged")
        payload = np.fromfile(file, np.uint8, int(header["size"]))
    if payload.nbytes != header["size"] or xxhash.xxh3_64_intdigest(payload.data) != header["checksum"]:
        raise ValueError("its bytes are not the ones that were written")
    if header.get("about_checksum", _checksum_of(header["about"])) != _checksum_of(header["about"]):
        raise ValueError("its description is not the one that was written")
    return dict(header["about"]), payload


def _checksum_of(about: Mapping[str, Any]) -> int:
    """Files of earlier versions have none."""
    return xxhash.xxh3_64_intdigest(json.dumps(about).encode())
