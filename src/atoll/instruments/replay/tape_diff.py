"""Where two runs part: the first decision that differs, in the order of all commits and fragment by fragment.

This needs tapes only, no payloads. Where a run was recorded, decisions that its tape lacks (those of the last second
before a crash) come from the recording, at the end of their epoch. What was never committed is left out on both sides.
Memory: 8 bytes per decision.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from atoll.errors import StoreError
from atoll.instruments.replay.history import Decision, History, merge_of, open_history, state_of, tape_decisions


@dataclass(frozen=True, slots=True)
class Parting:
    """Two decisions that should be the same; None: that run has no more."""

    position: int
    """How many decisions are the same before, overall or of the fragment."""
    first: Decision | None
    second: Decision | None

    @property
    def fields(self) -> list[str]:
        """What differs."""
        if self.first is None or self.second is None:
            return []
        names = ("round", "fragment", "version", "contributions", "weights", "checksum")
        return [name for name in names if getattr(self.first, name) != getattr(self.second, name)]


@dataclass(slots=True)
class TapeDiff:
    first: str
    second: str
    decisions: tuple[int, int] = (0, 0)
    overall: Parting | None = None
    fragments: dict[int, Parting] = field(default_factory=dict)
    """By fragment, where its own history parts: other orders of the same decisions are no difference here."""
    problems: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return self.overall is None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "same": self.same}


def diff_tapes(first: Path, second: Path) -> TapeDiff:
    """Compare the decisions of two runs."""
    histories = [open_history(folder) for folder in (first, second)]
    for history in histories:
        _find_begins(history)
    diff = TapeDiff(str(first), str(second))
    counts = [0, 0]
    for pair in itertools.zip_longest(*(_decisions(history) for history in histories)):
        one, other = pair
        if diff.overall is None and (one is None or other is None or one.content != other.content):
            diff.overall = Parting(counts[0], one, other)
        for side, decision in enumerate(pair):
            counts[side] += decision is not None
    diff.decisions = (counts[0], counts[1])
    if counts == [0, 0]:
        raise StoreError(f"neither {first} nor {second} has a decision on its tape; give folders of runs that merged")
    if diff.overall is not None:
        diff.fragments = _by_fragment(histories[0], histories[1])
    diff.problems = [f"{h.folder}: {problem}" for h in histories for problem in dict.fromkeys(h.problems)]
    return diff


def _by_fragment(first: History, second: History) -> dict[int, Parting]:
    """The first difference of each fragment. Digests of one side are kept; the few decisions are fetched afterwards."""
    digests: dict[int, array[int]] = {}
    for decision in _decisions(first):
        digests.setdefault(decision.fragment, array("Q")).append(_digest(decision))
    parted: dict[int, tuple[int, Decision | None]] = {}
    reached = dict.fromkeys(digests, 0)
    for decision in _decisions(second):
        fragment = decision.fragment
        position = reached.get(fragment, 0)
        reached[fragment] = position + 1
        known = digests.get(fragment, array("Q"))
        if fragment not in parted and (position >= len(known) or known[position] != _digest(decision)):
            parted[fragment] = (position, decision)
    for fragment, known in digests.items():
        if fragment not in parted and reached[fragment] < len(known):
            parted[fragment] = (reached[fragment], None)
    seen: dict[int, int] = {}
    found: dict[int, Decision] = {}
    for decision in _decisions(first):
        position = seen.get(decision.fragment, 0)
        seen[decision.fragment] = position + 1
        if decision.fragment in parted and parted[decision.fragment][0] == position:
            found[decision.fragment] = decision
    return {f: Parting(position, found.get(f), other) for f, (position, other) in sorted(parted.items())}


def _digest(decision: Decision) -> int:
    return int(xxhash.xxh3_64_intdigest(repr(decision.content).encode()))


def _find_begins(history: History) -> None:
    """What each epoch began from, as far as tape and recording tell."""
    for decision in tape_decisions(history.state, history.problems):
        history.begin(decision.epoch, decision.fragment, decision.version - 1)
    for reader in history.readers(history.problems):
        for record in reader.records():
            if record.kind == "state":
                state = state_of(record)
                history.begin(record.segment.epoch, state.fragment, state.version)
            elif record.kind == "merge":
                decision = merge_of(record).decision
                history.begin(decision.epoch, decision.fragment, decision.version - 1)


def _decisions(history: History) -> Iterator[Decision]:
    """The history in order: epoch by epoch the tape's decisions, then what only the recording knows."""
    notes = itertools.groupby(tape_decisions(history.state, []), key=lambda decision: decision.epoch)
    recorded = itertools.groupby(_recorded(history), key=lambda decision: decision.epoch)
    note, record = next(notes, None), next(recorded, None)
    while note is not None or record is not None:
        epoch = min(group[0] for group in (note, record) if group is not None)
        known: set[tuple[int, int, int]] = set()
        if note is not None and note[0] == epoch:
            for decision in note[1]:
                known.add(decision.key)
                if history.counts(*decision.key):
                    yield decision
            note = next(notes, None)
        if record is not None and record[0] == epoch:
            yield from (d for d in record[1] if d.key not in known and history.counts(*d.key))
            record = next(recorded, None)


def _recorded(history: History) -> Iterator[Decision]:
    for reader in history.readers():
        for record in reader.records():
            if record.kind == "merge":
                yield merge_of(record).decision
