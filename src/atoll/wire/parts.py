"""Bulk messages: headers through protobuf, parts by hand.

A part is a few small fields and a megabyte of data. The protobuf library would copy the data twice on each side; here
one join makes the outgoing bytes and the incoming data is a view. The bytes are exactly those of protobuf's encoding
of PushPart and FetchPart in `atoll.proto` (tests/wire/test_wire_parts.py holds one against the other):

    08 offset   11 checksum   1a open or header   22 refused   7a data       fields with default values are left out
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash

from atoll.core import FetchHeader, FetchKind, FetchRequest, PushHeader, PushReply, Refused
from atoll.errors import PayloadError, RemoteProtocolError
from atoll.wire import checks
from atoll.wire.convert import parse_refused
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.headers import check_push_header, check_push_reply, kind
from atoll.wire.limits import INNER_PIECES_MAX, PART_BYTES_MAX, PART_BYTES_MIN, PUSH_BYTES_MAX, STRIPES_MAX
from atoll.wire.records import free, inside, parse_bytes, plain, record
from atoll.wire.weight import fields, varint

_FETCH_KINDS = {
    pb.FETCH_UPDATE: FetchKind.UPDATE,
    pb.FETCH_THETA: FetchKind.THETA,
    pb.FETCH_INNER: FetchKind.INNER,
}


@dataclass(frozen=True, slots=True)
class PushOpen:
    """How one transfer is cut and spread: see the message of that name in atoll.proto."""

    header: PushHeader
    attempt_id: int
    stripes: int
    part_bytes: int


@dataclass(frozen=True, slots=True)
class RawPart:
    """The fields of a part as they are on the wire: the nested ones not yet parsed, the data a view of the message.
    The checksum was right (a part with a refusal has none)."""

    offset: int
    opening: memoryview | None  # field 3: PushOpen or FetchHeader
    refused: memoryview | None  # field 4
    data: memoryview


# ---------------------------------------------------------------- parts


def encode_part(offset: int, data: memoryview, opening: bytes = b"") -> bytes:
    """One part with the checksum of its data; `opening` is an encoded PushOpen or FetchHeader for the first one."""
    checksum = _checksum(opening, data)
    fields = bytearray()
    if offset:
        fields += b"\x08" + _varint(offset)
    if checksum:
        fields += b"\x11" + checksum.to_bytes(8, "little")
    if opening:
        fields += b"\x1a" + _varint(len(opening)) + opening
    if not data.nbytes:
        return bytes(fields)
    fields += b"\x7a" + _varint(data.nbytes)
    return b"".join((fields, data))


def encode_refused_part(code: str, detail: str) -> bytes:
    return bytes(pb.FetchPart(refused=pb.Refused(code=code, detail=checks.cut(detail))).SerializeToString())


def parse_part(message: bytes) -> RawPart:
    """Split a part into its fields and check it. Raises PayloadError for a wrong checksum, RemoteProtocolError for all
    else. Fields of other numbers are skipped, as protobuf does: the contract can grow."""
    view = memoryview(message)
    found: dict[int, memoryview] = {}
    for number, wire_type, start, stop in fields(view, 0, len(view)):
        if number in _PART_FIELDS:
            if wire_type != _PART_FIELDS[number] or number in found:
                raise RemoteProtocolError(f"field {number} of a part is doubled or of the wrong type")
            found[number] = view[start:stop]
    data = found.get(15, view[:0])
    if data.nbytes > PART_BYTES_MAX:
        raise RemoteProtocolError(f"a part has {data.nbytes} bytes of data; at most {PART_BYTES_MAX} are allowed")
    place = varint(found[1], 0, len(found[1]))[0] if 1 in found else 0
    offset = checks.count("offset of a part", place, high=PUSH_BYTES_MAX)
    opening = found.get(3)
    if 4 not in found and _checksum(opening or b"", data) != int.from_bytes(found.get(2, b""), "little"):
        raise PayloadError(f"the part at offset {offset} was corrupted on the way")
    return RawPart(offset, opening, found.get(4), data)


def _checksum(opening: bytes | memoryview, data: memoryview) -> int:
    """xxh3-64 of the opening and the data: a flipped bit in a counter of the header must not go unseen either."""
    if not opening:
        return int(xxhash.xxh3_64_intdigest(data))
    hasher = xxhash.xxh3_64(opening)
    hasher.update(data)
    return int(hasher.intdigest())


_PART_FIELDS = {1: 0, 2: 1, 3: 2, 4: 2, 15: 2}
"""Field number -> wire type of the fields that PushPart and FetchPart share."""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# ---------------------------------------------------------------- headers


def _encode(message_class: Any, record: Any) -> bytes:
    return bytes(message_class(**plain(record)).SerializeToString())


encode_push_open = partial(_encode, pb.PushOpen)
encode_push_reply = partial(_encode, pb.PushReply)
encode_fetch_request = partial(_encode, pb.FetchRequest)
encode_fetch_header = partial(_encode, pb.FetchHeader)

_push_open = record(
    PushOpen,
    header=inside(check_push_header),
    attempt_id=free,
    stripes=partial(checks.count, low=1, high=STRIPES_MAX),
    part_bytes=partial(checks.count, low=PART_BYTES_MIN, high=PART_BYTES_MAX),
)
_fetch_request = record(
    FetchRequest,
    kind=partial(kind, _FETCH_KINDS),
    learner=checks.learner_id,
    generation=checks.count,
    fragment=checks.fragment,
    version=checks.version,
    offset=checks.count,
    length=checks.count,
    secret=checks.secret,
)
_fetch_header = record(
    FetchHeader,
    version=checks.count,
    codec=checks.identifier,
    size=partial(checks.count, high=PUSH_BYTES_MAX),
    checksum=free,
)


def parse_push_open(data: memoryview) -> PushOpen:
    return _push_open(parse_bytes(pb.PushOpen, data))


def parse_push_reply(data: bytes) -> PushReply:
    return check_push_reply(parse_bytes(pb.PushReply, data))


def parse_fetch_request(data: bytes) -> FetchRequest:
    request = _fetch_request(parse_bytes(pb.FetchRequest, data))
    if request.kind is FetchKind.INNER:
        checks.slot("FetchRequest.fragment (inner slot)", request.fragment)
        checks.count("FetchRequest.version (piece)", request.version, high=INNER_PIECES_MAX - 1)
    return request


def parse_fetch_header(data: memoryview) -> FetchHeader:
    return _fetch_header(parse_bytes(pb.FetchHeader, data))


def parse_fetch_refused(data: memoryview) -> Refused:
    return parse_refused(parse_bytes(pb.Refused, data))
