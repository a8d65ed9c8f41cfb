"""What comes back from disks and buckets: slots, tape, snapshots, handover, epoch and claims.

Most formats carry checksums, behind which mutated bytes never get. So each is fuzzed twice: the bytes as they are, and
the documents inside with lengths and checksums made right again, as a newer version or a broken memory would leave
them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import xxhash
from fuzz_engine import Make, Target, mutated, mutated_json, scratch
from fuzz_store_samples import (
    META,
    ROWS,
    body_of,
    fragment_file,
    handed_of,
    held,
    manifest_of,
    recorded,
    recorded_of,
    run_record,
    sector,
    slot_bytes,
    slot_file,
    slot_meta,
    snapshots,
    state,
    tape_bytes,
    tape_of,
    tensors_of,
)
from world import TENSORS

from atoll.core import effects as fx
from atoll.core.config import SyncConfig
from atoll.core.durable import Recovery
from atoll.core.messages import Hello
from atoll.core.syncer_machine import SyncerMachine
from atoll.errors import ConfigError, PayloadError, StoreError
from atoll.instruments.replay.recording_reader import SegmentReader
from atoll.store import SnapshotTarget, export_model, open_store, read_state
from atoll.store.documents import json_object
from atoll.store.epoch import Tenure, _read_small
from atoll.store.handover import Handover
from atoll.store.loaded import LoadedFragment
from atoll.store.manifest import MANIFEST_FILE, ROWS_FILE, decode_manifest
from atoll.store.recording import SegmentFile
from atoll.store.recover import CLAIMS_FILE
from atoll.store.slot_reader import read_fragment
from atoll.store.slot_record import SECTOR, SlotRecord, decode_record
from atoll.store.snapshots import load_snapshot
from atoll.store.tape_record import read_history, read_records, read_rows
from atoll.store.tensorfile import decode_file

# ---------------------------------------------------------------- files in their places


def in_file(path: Path, read: Callable[[], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        path.write_bytes(data)
        return read()

    return parse


def _read_slots(path: Path) -> Callable[[bytes], Any]:
    return in_file(path, lambda: read_fragment(path, 0))


def _check_slots(read: Any) -> None:
    """Only what was written comes back, or a document whose arrays lie inside of the file."""
    if read.good is not None:
        assert isinstance(read.good.meta, dict) and isinstance(read.good.version, int)
        for name in read.good.arrays:
            assert isinstance(name, str)


def _state_copy(name: str) -> Path:
    copy = scratch("store") / name
    if not copy.exists() or not any(copy.iterdir()):
        shutil.copytree(state(), copy, dirs_exist_ok=True)
    return copy


def _read_epoch(folder: Path) -> Callable[[bytes], Any]:
    """What an opening and a commit make of it. Neither may raise anything but being fenced."""
    from atoll.store.epoch import _last_epoch

    def read() -> Any:
        problems: list[str] = []
        epoch = _last_epoch(folder, problems)
        assert 0 <= epoch <= 2**62, "an epoch that nobody can count on from"
        tenure = Tenure(folder, epoch, problems, -1)
        tenure.check()
        return _read_small(folder / "epoch.json")

    return in_file(folder / "epoch.json", read)


def _snapshot_with(name: str, file: str) -> Callable[[bytes], Any]:
    """A place with one snapshot in which `file` is exchanged, and the manifest made right for it."""
    folder = scratch("store") / name
    shutil.copytree(snapshots() / "snapshot-00000002", folder / "snapshot-00000002", dirs_exist_ok=True)
    target = SnapshotTarget(str(folder))
    manifest = json.loads((folder / "snapshot-00000002" / MANIFEST_FILE).read_bytes())

    def parse(data: bytes) -> Any:
        (folder / "snapshot-00000002" / file).write_bytes(data)
        if file != MANIFEST_FILE:
            manifest["files"][file] = {"size": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}
            document = manifest_of(json.dumps(manifest).encode())
            (folder / "snapshot-00000002" / MANIFEST_FILE).write_bytes(document)
        loaded, problems = target.load_newest()
        assert loaded is not None or problems, "a snapshot that cannot be used is passed over in silence"
        if loaded is not None:
            assert isinstance(loaded.rows, dict) and isinstance(loaded.about, dict)
            assert all(isinstance(index, int) and isinstance(f.meta, dict) for index, f in loaded.fragments.items())
        return load_snapshot(str(folder))

    return parse


def _load_handed(folder: Path) -> Callable[[bytes], Any]:
    def read() -> Any:
        found, problems = Handover(folder).load()
        assert len(found) + len(problems) == 1
        return found

    return in_file(folder / "one.held", read)


def _either(*makes: Make) -> Make:
    def make(rng: Random) -> bytes:
        return rng.choice(makes)(rng)

    return make


def _restore(data: bytes) -> Any:
    """Continue from it. The books must add up, or the record be refused."""
    document = json_object(data, "the record")
    rows, fragment_records = document.get("rows"), document.get("fragment_records")
    if not isinstance(rows, dict) or not isinstance(fragment_records, dict):
        raise PayloadError("as `read_state` would have said")
    known = {
        index: fragment_record
        for index in range(4)
        if isinstance(fragment_record := fragment_records.get(str(index)), dict)
    }
    machine = SyncerMachine(SyncConfig(sync_every=4), "other", 2)
    machine.restore(Recovery(rows, known, exact=True), 0)
    machine.stats()
    for fragment in range(machine.config.fragments):
        line = machine.ledger.fragment_totals(fragment)
        assert line.processed == line.merged + line.pending + sum(line.discarded.values())
        json.dumps(machine.fragment_record(fragment))
    hello = Hello("l0", "new", 2, TENSORS)
    for number in range(3):
        machine.handle(fx.SessionOpened(number, hello), 10**10 * number)
        machine.handle(fx.Tick(), 10**10 * number)
    return machine


def _read_recording(data: bytes) -> Any:
    path = scratch("store") / "recording-00001-00000001.log"
    path.write_bytes(data)
    with SegmentReader(SegmentFile(1, 1, path)) as reader:
        records = list(reader.records())
        assert all(isinstance(record.kind, str) and record.where for record in records)
        for record in records:
            target = np.empty(min(10, record.body_bytes), np.uint8)
            with contextlib.suppress(PayloadError):
                reader.read_body(record, 0, target, 5)
        return records, reader.fault


def _export(data: bytes) -> Any:
    rows = json_object(data, "the rows")
    theta = np.zeros(512, np.float32)
    fragments = {0: LoadedFragment(1, {}, {"theta": theta})}
    export_model(rows, fragments, scratch("store") / "model.safetensors")


def store_targets() -> list[Target]:
    record = SlotRecord(3, 0, 7, 9, (), 8192, 20, 5).encode()
    slots = slot_bytes()
    bodies = [body_of(slots[:SECTOR]), body_of(slots[SECTOR : 2 * SECTOR]), body_of(record)]
    metas = [json.dumps(META).encode()]
    tape = tape_bytes()
    documents = [
        json.dumps({"tape": 1, "epoch": 1, "number": 1, "lost_notes": 0, "rows": ROWS}).encode(),
        json.dumps({"rows": {"member/a": None, "count": 3}}).encode(),
        json.dumps({"note": {"kind": "Committed"}}).encode(),
    ]
    manifest = (snapshots() / "snapshot-00000002" / MANIFEST_FILE).read_bytes()
    old = json.dumps({"format": 1, "files": [["rows.json", 2, "ab"]], "about": {}}).encode()
    fragment = (snapshots() / "snapshot-00000002" / "fragment-0000.safetensors").read_bytes()
    header = fragment[8 : 8 + int.from_bytes(fragment[:8], "little")]
    about = json.dumps({"fragment": 0, "version": 3, "meta": META}).encode()
    line = held().partition(b"\n")[0]
    claims = [b'{"fragments": {"0": [1, 4], "1": null}}']
    epochs = [b'{"epoch": 2, "pid": 17, "host": "here"}']
    row = {"format": 1, "run": "r", "fragments": 1, "tensors": [["w", [30, 10], "float32", "rda"]], "seeded": True}
    heads = [
        b'{"recording": 1, "epoch": 1, "number": 1, "run": "r"}',
        b'{"kind": "merge", "fragment": 0, "version": 1}',
    ]
    exported = json.dumps({"run": row}).encode()
    tapes, claimed, epoch_state = _state_copy("taped"), _state_copy("claimed"), _state_copy("epochs")
    newest = max((tapes / "tape").iterdir())
    with open_store(claimed) as store:  # claims count for what older epochs have left
        store.load()
    claims_file = max(claimed.glob("epoch-*")) / CLAIMS_FILE
    folder = scratch("store")

    def read_claims() -> Any:
        return read_state(claimed)

    def read_tape() -> Any:
        problems: list[str] = []
        list(read_history(tapes, problems))
        rows, told = read_rows(tapes / "tape")
        assert isinstance(rows, dict)
        return rows, told

    return [
        Target(
            "store.slot_record",
            mutated([slots[:SECTOR], slots[SECTOR : 2 * SECTOR], record]),
            decode_record,
            3000,
            (PayloadError,),
        ),
        Target("store.slot_record.body", mutated_json(bodies, sector), decode_record, 7000, (PayloadError,)),
        Target("store.slots", mutated([slots[:14_000]]), _read_slots(folder / "bytes.slots"), 1200, check=_check_slots),
        Target(
            "store.slots.body",
            mutated_json(bodies, slot_file),
            _read_slots(folder / "body.slots"),
            1500,
            check=_check_slots,
        ),
        Target(
            "store.slots.meta",
            mutated_json(metas, slot_meta),
            _read_slots(folder / "meta.slots"),
            800,
            check=_check_slots,
        ),
        Target("store.tape", mutated([tape]), read_records, 3000),
        Target("store.tape.records", mutated_json(documents, tape_of), read_records, 3000),
        Target("store.tape.rows", mutated_json(documents, tape_of), in_file(newest, read_tape), 1500, (StoreError,)),
        Target(
            "store.manifest",
            _either(mutated([manifest, old]), mutated_json([manifest, old])),
            decode_manifest,
            3000,
            (PayloadError, StoreError),
        ),
        Target(
            "store.manifest.body",
            mutated_json([manifest, old], manifest_of),
            decode_manifest,
            3000,
            (PayloadError, StoreError),
        ),
        Target(
            "store.snapshot.manifest",
            mutated_json([manifest, old], manifest_of),
            _snapshot_with("m", MANIFEST_FILE),
            400,
            (StoreError,),
        ),
        Target(
            "store.snapshot.rows",
            mutated_json([json.dumps(ROWS).encode()]),
            _snapshot_with("r", ROWS_FILE),
            200,
            (StoreError,),
        ),
        Target(
            "store.snapshot.fragment",
            mutated([fragment]),
            _snapshot_with("f", "fragment-0000.safetensors"),
            200,
            (StoreError,),
        ),
        Target(
            "store.snapshot.about",
            mutated_json([about], fragment_file),
            _snapshot_with("a", "fragment-0000.safetensors"),
            250,
            (StoreError,),
        ),
        Target(
            "store.tensorfile",
            mutated([fragment]),
            lambda data: decode_file(np.frombuffer(data, np.uint8)),
            3000,
            (PayloadError,),
        ),
        Target(
            "store.tensorfile.header",
            mutated_json([header], tensors_of),
            lambda data: decode_file(np.frombuffer(data, np.uint8)),
            6000,
            (PayloadError,),
        ),
        Target("store.handover", mutated([held()]), _load_handed(scratch("store/held-bytes")), 1000),
        Target("store.handover.line", mutated_json([line], handed_of), _load_handed(scratch("store/held-line")), 1500),
        Target("store.recording", mutated([recorded()]), _read_recording, 1500, (StoreError,)),
        Target("store.recording.heads", mutated_json(heads, recorded_of), _read_recording, 1500, (StoreError,)),
        Target("store.record", mutated_json([run_record()]), _restore, 1200, (StoreError, ConfigError, PayloadError)),
        Target("store.export", mutated_json([exported]), _export, 800, (StoreError, ConfigError, PayloadError)),
        Target(
            "store.epoch", _either(mutated(epochs), mutated_json(epochs)), _read_epoch(epoch_state), 1500, (StoreError,)
        ),
        Target("store.claims", _either(mutated(claims), mutated_json(claims)), in_file(claims_file, read_claims), 800),
    ]
