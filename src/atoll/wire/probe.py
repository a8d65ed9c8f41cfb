"""How fast the link to a syncer is, both ways: a few status calls on one connection, some with padding.

Up, the request carries a field that no syncer knows and every one skips. Down, a header asks for spaces after the
status, which JSON allows; a syncer that is older does not add them, and then nothing is said of that way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from atoll.errors import UnreachableError
from atoll.wire import limits
from atoll.wire.channel import ClientOptions, call_error, open_channel
from atoll.wire.transport import REPLY_BYTES_KEY, STATUS_METHOD, control_channel_arguments, grpc

PADDING_TAG = (15 << 3) | 2
"""Field 15 of StatusRequest, of the kind that has a length: not in use, and kept for this."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Bytes per second; 0 where it could not be told. On a quick link the calls themselves take most of the time, so
    these are lower bounds."""

    round_trip_s: float
    up_bytes_s: float
    down_bytes_s: float


async def probe_link(options: ClientOptions, size: int = limits.LINK_PROBE_BYTES) -> LinkSpeed:
    """At most `size` bytes each way, within STATUS_S for each call."""
    channel = open_channel(options, control_channel_arguments())
    call = channel.unary_unary(STATUS_METHOD)

    async def ask(request: bytes = b"", reply_bytes: int = 0) -> tuple[float, int]:
        more = ((REPLY_BYTES_KEY, str(reply_bytes)),) if reply_bytes else ()
        began_s = time.monotonic()
        answer = await call(request, metadata=(*options.metadata, *more), timeout=limits.STATUS_S)
        return time.monotonic() - began_s, len(answer)

    try:
        await ask()  # connects
        plain_s, plain_bytes = min([await ask(), await ask()])
        up_s, _ = await ask(padding(size))
        down_s, down_bytes = await ask(reply_bytes=size)
    except grpc.aio.AioRpcError as error:
        failed = call_error(options, error)
        raise failed if isinstance(failed, UnreachableError) else UnreachableError(str(failed)) from None
    finally:
        await channel.close()
    more_bytes = down_bytes - plain_bytes
    down_bytes_s = more_bytes / max(1e-6, down_s - plain_s) if more_bytes > size / 2 else 0.0
    return LinkSpeed(plain_s, size / max(1e-6, up_s - plain_s), down_bytes_s)


def padding(size: int) -> bytes:
    """A request with a field of so many bytes that is skipped."""
    length, left = bytearray(), size
    while left > 0x7F:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([PADDING_TAG, *length, left]) + bytes(size)
