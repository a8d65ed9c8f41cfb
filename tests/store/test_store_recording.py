"""The recording on disk: what was synced comes back whole, whatever is cut off or flipped, and nothing is believed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.errors import PayloadError, StoreError
from atoll.instruments.chaos import failpoints
from atoll.instruments.replay.recording_reader import SegmentReader
from atoll.store import Recording, RecordPosition, open_store, segment_files
from atoll.store.recording import FRAME, HEAD_BYTES_MAX, MARKER, head_checksum
from atoll.store.tape import TAPE_FILES_ALL

damage = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
BODY_BYTES = 3000


def body_of(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, BODY_BYTES, np.uint8)


def append(recording: Recording, number: int) -> RecordPosition:
    body = body_of(number)
    return recording.append({"kind": "payload", "n": number, "checksum": xxhash.xxh3_64_intdigest(body)}, [body.data])


def write(state: Path, count: int, *, epoch: int = 1, bytes_max: int = 1 << 20) -> None:
    recording = Recording(state, epoch, bytes_max=bytes_max)
    recording.describe({"run": "r"})
    for number in range(count):
        append(recording, number).sync()
    recording.close()


def read(state: Path) -> tuple[list[int], list[str]]:
    """The numbers of all records whose bodies are right, and what was wrong. A wrong body is a fault."""
    found: list[int] = []
    faults: list[str] = []
    for segment in segment_files(state / "recording"):
        with SegmentReader(segment) as reader:
            for record in reader.records():
                target = np.empty(BODY_BYTES, np.uint8)
                try:
                    reader.read_body(record, 0, target, record.head["checksum"])
                except PayloadError as error:
                    faults.append(str(error))
                    continue
                assert target.tobytes() == body_of(record.head["n"]).tobytes()
                found.append(record.head["n"])
            faults += [reader.fault] if reader.fault else []
    return found, faults


def only_segment(state: Path) -> Path:
    (segment,) = segment_files(state / "recording")
    return segment.path


def test_records_come_back_in_order_and_segments_stay_small(tmp_path: Path) -> None:
    write(tmp_path, 20, bytes_max=10_000)
    write(tmp_path, 3, epoch=2)
    segments = segment_files(tmp_path / "recording")
    assert [(s.epoch, s.number) for s in segments] == [(1, n) for n in range(1, 6)] + [(2, 1)]
    assert all(segment.path.stat().st_size <= 10_000 + BODY_BYTES + 200 for segment in segments)
    assert read(tmp_path) == ([*range(20), *range(3)], [])
    with SegmentReader(segments[0]) as reader:
        assert reader.about["run"] == "r" and reader.about["epoch"] == 1


def test_bodies_of_several_arrays_and_of_none(tmp_path: Path) -> None:
    recording = Recording(tmp_path, 1)
    a, b = np.arange(5, dtype=np.float32), np.arange(7, dtype=np.float32)
    recording.append({"kind": "state"}, [a.data, b.data])
    recording.append({"kind": "merge"}).sync()
    recording.close()
    with SegmentReader(segment_files(tmp_path / "recording")[0]) as reader:
        state, merge = list(reader.records())
        assert (state.kind, merge.kind, merge.body_bytes) == ("state", "merge", 0)
        found = np.empty(7, np.float32)
        reader.read_body(state, a.nbytes, found, xxhash.xxh3_64_intdigest(b))
        assert found.tobytes() == b.tobytes()
        with pytest.raises(PayloadError, match="are needed"):
            reader.read_body(state, a.nbytes + 1, found, 0)


@damage
@given(st.data())
def test_a_recording_that_is_cut_off_gives_what_is_before_the_cut(tmp_path: Path, data: st.DataObject) -> None:
    state = tmp_path / str(len(list(tmp_path.iterdir())))
    write(state, 4)
    path = only_segment(state)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    found, faults = read(state)
    assert found == list(range(len(found)))
    assert len(found) == 4 if cut == len(whole) else len(found) < 4
    record = (len(whole) - whole.find(MARKER, 1)) / 4
    assert bool(faults) == ((cut - whole.find(MARKER, 1)) % record != 0 or cut < whole.find(MARKER, 1))


@damage
@given(st.data())
def test_a_flipped_bit_is_never_taken_for_a_record(tmp_path: Path, data: st.DataObject) -> None:
    state = tmp_path / str(len(list(tmp_path.iterdir())))
    write(state, 4)
    path = only_segment(state)
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    found, faults = read(state)  # compares every body that is found
    assert len(found) < 4 and faults


@damage
@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_harm(tmp_path: Path, noise: bytes) -> None:
    folder = tmp_path / "recording"
    folder.mkdir(exist_ok=True)
    for data in (noise, MARKER + noise):
        (folder / "recording-00001-00000001.log").write_bytes(data)
        found, faults = read(tmp_path)
        assert found == [] and len(faults) == 1  # an empty file has no beginning either


def test_lengths_are_compared_with_the_file_before_anything_is_allocated(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    folder.mkdir()
    for head_bytes, body_bytes in ((HEAD_BYTES_MAX, 0), (2**32 - 1, 0), (2, 2**63)):
        frame = FRAME.pack(MARKER, head_bytes, body_bytes, head_checksum(b"{}", body_bytes)) + b"{}"
        (folder / "recording-00001-00000001.log").write_bytes(frame)
        assert read(tmp_path)[0] == []


def test_heads_that_are_no_objects_and_foreign_segments_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = only_segment(tmp_path)
    whole = path.read_bytes()

    def record(head: bytes) -> bytes:
        return FRAME.pack(MARKER, len(head), 0, head_checksum(head, 0)) + head

    for head in (b"[]", b"{", b"\xff", b"[" * 10_000, b'{"kind": 1}'):
        path.write_bytes(record(head))
        assert read(tmp_path)[0] == [] and read(tmp_path)[1]
    path.write_bytes(record(b'{"recording": 99}'))
    with pytest.raises(StoreError, match="install a newer atoll"):
        read(tmp_path)
    path.write_bytes(whole)
    path.rename(path.with_name("recording-00007-00000001.log"))
    with pytest.raises(StoreError, match="its own name back"):
        read(tmp_path)


def test_a_failed_write_leaves_what_was_there_and_the_next_record_goes_elsewhere(tmp_path: Path) -> None:
    recording = Recording(tmp_path, 1)
    append(recording, 0).sync()
    size = only_segment(tmp_path).stat().st_size
    with failpoints.arm("tape.append.mid:2-2:enospc"), pytest.raises(OSError, match="No space"):
        append(recording, 1)
    assert only_segment(tmp_path).stat().st_size == size, "a full disk gets its room back"
    append(recording, 2).sync()
    recording.close()
    assert read(tmp_path) == ([0, 2], []) and len(segment_files(tmp_path / "recording")) == 2


def test_a_segment_that_cannot_be_begun_leaves_nothing(tmp_path: Path) -> None:
    recording = Recording(tmp_path, 1)
    for plan in ("tape.create:1-1:enospc", "tape.append.mid:1-1:enospc", "tape.folder.sync:1-1:eio"):
        with failpoints.arm(plan), pytest.raises(OSError):
            append(recording, 0)
        assert segment_files(tmp_path / "recording") == []
    append(recording, 0).sync()
    recording.close()
    assert read(tmp_path) == ([0], [])


def test_after_a_failed_sync_everybody_hears_of_it_and_the_file_is_left_alone(tmp_path: Path) -> None:
    recording = Recording(tmp_path, 1)
    safe = append(recording, 0)
    safe.sync()
    first, second = append(recording, 1), append(recording, 2)
    with failpoints.arm("tape.append.sync:1-1:eio"), pytest.raises(OSError):
        first.sync()
    with pytest.raises(OSError) as told:
        second.sync()  # although this sync would work: nobody knows what the disk holds
    assert told.value.errno == errno.EIO
    safe.sync()
    append(recording, 3).sync()
    recording.close()
    assert [s.number for s in segment_files(tmp_path / "recording")] == [1, 2]
    assert 0 in read(tmp_path)[0] and read(tmp_path)[0][-1] == 3


def test_one_sync_serves_all_before_it(tmp_path: Path) -> None:
    recording = Recording(tmp_path, 1)
    places = [append(recording, number) for number in range(3)]
    places[-1].sync()
    with failpoints.arm("tape.append.sync:1:eio"):
        for place in places:
            place.sync()
    recording.close()


def test_a_rolled_segment_is_synced_before_the_next_begins(tmp_path: Path) -> None:
    recording = Recording(tmp_path, 1, bytes_max=1)
    place = append(recording, 0)
    append(recording, 1)
    with failpoints.arm("tape.append.sync:1:eio"):
        place.sync()
    recording.close()


def test_no_tape_file_is_dropped_while_recording(tmp_path: Path) -> None:
    for _ in range(20):
        with open_store(tmp_path, tape_files_kept=TAPE_FILES_ALL) as store:
            store.note({"epoch": store.epoch})
    assert len(list((tmp_path / "tape").glob("*.log"))) == 20
    assert min((tmp_path / "tape").glob("*.log")).name.startswith("tape-00001-")
