"""What comes back from a disk or a bucket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from atoll.store.commit_log import LoggedMerge


@dataclass(slots=True)
class LoadedFragment:
    """One committed version of a fragment. Its checksums were compared; the arrays are writable and nobody else's."""

    version: int
    meta: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    epoch: int = 0
    """The epoch of the syncer that committed it."""
    sequence: int = 0
    """Which commit of that epoch it was; 0 in a snapshot."""


@dataclass(slots=True)
class Loaded:
    """The state of a run. `problems` says in words what was damaged or missing and what was used instead."""

    rows: dict[str, Any] = field(default_factory=dict)
    fragments: dict[int, LoadedFragment] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    logged: dict[int, list[LoggedMerge]] = field(default_factory=dict)
    """By fragment: the merges that lead from the version above to the one that was committed last, in their order."""


@dataclass(slots=True)
class LoadedSnapshot(Loaded):
    """A snapshot: the same, with what was said about it when it was made."""

    about: dict[str, Any] = field(default_factory=dict)
    label: int = 0
    url: str = ""
