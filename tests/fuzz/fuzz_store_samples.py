"""Valid samples of everything that the store writes, and how to make a mutated document whole again."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from fuzz_engine import scratch
from world import World

from atoll.core import effects as fx
from atoll.core.config import SyncConfig
from atoll.core.messages import DataReport
from atoll.store import SnapshotTarget, open_store
from atoll.store.handover import Handover
from atoll.store.recording import FRAME as RECORD_FRAME
from atoll.store.recording import MARKER as RECORD_MARKER
from atoll.store.recording import RECORDING_FOLDER, Recording, head_checksum, segment_files
from atoll.store.slot_record import _FRAME, MAGIC, SECTOR, decode_record
from atoll.store.tape_record import frame
from atoll.store.tensorfile import encode_header

SIZE = 300
ROWS = {
    "run": {"format": 1, "run": "r", "fragments": 2, "tensors": [["w", [300], "float32", "rda"]], "seeded": True},
    "member/a": {"generation": 1, "instance": "i", "state": "active"},
    "data/books": {"chunks": 9, "next": 3, "pool": [[1, 5, 0]], "ahead": [], "reissued": 0, "repeated": 0},
}
META = {"version": 3, "checksum": 5, "norms": [1.0, 2.0], "accounts": [["a", 1, 10, 5, {}, [[1, 2]]]]}


def arrays_of(version: int) -> dict[str, Any]:
    values = np.random.default_rng(version).standard_normal(SIZE, dtype=np.float32)
    return {"theta": values, "momentum": -values}


@functools.cache
def state() -> Path:
    """A state folder with two fragments, two versions each, and a tape."""
    folder = scratch("store") / "state"
    with open_store(folder) as store:
        store.load()
        store.remember(ROWS)
        for version in (0, 1):
            for fragment in (0, 1):
                store.commit(fragment, version, arrays_of(version), META)
            store.note({"kind": "Committed", "version": version})
            store.sync()
            store.remember({"member/a": None, "count": version})
    return folder


@functools.cache
def snapshots() -> Path:
    folder = scratch("store") / "snapshots"
    target = SnapshotTarget(str(folder))
    for label in (1, 2):
        draft = target.begin(label)
        for fragment in (0, 1):
            draft.put_fragment(fragment, label, arrays_of(label), META)
        draft.finish(ROWS, {"epoch": 3})
    return folder


@functools.cache
def held() -> bytes:
    folder = scratch("store") / "handed"
    about = {"id": {"learner": "a", "generation": 1, "fragment": 0, "seq": 3}, "round": 1, "tokens": 7, "processed": 9}
    Handover(folder).put("one", about, np.arange(40, dtype=np.uint8))
    return (folder / "one.held").read_bytes()


# ---------------------------------------------------------------- making documents whole again


def sector(body: bytes) -> bytes:
    """A slot's header record around any body."""
    body = body[: SECTOR - _FRAME.size]
    return (_FRAME.pack(MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body).ljust(SECTOR, b"\0")


def slot_file(body: bytes) -> bytes:
    """The sample file with the body of its newer header record exchanged."""
    whole = bytearray(slot_bytes())
    whole[SECTOR : 2 * SECTOR] = sector(body)
    return bytes(whole)


def slot_meta(document: bytes) -> bytes:
    """The sample file with the meta data of its newer slot exchanged."""
    whole = bytearray(slot_bytes())
    record = decode_record(bytes(whole[SECTOR : 2 * SECTOR]))
    assert record is not None
    values = json.loads(body_of(bytes(whole[SECTOR : 2 * SECTOR])))
    values["meta"] = [len(whole), len(document), xxhash.xxh3_64_intdigest(document)]
    whole[SECTOR : 2 * SECTOR] = sector(json.dumps(values, separators=(",", ":")).encode())
    return bytes(whole) + document


def body_of(record: bytes) -> bytes:
    _, length, _ = _FRAME.unpack_from(record)
    return record[_FRAME.size : _FRAME.size + length]


@functools.cache
def slot_bytes() -> bytes:
    return next(state().glob("epoch-*/fragment-0000.slots")).read_bytes()


@functools.cache
def tape_bytes() -> bytes:
    return max((state() / "tape").iterdir()).read_bytes()


def tape_of(document: bytes) -> bytes:
    """The document as the base of a tape, as a batch behind a good base, and as a note."""
    base = frame(json.dumps({"tape": 1, "epoch": 1, "number": 1, "rows": {"count": 1}}).encode())
    return frame(document) if document.startswith(b'{"tape') else base + frame(document) + frame(b'{"note":{}}')


def handed_of(document: bytes) -> bytes:
    payload = held().partition(b"\n")[2]
    return document.replace(b"\n", b" ") + b"\n" + payload


def tensors_of(document: bytes) -> bytes:
    return len(document).to_bytes(8, "little") + document + bytes(range(240)) * 10


def manifest_of(document: bytes) -> bytes:
    """With the right checksum, where there is a place for one."""
    try:
        values = json.loads(document)
        body = {"files": values["files"], "about": values["about"]}
        text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        values["xxh3"] = xxhash.xxh3_64_hexdigest(text)
        return json.dumps(values).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return document


def fragment_file(document: bytes) -> bytes:
    """A fragment's file of a snapshot with any metadata."""
    header = encode_header([("theta", "float32", (SIZE,))], {"atoll": document.decode("utf-8", "replace")})
    return header + bytes(4 * SIZE)


@functools.cache
def run_record() -> bytes:
    """What a small run leaves on disk, of the machine's own."""
    world = World(SyncConfig(fragments=4, sync_every=4, learners_expected=2), 2)
    world.join_all()
    world.everyone_steps(12)
    first = next(iter(world.learners.values()))
    world.close(first)
    world.to_syncer(fx.FromLearner(world.sessions, DataReport("books", 1, 10, 3, (), (), ())))
    return json.dumps({"rows": world.disk_rows, "fragment_records": world.disk_records}).encode()


@functools.cache
def recorded() -> bytes:
    folder = scratch("store") / "recorded"
    recording = Recording(folder, 1)
    recording.describe({"run": "r", "tensors": []})
    recording.append({"kind": "payload", "checksum": 5}, [b"some bytes"])
    recording.append({"kind": "merge", "fragment": 0, "version": 1})
    recording.close()
    return segment_files(folder / RECORDING_FOLDER)[0].path.read_bytes()


def recorded_of(document: bytes) -> bytes:
    """The document as a segment's first head, or as its second."""
    about = json.dumps({"recording": 1, "epoch": 1, "number": 1}).encode()
    heads = [document] if b'"recording"' in document else [about, document]
    return b"".join(RECORD_FRAME.pack(RECORD_MARKER, len(h), 0, head_checksum(h, 0)) + h for h in heads)
