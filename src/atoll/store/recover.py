"""From a state folder to arrays and rows: what the last syncer committed, in spite of what is damaged.

A fragment may have files of several epochs: a new epoch writes into its own folder, and older files go once the
fragment was committed there. The highest (epoch, version) that is good counts, with one exception. A syncer that was
frozen while another took over may finish the commit it was in (its files are its own, and it notices only afterwards).
Nobody ever received that version, so it must not come to life at the next start. Hence `claims.json` in each epoch's
folder: which commit of which epoch was the newest for every fragment when that epoch began. Anything newer in an older
epoch's folder is refused.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from atoll.errors import PayloadError, StoreError
from atoll.store import files
from atoll.store.commit_log import read_log
from atoll.store.documents import json_object, whole
from atoll.store.epoch import TAPE_FOLDER, epoch_folders
from atoll.store.loaded import Loaded, LoadedFragment
from atoll.store.slot_reader import read_fragment
from atoll.store.slot_record import SlotRecord
from atoll.store.tape_record import read_rows

CLAIMS_FILE = "claims.json"
CLAIMS_BYTES_MAX = 4 << 20
"""Some twenty bytes for each of at most 4096 fragments. A larger file is not ours."""
READERS_MAX = 4
"""Fragments read at once: some wait for the disk while others are copied and checked."""
READ_TRIES = 5
"""Attempts on the folder of a living run, whose files may be replaced between listing and opening them."""
VERSION_MAX = 10**15
"""More versions than any run has."""
_SLOTS_NAME = re.compile(r"fragment-(\d{4,})\.slots")

T = TypeVar("T")
Claim = tuple[int, int] | None
"""The newest commit (epoch, sequence) of a fragment that a syncer saw when it took over; None if it could not tell."""


def slots_path(folder: Path, fragment: int) -> Path:
    return folder / f"fragment-{fragment:04}.slots"


def slots_in(folder: Path) -> dict[int, Path]:
    """The slot files in an epoch's folder, by fragment."""
    return {int(match[1]): path for path in folder.iterdir() if (match := _SLOTS_NAME.fullmatch(path.name))}


def read_state(path: Path, *, only: Collection[str] | None = None) -> Loaded:
    """The state in a folder, read-only: no lock, no new epoch. `only` names the arrays to read (None: all)."""
    if not path.is_dir():
        raise StoreError(f"there is no state in {path}; give the folder of a run that keeps its state on disk")

    def read() -> Loaded:
        rows, problems = read_rows(path / TAPE_FOLDER)
        loaded = Loaded(rows, {}, problems)
        load_fragments(path, loaded, only=only)
        return loaded

    return patiently(read)


