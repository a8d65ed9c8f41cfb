"""How the run in a folder ended, from what it left behind: its result, and the last lines of its events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.launch.folder import RunFolder
from atoll.observe import Event, RunFinished, SyncerStarted, SyncerStopped, decode

TAIL_BYTES = 1 << 20
"""Read from the end of each file: a syncer's last word and its statistics of an hour. What is further back is not how
the run ended."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run."""

    time_s: float
    reason: str
    commits: int
    model: str
    """The published model; empty if there is none."""


def how_it_ended(folder: RunFolder) -> RunEnd | None:
    """None if the run did not end in order: it goes on, or its syncer died."""
    last: tuple[int, Event] | None = None
    stopped: SyncerStopped | None = None
    for t_ns, event in sorted(_last_words(folder.events), key=lambda stamped: stamped[0]):
        last = (t_ns, event)
        if isinstance(event, SyncerStopped):
            stopped = event
    if (last is None or isinstance(last[1], SyncerStarted)) and not folder.result_file.exists():
        return None
    model = str(folder.model_file) if folder.model_file.exists() else ""
    commits = stopped.commits if stopped is not None else 0
    if last is None or isinstance(last[1], SyncerStarted):
        return RunEnd(folder.result_file.stat().st_mtime, "finished", commits, model)
    reason = last[1].reason if isinstance(last[1], RunFinished | SyncerStopped) else ""
    return RunEnd(last[0] / 1e9, reason or "finished", commits, model)


def _last_words(events: Path) -> Iterator[tuple[int, Event]]:
    for path in (*events.glob("syncer-*.jsonl"), *events.glob("launcher*.jsonl")):
        try:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
                lines = file.read().splitlines()
        except OSError:
            continue
        for decoded in map(decode, lines):
            if decoded is not None and isinstance(decoded[1], SyncerStarted | SyncerStopped | RunFinished):
                yield decoded
