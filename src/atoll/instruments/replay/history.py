"""Which decisions are a run's history: those that lead to the state on its disk.

A decision is written down before its version is committed, so a syncer that dies in between leaves one that never
counted: nobody heard of that version, and the next syncer makes it again from other contributions. Which of them counts
follows from epochs and versions, not from the order in time:

1. Every start of a syncer has a higher epoch and writes files of its own. The first thing it records of a fragment is
   the version it begins from. What older epochs decided about later versions of that fragment is not history, also not
   if it was written afterwards, by a syncer that had been frozen.
2. At the end the slots on the disk say which version was committed last. What goes beyond it is not history.

Checksums then prove it: each version that is left must come out with the checksum that was written down with it, and
the last one with the checksum on the disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from atoll.core import LATER_SETTINGS, Layout, SyncConfig, TensorSpec, build_layout
from atoll.errors import AtollError, StoreError
from atoll.instruments.replay.recording_reader import Record, SegmentReader, read_notes
from atoll.store import read_rows, read_state, segment_files
from atoll.syncer import RECORDED

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Decision:
    """What was merged into a version, in which round, how weighted, and what came of it."""

    epoch: int
    fragment: int
    version: int
    round: int
    checksum: int
    contributions: tuple[tuple[str, int, int], ...]
    """(learner, generation, seq) of each."""
    weights: tuple[float, ...]
    codec_down: str = ""
    """What the update was encoded in; empty: as the settings say."""

    @property
    def key(self) -> tuple[int, int, int]:
        return self.epoch, self.fragment, self.version

    @property
    def content(self) -> tuple[Any, ...]:
        """All but the epoch: another run may have been restarted at other times."""
        return self.round, self.fragment, self.version, self.contributions, self.weights, self.checksum


@dataclass(frozen=True, slots=True)
class RecordedMerge:
    record: Record
    decision: Decision
    places: tuple[tuple[int, int], ...]
    """Segment and offset of each payload."""


@dataclass(frozen=True, slots=True)
class RecordedState:
    record: Record
    fragment: int
    version: int
    round: int
    checksum: int
    why: str
    arrays: dict[str, tuple[int, str]]
    """By name: checksum, and how it is recorded (`atoll.syncer.recording`)."""


@dataclass(frozen=True, slots=True)
class About:
    """What a segment says about the run."""

    run: str
    config: SyncConfig
    layout: Layout


@dataclass(slots=True)
class History:
    """What is on the disk of one run, opened by `open_history`."""

    folder: Path
    run: str
    finals: dict[int, tuple[int, int]]
    """By fragment: version and checksum of the last commit."""
    unrecorded: dict[int, str] = field(default_factory=dict)
    """Fragments whose last commit says that the recording does not lead to it, in words."""
    begins: dict[int, dict[int, int]] = field(default_factory=dict)
    """By fragment, then epoch: the version that the epoch began from."""
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def counts(self, epoch: int, fragment: int, version: int) -> bool:
        """Whether what this epoch said about this version is part of the history."""
        later = [begin for other, begin in self.begins.get(fragment, {}).items() if other > epoch]
        final = self.finals.get(fragment)
        return version <= min([*later, *([final[0]] if final is not None else [])], default=version)

    def begin(self, epoch: int, fragment: int, version: int) -> None:
        """An epoch began this fragment from this version, or from an earlier one."""
        known = self.begins.setdefault(fragment, {})
        known[epoch] = min(version, known.get(epoch, version))

    def readers(self, problems: list[str] | None = None) -> Iterator[SegmentReader]:
        """Every segment of this run, oldest first, each open while it is looked at."""
        for segment in segment_files(self.state / "recording"):
            try:
                reader = SegmentReader(segment)
            except OSError as error:
                raise StoreError(f"{segment.path} cannot be read ({error.strerror}); mend its permissions") from error
            with reader:
                if reader.about and reader.about.get("run") != self.run:
                    if problems is not None:
                        other = reader.about.get("run")
                        problems.append(f"{segment.path.name} belongs to another run ({other}); it is left out")
                    continue
                yield reader
                if reader.fault and problems is not None:
                    problems.append(reader.fault)


def open_history(folder: Path) -> History:
    """Look at a run's folder. StoreError if there is none, or nothing in it can be a run."""
    if not folder.is_dir():
        raise StoreError(f"there is no folder {folder}; give the folder that the run named, such as runs/...")
    state = folder / "state"
    if not state.is_dir():
        raise StoreError(
            f"{folder} holds no state of a run; give the folder of a run that was started with --record and keeps its "
            "state on disk"
        )
    problems: list[str] = []
    try:
        rows, problems = read_rows(state / "tape")
        loaded = read_state(state, only=())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"the state in {state} cannot be read ({error}); give a folder that is a run's") from error
    row = rows.get("run")
    run = str(row["run"]) if isinstance(row, Mapping) and "run" in row else ""
    if not run:
        problems.append("the tape does not say which run this is; the recording's word is taken")
        run = _run_of_recording(state)
    if not run:
        raise StoreError(
            f"neither the tape nor a recording in {state} says which run this is: the run ended before its first "
            "parameters were complete, or its files are gone. Give another run folder"
        )
    finals = {f: (each.version, int(each.meta.get("checksum", 0))) for f, each in loaded.fragments.items()}
    unrecorded = {
        f: f" (version {each.version} was committed by epoch {each.epoch} and not recorded)"
        for f, each in loaded.fragments.items()
        if each.meta.get(RECORDED) != run
    }
    problems += [problem for problem in loaded.problems if problem not in problems]
    return History(folder, run, finals, unrecorded, problems=problems)


