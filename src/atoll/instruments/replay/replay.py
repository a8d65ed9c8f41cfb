"""Replay: every merge of a recorded run made again, with the arithmetic of production, and compared to the bit.

    report = replay(folder)     # raises StoreError for what cannot be replayed at all
    report.identical            # every version that was made again, and the last ones on the disk, are the same

Two passes over the recording. The first reads heads only and finds what is history (`history.py` says how a decision
that was never committed is told apart). The second (`replayer.py`) makes the merges, in the order in which they were
recorded, and compares the checksum of each version; it ends at the first that differs. Memory: the state of the model,
the payloads of one merge, and a few numbers per epoch and fragment.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from atoll.errors import ConfigError, LaunchError, StoreError
from atoll.instruments.replay.history import (
    About,
    History,
    RecordedState,
    about_of,
    merge_of,
    open_history,
    state_of,
    tape_decisions,
)
from atoll.instruments.replay.replayer import Replayer
from atoll.instruments.replay.report import FragmentEnd, Jump, Mismatch, ReplayReport
from atoll.syncer import HERE, ModelState

__all__ = ["FragmentEnd", "Jump", "Mismatch", "ReplayReport", "replay"]


def replay(folder: Path, until: int | None = None, *, export: Path | None = None) -> ReplayReport:
    """Make the merges of a recorded run again, up to and including round `until`, and compare them.

    `export` is a safetensors file for the parameters that came out, written if nothing differs. Raises StoreError for a
    folder, tape, recording or payload that cannot be used, ConfigError for a round that is not in the run, LaunchError
    if the export cannot be written.
    """
    if until is not None and until < 0:
        raise ConfigError(f"--until must be a round, from 0 (the first parameters) on; not {until}")
    started_s = time.perf_counter()
    history = open_history(folder)
    report = ReplayReport(str(folder), history.run, until)
    _scan(history)
    if until is not None:
        _check_until(history, until)
    replayer = Replayer(history, report)
    with np.errstate(all="ignore"):
        replayer.run()
    report.problems = list(dict.fromkeys(history.problems))
    if export is not None and report.mismatch is None and not report.missing:
        _export(replayer.state, export)
        report.exported = str(export)
    report.seconds = time.perf_counter() - started_s
    return report


def _export(state: ModelState, to: Path) -> None:
    try:
        state.save(to)
    except (OSError, SafetensorError) as error:
        raise LaunchError(f"cannot write {to} ({error}); give another --export, or make room") from error


def _scan(history: History) -> None:
    """The first pass: what each epoch began from, and that the first states are all there."""
    about: About | None = None
    begun: set[int] = set()
    for noted in tape_decisions(history.state, history.problems):  # also of epochs that did not record
        history.begin(noted.epoch, noted.fragment, noted.version - 1)
    for reader in history.readers(history.problems):
        if not reader.about:
            continue
        about = about_of(reader) if about is None else about
        for record in reader.records():
            if record.kind == "state":
                state = state_of(record)
                history.begin(record.segment.epoch, state.fragment, state.version)
                if state.arrays.get("theta", (0, ""))[1] == HERE and _fits(about, state):
                    begun.add(state.fragment)
            elif record.kind == "merge":
                decision = merge_of(record).decision
                history.begin(decision.epoch, decision.fragment, decision.version - 1)
    if about is None:
        raise StoreError(
            f"{history.folder} holds no recording of run {history.run}, so its merges cannot be made again; start runs "
            f"that are to be replayed with --record{_named(history.problems)}"
        )
    lacking = sorted(set(range(len(about.layout.fragments))) - begun)
    if lacking:
        raise StoreError(
            f"the recording does not hold the first parameters of fragments {lacking}: a segment is missing, damaged "
            f"or of another run, or the disk was full then; put the right files back into {history.state / 'recording'}"
            f"{_named(history.problems)}"
        )


def _fits(about: About, state: RecordedState) -> bool:
    """The bytes of the arrays are really there, so that what is allocated for them is bounded by the file."""
    if not 0 <= state.fragment < len(about.layout.fragments):
        return False
    here = sum(how == HERE for _, how in state.arrays.values())
    return state.record.body_bytes == 4 * here * about.layout.fragments[state.fragment].size


def _check_until(history: History, until: int) -> None:
    """ConfigError for a round after the last one, StoreError for one in a hole of the recording."""
    last = 0
    reached: dict[int, tuple[int, int]] = {}
    holes: list[tuple[int, int]] = []
    for reader in history.readers():
        for record in reader.records():
            if record.kind not in ("state", "merge"):
                continue
            told = state_of(record) if record.kind == "state" else merge_of(record).decision
            if not history.counts(record.segment.epoch, told.fragment, told.version):
                continue
            version, since = reached.get(told.fragment, (told.version, told.round))
            if told.version > version + (record.kind == "merge"):
                holes.append((since, told.round))
            reached[told.fragment] = (told.version, told.round)
            last = max(last, told.round if record.kind == "merge" else 0)
    if until > last:
        raise ConfigError(f"round {until} is beyond the end: the last round of this run is {last}. Use --until {last}")
    low, high = until, until
    for _ in holes:  # holes of several fragments may overlap
        inside = [hole for hole in holes if hole[0] < high and low < hole[1]]
        wider = min([low, *(hole[0] for hole in inside)]), max([high, *(hole[1] for hole in inside)])
        if wider == (low, high):
            break
        low, high = wider
    if low < high:
        raise StoreError(
            f"round {until} cannot be reached, because merges between rounds {low} and {high} are not in the "
            f"recording; use --until {low} or less, or {high} or more"
        )


def _named(problems: list[str]) -> str:
    return f" ({'; '.join(problems[:4])})" if problems else ""
