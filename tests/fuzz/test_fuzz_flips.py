"""One bit flipped anywhere, in every format that carries a checksum: it is noticed, or it changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import xxhash
from fuzz_arrays import blobs
from fuzz_engine import scratch
from fuzz_store_samples import SIZE, body_of, held, slot_bytes, snapshots, tape_bytes
from fuzz_wire import HEADER, LEARNER, PUSH_OPENS

from atoll.core import messages as m
from atoll.errors import AtollError
from atoll.learner.checkpoint import CheckpointFile
from atoll.store import SnapshotTarget
from atoll.store.handover import Handover
from atoll.store.slot_reader import read_fragment
from atoll.store.slot_record import SECTOR
from atoll.store.tape_record import read_records
from atoll.wire import convert, parts
from atoll.wire.seal import seal, unseal

FLIPS = {
    "control": 4000,
    "push part": 1500,
    "slots": 2500,
    "tape": 2500,
    "snapshot": 1000,
    "handover": 1500,
    "checkpoint": 1500,
}
"""Bits flipped in each; all of them where there are fewer."""


def flips(data: bytes, count: int, places: list[int]) -> Iterator[bytes]:
    """`data` with one bit of one of the `places` flipped, `count` times; none twice while there are others."""
    bits = [(place, bit) for place in places for bit in range(8)]
    rng = Random(0)
    chosen = rng.sample(bits, count) if count <= len(bits) else [*bits, *rng.choices(bits, k=count - len(bits))]
    for place, bit in chosen:
        flipped = bytearray(data)
        flipped[place] ^= 1 << bit
        yield bytes(flipped)


def everywhere(data: bytes) -> list[int]:
    return list(range(len(data)))


def run(name: str, data: bytes, places: list[int], harmless: Callable[[bytes], bool]) -> None:
    """`harmless` says whether the bytes were refused, or mean what they meant before."""
    cases = 0
    for flipped in flips(data, FLIPS[name], places):
        assert harmless(flipped), f"{name}: a flipped bit went unseen: {flipped.hex()[:4000]}"
        cases += 1
    assert cases == FLIPS[name]


def test_control_messages_with_their_seal() -> None:
    """Counters of tokens and epochs travel in them: a flipped bit would be a wrong ledger, or a syncer fenced out."""
    sealed = [seal(convert.encode_learner_message(message)) for message in LEARNER]
    for number, data in enumerate(sealed):
        expected = convert.parse_learner_message(unseal(data))
        for flipped in flips(data, FLIPS["control"] // len(sealed), everywhere(data)):
            try:
                found = convert.parse_learner_message(unseal(flipped))
            except AtollError:
                continue
            assert found == expected, f"message {number}: {flipped.hex()}"


def test_a_part_of_a_push() -> None:
    part = parts.encode_part(2**20, memoryview(b"some of the payload" * 9), parts.encode_push_open(PUSH_OPENS[0]))

    def meaning(data: bytes) -> Any:
        found = parts.parse_part(data)
        return found.offset, found.opening and parts.parse_push_open(found.opening), bytes(found.data)

    expected = meaning(part)

    def harmless(data: bytes) -> bool:
        try:
            offset, opening, content = meaning(data)
        except AtollError:
            return True
        # The offset is not under the part's checksum: a part in the wrong place is found by the checksum of the whole.
        return (opening, content) == expected[1:] and (offset == expected[0] or bool(HEADER.checksum))

    run("push part", part, everywhere(part), harmless)


def test_a_slot_file() -> None:
    data, path = slot_bytes(), scratch("flips") / "one.slots"
    record = json.loads(body_of(data[SECTOR : 2 * SECTOR]))
    used = [*range(SECTOR, SECTOR + 20 + len(body_of(data[SECTOR : 2 * SECTOR])))]
    for _, _, size, offset, _ in record["arrays"]:
        used += range(offset, offset + 4 * size)
    used += range(record["meta"][0], record["meta"][0] + record["meta"][1])

    def read(content: bytes) -> Any:
        path.write_bytes(content)
        return read_fragment(path, 0)

    good = read(data).good
    assert good.version == 1 and len(used) > 8 * SIZE

    def harmless(content: bytes) -> bool:
        """The newer version as it was, or the older one and a word about it."""
        found = read(content)
        if found.good.version == good.version:
            same = all(found.good.arrays[name].tobytes() == good.arrays[name].tobytes() for name in good.arrays)
            return same and found.good.meta == good.meta
        return found.good.version == 0 and bool(found.faults)

    run("slots", data, used, harmless)


def test_a_tape() -> None:
    data = tape_bytes()
    records, fault = read_records(data)
    assert fault is None and len(records) > 2

    def harmless(content: bytes) -> bool:
        found, problem = read_records(content)
        return problem is not None and found == records[: len(found)]

    run("tape", data, everywhere(data), harmless)


def test_a_snapshot() -> None:
    place = scratch("flips") / "snapshots"
    shutil.copytree(snapshots(), place, dirs_exist_ok=True)
    folder, target = place / "snapshot-00000002", SnapshotTarget(str(place))
    files = sorted(folder.iterdir())
    each = FLIPS["snapshot"] // len(files)
    expected, _ = target.load_newest()
    assert expected is not None and expected.label == 2 and len(files) == 4
    for file in files:
        whole = file.read_bytes()
        for flipped in flips(whole, each, everywhere(whole)):
            file.write_bytes(flipped)
            found, problems = target.load_newest()
            assert found is not None
            if found.label == 2:  # white space, or a field that nothing follows from
                assert (found.rows, found.about) == (expected.rows, expected.about), flipped.hex()
                for index, fragment in expected.fragments.items():
                    assert found.fragments[index].meta == fragment.meta
                    assert all((found.fragments[index].arrays[n] == a).all() for n, a in fragment.arrays.items())
            else:
                assert found.label == 1 and problems
        file.write_bytes(whole)


def test_what_a_leaving_learner_handed_over() -> None:
    data, folder = held(), scratch("flips/handover")

    def harmless(content: bytes) -> bool:
        (folder / "one.held").write_bytes(content)
        found, problems = Handover(folder).load()
        return bool(problems) or (found["one"][0], found["one"][1].tobytes()) == expected

    (folder / "one.held").write_bytes(data)
    about, payload = Handover(folder).load()[0]["one"]
    expected = (about, payload.tobytes())
    run("handover", data, everywhere(data), harmless)


def test_a_learners_checkpoint() -> None:
    data = blobs()[0]
    file = CheckpointFile(scratch("flips"), "a")
    file.folder.mkdir(parents=True, exist_ok=True)
    path = file.folder / f"inner-00000001-{xxhash.xxh3_64_hexdigest(data)}.safetensors"

    def harmless(content: bytes) -> bool:
        path.write_bytes(content)
        captured, problems = file.load()
        return captured is None and bool(problems)

    run("checkpoint", data, everywhere(data), harmless)


@pytest.mark.parametrize("codec", ["int4", "int8"])
def test_a_bulk_payload_with_a_part_in_the_wrong_place_is_refused(codec: str) -> None:
    """The other half of the first test: offsets are guarded by the checksum of the whole."""
    from atoll.errors import RefusedError
    from atoll.wire.assembly import Assembly

    content = np.arange(2 * 2**16, dtype=np.uint32).view(np.uint8)[: 2 * 2**16].copy()
    assembly = Assembly(np.zeros(2 * 2**16, np.uint8), 2**16)
    for offset, other in ((0, 2**16), (2**16, 0)):
        assembly.place(parts.RawPart(offset, None, None, content.data[other : other + 2**16]))
    with pytest.raises(RefusedError) as refused:
        assembly.verify(xxhash.xxh3_64_intdigest(content.data))
    assert refused.value.code == m.Refusal.CHECKSUM