def _run_of_recording(state: Path) -> str:
    for segment in reversed(segment_files(state / "recording")):
        with contextlib.suppress(OSError), SegmentReader(segment) as reader:
            if reader.about:
                return str(reader.about.get("run", ""))
    return ""


# ---------------------------------------------------------------- what records say


def about_of(reader: SegmentReader) -> About:
    """The run as a segment describes it. StoreError if this version of Atoll cannot make sense of it."""
    about = reader.about
    try:
        config = SyncConfig.from_dict({**LATER_SETTINGS, **about["config"]})
        specs = [TensorSpec(str(n), tuple(map(int, s)), str(d), str(m)) for n, s, d, m in about["tensors"]]
        if not 1 <= int(about["fragments"]) == config.fragments:
            raise ValueError(f"{about['fragments']} fragments")
        layout = build_layout(specs, config.fragments)
    except (AtollError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StoreError(
            f"{reader.segment.path} describes a run that this version of atoll does not know ({error}); replay it with "
            "the version that recorded it"
        ) from error
    if layout.fingerprint != about.get("layout"):
        raise StoreError(
            f"{reader.segment.path} was recorded with another layout of the same tensors; replay it with the version "
            "of atoll that recorded it"
        )
    return About(str(about["run"]), config, layout)


def merge_of(record: Record) -> RecordedMerge:
    """A decision, from its record."""

    def parse(head: dict[str, Any]) -> RecordedMerge:
        decision = _decision(record.segment.epoch, head)
        places = tuple((int(entry[3]), int(entry[4])) for entry in head["contributions"])
        return RecordedMerge(record, decision, places)

    return _parsed(record, parse)


def state_of(record: Record) -> RecordedState:
    """A state, from its record."""

    def parse(head: dict[str, Any]) -> RecordedState:
        arrays = {str(name): (int(checksum), str(how)) for name, (checksum, how) in head["arrays"].items()}
        fragment, version, number, checksum = _numbers(head, "fragment")
        return RecordedState(record, fragment, version, number, checksum, str(head["why"]), arrays)

    return _parsed(record, parse)


def _decision(epoch: int, head: Mapping[str, Any], fragment: str = "fragment") -> Decision:
    ids = tuple((str(entry[0]), int(entry[1]), int(entry[2])) for entry in head["contributions"])
    weights = tuple(float(weight) for weight in head["weights"])
    if not ids or len(set(ids)) != len(ids) or len(weights) != len(ids):
        raise ValueError("contributions and weights do not fit together")
    codec_down = str(head.get("codec_down", ""))
    return Decision(epoch, *_numbers(head, fragment), contributions=ids, weights=weights, codec_down=codec_down)


def _numbers(head: Mapping[str, Any], fragment: str) -> tuple[int, int, int, int]:
    """Fragment, version, round and checksum."""
    return int(head[fragment]), int(head["version"]), int(head["round"]), int(head["checksum"])


def _parsed(record: Record, parse: Callable[[dict[str, Any]], Made]) -> Made:
    try:
        return parse(record.head)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise StoreError(
            f"{record.where}: the {record.kind} record makes no sense ({error!r}); it was made by another version of "
            "atoll or by something else. Replay it with the version that recorded it"
        ) from error


def tape_decisions(state: Path, problems: list[str]) -> Iterator[Decision]:
    """The decisions on the tape, each once; what is no decision is left out."""
    last: dict[int, tuple[int, int]] = {}
    for epoch, note in read_notes(state, problems):
        if "merge" not in note:
            continue
        try:
            decision = _decision(epoch, note, "merge")
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            problems.append(f"a decision on the tape makes no sense ({error!r}); it is left out")
            continue
        # A sync that failed has the same notes again at the beginning of the next file.
        if (epoch, decision.version) > last.get(decision.fragment, (-1, -1)):
            last[decision.fragment] = (epoch, decision.version)
            yield decision
