"""The checkpoints that all processes of a learner have left together, however many they were.

    RUN/learners/NAME/inner-*.safetensors               of a learner of one process
    RUN/learners/NAME/rank-R-of-N/inner-*.safetensors   of a learner of N ranks

A set is one file of each rank, all of the same generation and step. Its files are mapped, not read: whoever takes his
part of them reads no more than that.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.errors import PayloadError
from atoll.learner.checkpoint import CANDIDATES_MAX, checkpoint_files, checksum_of
from atoll.learner.inner import Captured, InnerAbout, read_about, unpack
from atoll.learner.inner_state import folder_name

SETS_MAX = 4
"""Sets that are tried: the newest, and older ones in case that it is damaged."""
RANKS_MAX = 65_536
_RANK = re.compile(r"rank-(\d{1,6})-of-(\d{1,6})")


@dataclass(frozen=True, slots=True)
class CheckpointSet:
    generation: int
    step: int
    files: tuple[Path, ...]
    """By rank."""
    checksums: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.files)

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.generation, self.step, self.size)

    def damaged(self, ranks: Iterable[int]) -> str:
        """What is wrong with the files of these ranks, if anything. Each is read once, and not kept."""
        for rank in ranks:
            try:
                if checksum_of(self.files[rank]) != self.checksums[rank]:
                    return f"{self.files[rank]} does not match the checksum in its name"
            except OSError as error:
                return f"{self.files[rank]}: {error}"
        return ""

    def open(self) -> list[Captured]:
        """Raises PayloadError or OSError."""
        return [unpack(_mapped(file)) for file in self.files]


def _mapped(file: Path) -> NDArray[np.uint8]:
    """Writable, as far as torch knows; what is written there stays in this process."""
    return np.memmap(file, np.uint8, "c")


def find_sets(folder: Path, learner: str, run: str | None) -> list[CheckpointSet]:
    """Those of a learner in its run's folder that are complete, newest first."""
    home = folder / "learners" / folder_name(learner)
    places: dict[int, dict[int, Path]] = defaultdict(dict)
    places[1][0] = home
    with suppress(OSError):
        for entry in home.iterdir():
            match = _RANK.fullmatch(entry.name)
            if match and int(match[1]) < int(match[2]) <= RANKS_MAX:
                places[int(match[2])][int(match[1])] = entry
    sets = [one for size, ranks in places.items() if len(ranks) == size for one in _complete(ranks, learner, run)]
    return sorted(sets, key=lambda one: one.key, reverse=True)[:SETS_MAX]


def _complete(ranks: dict[int, Path], learner: str, run: str | None) -> list[CheckpointSet]:
    found = [_files(ranks[rank], learner, run) for rank in range(len(ranks))]
    common = set(found[0]).intersection(*found[1:])
    return [CheckpointSet(*key, *zip(*(of_rank[key] for of_rank in found), strict=True)) for key in common]


def _files(folder: Path, learner: str, run: str | None) -> dict[tuple[int, int], tuple[Path, str]]:
    """By generation and step: (file, checksum)."""
    found = {}
    for _, checksum, file in reversed(checkpoint_files(folder)[:CANDIDATES_MAX]):
        about = _about(file)
        if about is not None and folder_name(about.learner) == folder_name(learner) and run in (None, about.run):
            found[about.generation, about.step] = (file, checksum)
    return found


def _about(file: Path) -> InnerAbout | None:
    try:
        return read_about(_mapped(file))
    except (OSError, ValueError, PayloadError):
        return None
