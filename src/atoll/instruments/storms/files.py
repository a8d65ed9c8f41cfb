"""The files of a storm in a run folder: the plan, and faults that last as long as their file is there."""

from __future__ import annotations

from pathlib import Path


class FaultFiles:
    """Where they are."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self.plan = run_folder / "plan.toml"
        self.disk_full = run_folder / "disk-full"
        """While it exists, the syncer's disk is full."""

    def disk_full_of(self, shard: str) -> Path:
        """While it exists, that shard's disk is full."""
        return self._folder / f"disk-full-{shard}"

    def slow(self, learner: str) -> Path:
        """While it exists, it holds how many times as long that learner's steps take."""
        return self._folder / f"slow-{learner}"

    def poison(self, learner: str) -> Path:
        """While it exists, it says what is wrong with that learner's contributions."""
        return self._folder / f"poison-{learner}"

    def lie(self, learner: str) -> Path:
        """While it exists, it names the lies that the learner tells."""
        return self._folder / f"lie-{learner}"

    def clear(self) -> None:
        """Faults of processes that are gone must not reach their successors."""
        for pattern in ("slow-*", "poison-*", "lie-*", "disk-full*"):
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)
