"""Models above 2^31 parameters and fragments above 2 GiB: sizes and offsets, with files that have holes instead of
bytes. Nothing here holds more than some hundred megabytes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from atoll.codec import fragment_codec
from atoll.core import TensorSpec, assign, build_layout
from atoll.store import files
from atoll.store.slot_record import SlotRecord, StoredArray, decode_record
from atoll.wire import limits
from atoll.wire.parts import encode_part, parse_part

ROW = 8192
GIB = 1 << 30
HUGE = [TensorSpec(f"w{i}", (1 << 20, ROW), "float32") for i in range(12)]
"""12 tensors of 2^33 values: 103 billion parameters, most of them beyond what 32 bits count."""


def test_a_model_of_a_hundred_billion_parameters_is_laid_out_without_a_gap() -> None:
    layout = build_layout(HUGE, 24)
    assert layout.parameters == 12 * (1 << 33) > 1 << 36
    covered = dict.fromkeys(range(12), 0)
    for fragment in layout.fragments:
        assert fragment.size > 1 << 31, "each is above 2^31 values, and above 2 GiB in any codec"
        for piece in fragment.slices:
            assert piece.start == covered[piece.tensor] and piece.offset % 256 == 0
            covered[piece.tensor] = piece.stop
    assert set(covered.values()) == {1 << 33}
    loads = [0] * 8
    shards = [f"s{n}" for n in range(8)]
    for fragment, name in zip(layout.fragments, assign([f.size for f in layout.fragments], shards), strict=True):
        loads[shards.index(name)] += fragment.size
    assert max(loads) <= 1.2 * min(loads)


@pytest.mark.parametrize("name", ["int4", "int8", "bf16", "fp32"])
def test_sizes_of_payloads_above_two_gigabytes_are_exact(name: str) -> None:
    layout = build_layout(HUGE, 24)
    codec = fragment_codec(name, layout, 0)
    size = layout.fragments[0].size
    one = fragment_codec(name, build_layout([TensorSpec("w", (256,), "float32")], 1), 0).size_max(256)
    assert codec.size_max(size) == size // 256 * one > 2 * GIB


@pytest.mark.parametrize("offset", [2 * GIB - 1, 2 * GIB, 4 * GIB + 5, 60 * GIB])
def test_parts_of_a_payload_say_offsets_that_need_more_than_32_bits(offset: int) -> None:
    assert offset < limits.PUSH_BYTES_MAX
    data = np.arange(200, dtype=np.uint8)
    part = parse_part(encode_part(offset, data.data))
    assert part.offset == offset and bytes(part.data) == data.tobytes()


def test_a_slot_beyond_four_gigabytes_is_written_and_read_where_it_says(tmp_path: Path) -> None:
    """A file of 20 GiB with holes: bytes at its far end come back, and its header takes such offsets."""
    data = np.arange(1 << 20, dtype=np.uint8)
    offset = 20 * GIB + 4096
    path = tmp_path / "far"
    with files.opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
        checksum = files.write_checked(descriptor, data.data, offset, "slot.data.mid")
        back = np.empty_like(data)
        assert files.read_checked(descriptor, back.data, offset) == checksum and (back == data).all()
        assert os.fstat(descriptor).st_blocks * 512 < 64 << 20, "the rest is a hole"
    arrays = (StoredArray("theta", "float32", 5 << 30, offset, checksum),)
    record = SlotRecord(1, 0, 7, 3, arrays, offset + 20 * GIB, 100, 1)
    assert decode_record(record.encode()) == record and record.arrays[0].bytes == 20 * GIB
