"""How much memory a control message would take, judged from its bytes before protobuf allocates any of it.

Two bytes are an empty TensorSpec, and protobuf keeps 80 for it: 128 MiB of them, which is what a Hello may have, would
take five gigabytes before the number of tensors could be checked. So large messages are walked first: only a Hello may
be large, by many tensors of an ordinary size and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from atoll.errors import RemoteProtocolError
from atoll.wire import limits

_HELLO = 1
"""LearnerMessage.hello."""
_FIELDS_MAX = limits.TENSORS_MAX + limits.OUTSTANDING_MAX + 64


def weigh_learner_message(data: bytes) -> None:
    """Raises RemoteProtocolError for bytes that would take far more memory than they have."""
    if len(data) <= limits.UNWEIGHED_BYTES_MAX:
        return
    count = 0
    for number, _, start, stop in fields(data, 0, len(data)):
        if number != _HELLO:
            raise RemoteProtocolError(f"a message of {len(data)} bytes; only a Hello may be that large")
        for _, _, begin, end in fields(data, start, stop):
            count += 1
            if count > _FIELDS_MAX or end - begin > limits.FIELD_BYTES_MAX:
                raise RemoteProtocolError(f"a Hello of {len(data)} bytes with too many tensors, or one too large")


def weigh_syncer_message(data: bytes) -> None:
    if len(data) > limits.SYNCER_MESSAGE_BYTES_MAX:
        raise RemoteProtocolError(f"a message of {len(data)} bytes; at most {limits.SYNCER_MESSAGE_BYTES_MAX} are sent")


def fields(data: bytes | memoryview, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, wire type, start, stop) of every protobuf field's content in data[start:stop]."""
    while start < stop:
        key, start = varint(data, start, stop)
        kind = key & 7
        if key >> 3 == 0:
            raise RemoteProtocolError("a message has a field with number 0, which protobuf does not know")
        if kind == 2:
            size, start = varint(data, start, stop)
        elif kind == 0:
            _, after = varint(data, start, stop)
            size = after - start
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise RemoteProtocolError(f"a message has a field of unknown wire type {kind}")
        if size > stop - start:
            raise RemoteProtocolError(f"a message ends inside a field of {size} bytes")
        yield key >> 3, kind, start, start + size
        start += size


def varint(data: bytes | memoryview, start: int, stop: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if start >= stop:
            break
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
    raise RemoteProtocolError("a message ends inside a number or holds one of more than 10 bytes")
