"""The hand-written encoding of parts is protobuf's, byte for byte."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.messages import FetchHeader
from atoll.errors import PayloadError, RemoteProtocolError
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.limits import PART_BYTES_MAX, PUSH_BYTES_MAX
from atoll.wire.parts import encode_fetch_header, encode_part, encode_refused_part, parse_fetch_refused, parse_part

offsets = st.integers(0, PUSH_BYTES_MAX)


@given(offsets, st.binary(max_size=400), st.booleans())
def test_parts_are_encoded_as_protobuf_does_and_parsed_back(offset: int, data: bytes, first: bool) -> None:
    header = FetchHeader(3, "int4", 1000, 2**64 - 1)
    opening = encode_fetch_header(header) if first else b""
    reference = pb.FetchPart(offset=offset, checksum=xxhash.xxh3_64_intdigest(opening + data), data=data)
    if first:
        reference.header.CopyFrom(pb.FetchHeader.FromString(opening))
    encoded = encode_part(offset, memoryview(data), opening)
    assert encoded == reference.SerializeToString()
    part = parse_part(encoded)
    assert (part.offset, bytes(part.data), bytes(part.opening or b"")) == (offset, data, opening)


def test_push_and_fetch_parts_share_their_field_numbers() -> None:
    data = b"abc"
    push = pb.PushPart(offset=5, checksum=xxhash.xxh3_64_intdigest(data), data=data)
    assert push.SerializeToString() == encode_part(5, memoryview(data))


@given(st.integers(0, 7), st.data())
def test_any_flipped_bit_is_seen(bit: int, data: st.DataObject) -> None:
    """Offsets aside: those are caught when the part is placed, or by the checksum of the whole."""
    opening = encode_fetch_header(FetchHeader(3, "int4", 1000, 7))
    encoded = bytearray(encode_part(0, memoryview(b"some data"), opening))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << bit
    try:
        part = parse_part(bytes(encoded))
    except (PayloadError, RemoteProtocolError):
        return
    # What a flip may still do: turn the field of the refusal or an unknown one on, which no reader mistakes for data.
    assert part.refused is not None or (bytes(part.data), bytes(part.opening or b"")) == (b"some data", opening)


def test_a_refusal_travels_in_a_part() -> None:
    part = parse_part(encode_refused_part("unknown_version", "no such version; fetch the current one"))
    assert part.refused is not None
    assert parse_fetch_refused(part.refused).code == "unknown_version"


def test_unknown_fields_are_skipped_and_doubled_ones_refused() -> None:
    encoded = encode_part(5, memoryview(b"abc"))
    extra = b"\xa0\x06\x01" + b"\xa9\x06" + b"8" * 8 + b"\xb2\x06\x02hi" + b"\xbd\x06" + b"4" * 4  # fields 100 to 103
    assert bytes(parse_part(encoded + extra).data) == b"abc"
    with pytest.raises(RemoteProtocolError, match="doubled"):
        parse_part(encoded + encoded)
    with pytest.raises(RemoteProtocolError, match="wire type 3"):
        parse_part(b"\x0b")


def test_parts_beyond_the_bound_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="at most"):
        parse_part(encode_part(0, memoryview(bytes(PART_BYTES_MAX + 1))))
