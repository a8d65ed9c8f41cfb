from . import failpoints, files
from .claim import CLAIM_BEAT_S, Claim, Hold
from .commit_log import LoggedMerge
from .epoch import TAPE_FOLDER, is_held
from .export import export_model
from .handover import Handover
from .loaded import Loaded, LoadedFragment, LoadedSnapshot
from .recording import (
    FRAME,
    HEAD_BYTES_MAX,
    MARKER,
    RECORDING_FOLDER,
    RECORDING_FORMAT,
    Recording,
    RecordPosition,
    SegmentFile,
    head_checksum,
    segment_files,
    segment_path,
)
from .recover import read_state
from .remote_folder import unreachable
from .run_store import RunStore, open_store
from .segment_reader import Record, SegmentReader
from .slots import CommitStats
from .snapshots import LABELS_PER_EPOCH, SnapshotStats, SnapshotTarget, load_snapshot
from .tape import TAPE_FILES_ALL, TAPE_FILES_KEPT
from .tape_record import FILE_BYTES_MAX, read_history, read_records, read_rows, tape_files

__all__ = [
    "CLAIM_BEAT_S",
    "FILE_BYTES_MAX",
    "FRAME",
    "HEAD_BYTES_MAX",
    "LABELS_PER_EPOCH",
    "MARKER",
    "RECORDING_FOLDER",
    "RECORDING_FORMAT",
    "TAPE_FILES_ALL",
    "TAPE_FILES_KEPT",
    "TAPE_FOLDER",
    "Claim",
    "CommitStats",
    "Handover",
    "Hold",
    "Loaded",
    "LoadedFragment",
    "LoadedSnapshot",
    "LoggedMerge",
    "Record",
    "RecordPosition",
    "Recording",
    "RunStore",
    "SegmentFile",
    "SegmentReader",
    "SnapshotStats",
    "SnapshotTarget",
    "export_model",
    "failpoints",
    "files",
    "head_checksum",
    "is_held",
    "load_snapshot",
    "open_store",
    "read_history",
    "read_records",
    "read_rows",
    "read_state",
    "segment_files",
    "segment_path",
    "tape_files",
    "unreachable",
]
