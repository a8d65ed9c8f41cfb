"""Bytes at rest: what the syncer must not lose, snapshots of it, and the model taken out of it.

open_store, RunStore       the state folder of a run: two slots per fragment, the tape, the epoch
read_state, read_history   the same folder read-only, of a living or a dead run
Recording                  with --record: what merges were made from (atoll.replay reads it)
SnapshotTarget             snapshots to any fsspec URL, claimed by one syncer (Hold); load_snapshot reads one
export_model               a safetensors file by parameter name
failpoints                 where tests and storms make this room die
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.store.claim import CLAIM_BEAT_S, Claim, Hold
    from atoll.store.export import export_model
    from atoll.store.handover import Handover
    from atoll.store.loaded import Loaded, LoadedFragment, LoadedSnapshot
    from atoll.store.place import unreachable
    from atoll.store.recording import Place, Recording, segment_files
    from atoll.store.recover import read_state
    from atoll.store.run_store import RunStore, open_store
    from atoll.store.slots import CommitStats
    from atoll.store.snapshots import LABELS_PER_EPOCH, SnapshotDraft, SnapshotStats, SnapshotTarget, load_snapshot
    from atoll.store.tape import TAPE_FILES_ALL, TAPE_FILES_KEPT
    from atoll.store.tape_record import read_history, read_rows

_HOME = {
    "CLAIM_BEAT_S": "claim",
    "Claim": "claim",
    "CommitStats": "slots",
    "Handover": "handover",
    "Hold": "claim",
    "LABELS_PER_EPOCH": "snapshots",
    "Loaded": "loaded",
    "LoadedFragment": "loaded",
    "LoadedSnapshot": "loaded",
    "Place": "recording",
    "Recording": "recording",
    "RunStore": "run_store",
    "SnapshotDraft": "snapshots",
    "SnapshotStats": "snapshots",
    "SnapshotTarget": "snapshots",
    "TAPE_FILES_ALL": "tape",
    "TAPE_FILES_KEPT": "tape",
    "export_model": "export",
    "load_snapshot": "snapshots",
    "open_store": "run_store",
    "read_history": "tape_record",
    "read_rows": "tape_record",
    "read_state": "recover",
    "segment_files": "recording",
    "unreachable": "place",
}

__all__ = [
    "CLAIM_BEAT_S",
    "LABELS_PER_EPOCH",
    "TAPE_FILES_ALL",
    "TAPE_FILES_KEPT",
    "Claim",
    "CommitStats",
    "Handover",
    "Hold",
    "Loaded",
    "LoadedFragment",
    "LoadedSnapshot",
    "Place",
    "Recording",
    "RunStore",
    "SnapshotDraft",
    "SnapshotStats",
    "SnapshotTarget",
    "export_model",
    "load_snapshot",
    "open_store",
    "read_history",
    "read_rows",
    "read_state",
    "segment_files",
    "unreachable",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