def patiently(read: Callable[[], T]) -> T:
    """Read again where a living syncer has replaced a file meanwhile."""
    for _ in range(READ_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            return read()
    return read()


def load_fragments(
    state: Path, loaded: Loaded, *, only: Collection[str] | None = None
) -> tuple[dict[int, Claim], dict[int, tuple[int, int]]]:
    """Read the best good version of every fragment into `loaded`, several at once, and which merges of the log follow
    it; returns what to claim of slots and of the log."""
    folders = epoch_folders(state)
    found: dict[int, list[tuple[int, Path]]] = {}
    for epoch, folder in folders.items():
        for fragment, path in slots_in(folder).items():
            found.setdefault(fragment, []).append((epoch, path))
    claims, log_claims = _read_claims(folders, loaded.problems)
    taken: dict[int, Claim] = {}

    def load(fragment: int) -> _FragmentFound:
        return _load_one(fragment, found[fragment], claims, only)

    with ThreadPoolExecutor(READERS_MAX) as pool:
        for fragment, result in zip(sorted(found), pool.map(load, sorted(found)), strict=True):
            loaded.problems += result.problems
            taken[fragment] = result.claim
            if result.good is not None:
                loaded.fragments[fragment] = result.good
    return taken, _follow_logs(folders, loaded, log_claims)


def _follow_logs(
    folders: dict[int, Path], loaded: Loaded, claims: dict[int, dict[int, tuple[int, int]]]
) -> dict[int, tuple[int, int]]:
    """Find the merges that follow each fragment's slot, in the log of its epoch; returns how far each log counts."""
    reached: dict[int, tuple[int, int]] = {}
    logs = {epoch: read_log(folders[epoch], loaded.problems) for epoch in {f.epoch for f in loaded.fragments.values()}}
    for fragment, slot in loaded.fragments.items():
        merges, version = logs[slot.epoch].get(fragment, {}), slot.version
        last = _log_limit(fragment, slot.epoch, claims)
        while version + 1 in merges and version < last:
            version += 1
            loaded.logged.setdefault(fragment, []).append(merges[version])
        reached[fragment] = (slot.epoch, version)
    return reached


def _log_limit(fragment: int, epoch: int, claims: dict[int, dict[int, tuple[int, int]]]) -> int:
    """The last version of a fragment in an epoch's log that may be used: its syncer may have been fenced and have
    written one more. An epoch that says nothing of the log did not know of any."""
    limit = VERSION_MAX
    for newer, taken in claims.items():
        if newer > epoch:
            known, version = taken.get(fragment, (epoch, -1))
            limit = min(limit, version) if known == epoch else limit
    return limit


@dataclass(frozen=True, slots=True)
class _FragmentFound:
    good: LoadedFragment | None
    problems: list[str]
    claim: Claim


def _load_one(
    fragment: int, candidates: list[tuple[int, Path]], claims: dict[int, dict[int, Claim]], only: Collection[str] | None
) -> _FragmentFound:
    faults: list[str] = []
    good: LoadedFragment | None = None
    seen: list[Claim] = []
    for epoch, path in sorted(candidates, reverse=True):

        def refuse(record: SlotRecord, epoch: int = epoch) -> str | None:
            if record.epoch != epoch:
                return f"it is of epoch {record.epoch}"
            return _passed_over(record, claims)

        read = read_fragment(path, fragment, only=only, refuse=refuse)
        faults += [f"{path.parent.name}/{path.name}: {fault}" for fault in read.faults]
        if read.newest != 0:
            seen.append(None if read.newest is None else (epoch, read.newest))
        good = read.good
        if good is not None:
            break
    if good is None:
        instead = f"no good copy of fragment {fragment} is left here"
    else:
        instead = f"version {good.version} of epoch {good.epoch} is used"
    return _FragmentFound(good, [f"{fault}; {instead}" for fault in faults], seen[0] if seen else (0, 0))


# ------------------------------------------------------------ claims


def write_claims(folder: Path, claims: Mapping[int, Claim], reached: Mapping[int, tuple[int, int]]) -> None:
    """Record what this epoch took over, before it commits anything."""
    slots = {str(fragment): claim for fragment, claim in claims.items()}
    document = {"fragments": slots, "log": {str(fragment): claim for fragment, claim in reached.items()}}
    files.replace_file(folder / CLAIMS_FILE, json.dumps(document).encode(), "claims")


def _read_claims(
    folders: dict[int, Path], problems: list[str]
) -> tuple[dict[int, dict[int, Claim]], dict[int, dict[int, tuple[int, int]]]]:
    """By epoch, then by fragment: of slots, and (epoch, version) of logs."""
    claims: dict[int, dict[int, Claim]] = {}
    logs: dict[int, dict[int, tuple[int, int]]] = {}
    for epoch, folder in folders.items():
        try:
            if (folder / CLAIMS_FILE).stat().st_size > CLAIMS_BYTES_MAX:
                raise ValueError("too large")
            document = json_object((folder / CLAIMS_FILE).read_bytes(), CLAIMS_FILE)
            taken = {int(f): claim for f, claim in document["fragments"].items()}
            claims[epoch] = {f: None if claim is None else _claim(*claim) for f, claim in taken.items()}
            logs[epoch] = {int(f): (int(at), int(version)) for f, (at, version) in document.get("log", {}).items()}
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError, PayloadError):
            problems.append(f"{folder.name}/{CLAIMS_FILE} is damaged; it is left out")
    return claims, logs


def _claim(epoch: Any, sequence: Any) -> Claim:
    if not whole((epoch, sequence)):
        raise ValueError("a claim is two numbers")
    return int(epoch), int(sequence)


def _passed_over(record: SlotRecord, claims: dict[int, dict[int, Claim]]) -> str | None:
    """A reason if a newer epoch took this fragment over before this commit was there."""
    for epoch, taken in claims.items():
        claim = taken.get(record.fragment, (0, 0))
        if epoch > record.epoch and claim is not None and (record.epoch, record.sequence) > claim:
            return f"its syncer was fenced: epoch {epoch} had taken over before it was written"
    return None


def remove_epoch(folder: Path) -> None:
    """Delete an older epoch's folder once it holds no slots. Its claims are contained in the newer ones."""
    if not slots_in(folder):
        for path in folder.iterdir():
            files.remove(path)
        folder.rmdir()
