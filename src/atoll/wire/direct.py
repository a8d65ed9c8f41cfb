"""Large payloads over a socket of their own, beside gRPC: what both ends share.

gRPC's Python interface copies every part two or three times with the interpreter's lock held, and a learner's training
thread waits for that lock. Here a part goes from the sender's array to the kernel, and from the kernel straight into
the receiver's payload, in calls that hold no lock. The bytes are those of gRPC's parts, under the same checks:

    ATOLL-BULK/1 and a newline, then T token                      -> W, or R Refused
    P PushOpen                                                    -> G, or R Refused: nothing is sent before G
        parts in any order, then one of length 0                  -> A PushReply
    F FetchRequest                                                -> H FetchHeader and parts in order, or R Refused

A frame is its letter, the length of its body (4 bytes), and the body: a sealed message of atoll.proto, or nothing. A
part is its offset (8 bytes), its length (4), the xxh3-64 of its data (8) and the data. Numbers are little-endian. Every
function here blocks; `cut` from another thread ends it.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from pathlib import Path

import xxhash

from atoll.core import Refused
from atoll.errors import PayloadError, RemoteProtocolError
from atoll.wire.address import is_loopback
from atoll.wire.checks import cut
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.limits import DIRECT_FRAME_BYTES_MAX, DIRECT_KEEPALIVE_S, PART_BYTES_MAX
from atoll.wire.parts import parse_fetch_refused
from atoll.wire.seal import seal, unseal

MAGIC = b"ATOLL-BULK/1\n"
TOKEN, WELCOME, REFUSED = b"T", b"W", b"R"
PUSH, GO, ANSWER = b"P", b"G", b"A"
FETCH, HEADER = b"F", b"H"
FRAME = struct.Struct("<cI")
PART = struct.Struct("<QIQ")
BULK_KEY = "atoll-bulk"
"""Of the trailing metadata of a push or fetch: `port control-port address loopback`, where the server takes payloads
without gRPC, and where it listens itself. Whoever came through another port (a proxy, a tunnel, a port map) does not go
past it. A tunnel may have the same number: see `offered`."""
ACKED = struct.Struct("<120xQQ")
"""Of Linux's tcp_info: bytes that the other side has acknowledged, and bytes that came."""


class Wire:
    """One connection, after its handshake. One thread uses it at a time; any may cut it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # One call then brings a whole part. Under TLS each brings one record (16 KiB): OpenSSL gives no more.
        self._flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
        self.due_s = float("inf")
        """When somebody who watches may cut this connection, by time.monotonic."""

    @property
    def is_quiet(self) -> bool:
        """Between two requests: nothing has come, and no end either."""
        try:
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)  # beneath TLS
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @property
    def moved(self) -> tuple[int, ...]:
        """What has reached the other side, and what has come: bytes that only wait in this kernel do not count. Never
        the same where the system does not tell."""
        try:
            return ACKED.unpack(self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKED.size))
        except (AttributeError, OSError, struct.error):
            return (time.monotonic_ns(),)

    def expect(self, patience_s: float) -> None:
        self.due_s = time.monotonic() + patience_s

    def send(self, *pieces: bytes | memoryview) -> None:
        for piece in pieces:
            if len(piece):
                self._socket.sendall(piece)

    def receive_into(self, room: memoryview) -> None:
        """Fill it. Raises OSError when the other side ends before that."""
        received = 0
        while received < len(room):
            count = self._socket.recv_into(room[received:], 0, self._flags)
            if not count:
                raise ConnectionError("the other side has closed the connection")
            received += count

    def receive(self, size: int) -> bytes:
        buffer = bytearray(size)
        self.receive_into(memoryview(buffer))
        return bytes(buffer)

    # ------------------------------------------------------------ frames

    def send_frame(self, kind: bytes, body: bytes = b"") -> None:
        self.send(FRAME.pack(kind, len(body)) + body)

    def send_message(self, kind: bytes, message: bytes) -> None:
        self.send_frame(kind, seal(message))

    def send_refused(self, code: str, detail: str) -> None:
        self.send_message(REFUSED, bytes(pb.Refused(code=code, detail=cut(detail)).SerializeToString()))

    def receive_frame(self, kinds: bytes) -> tuple[bytes, bytes]:
        """The next frame, which must be one of these kinds."""
        kind, size = FRAME.unpack(self.receive(FRAME.size))
        if kind not in kinds or size > DIRECT_FRAME_BYTES_MAX:
            raise RemoteProtocolError(f"a frame {kind!r} of {size} bytes where one of {kinds!r} was expected")
        return kind, self.receive(size)

    def receive_message(self, kinds: bytes) -> tuple[bytes, bytes | Refused]:
        """The same, without its seal. Raises PayloadError if that is wrong."""
        kind, body = self.receive_frame(kinds)
        message = unseal(body)
        return kind, parse_fetch_refused(memoryview(message)) if kind == REFUSED else message

    # ------------------------------------------------------------ parts

    def send_part(self, offset: int, data: memoryview) -> None:
        head = PART.pack(offset, data.nbytes, xxhash.xxh3_64_intdigest(data))
        sent = 0 if isinstance(self._socket, ssl.SSLSocket) else self._socket.sendmsg((head, data))
        self.send(head[sent:], data[max(0, sent - len(head)) :])

    def receive_head(self) -> tuple[int, int, int]:
        """Offset, length and checksum of the next part."""
        offset, length, checksum = PART.unpack(self.receive(PART.size))
        if length > PART_BYTES_MAX:
            raise RemoteProtocolError(f"a part has {length} bytes of data; at most {PART_BYTES_MAX} are allowed")
        return offset, length, checksum

    def receive_data(self, room: memoryview, offset: int, checksum: int) -> None:
        """The data of a part into its place. Raises PayloadError if it is not what its head says."""
        self.receive_into(room)
        if xxhash.xxh3_64_intdigest(room) != checksum:
            raise PayloadError(f"the part at offset {offset} was corrupted on the way")

    # ------------------------------------------------------------ ends

    def cut(self) -> None:
        """End it at once, whoever is blocked in it. Not `SSLSocket.shutdown`: that takes TLS away under its reader."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._socket.close()


def tuned(connection: socket.socket) -> socket.socket:
    """Small frames go out at once, and a peer that has vanished is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DIRECT_KEEPALIVE_S)
    return connection


def this_loopback() -> str:
    """A name for the loopback of this process. A tunnel has the same addresses, and another machine behind them."""
    try:
        told = Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/net").stat().st_ino)
    except OSError:
        told = socket.gethostname()
    return xxhash.xxh3_64_hexdigest(told.encode())


def offer(place: tuple[str, int], control_port: int) -> tuple[tuple[str, str], ...]:
    return ((BULK_KEY, f"{place[1]} {control_port} {place[0]} {this_loopback()}"),)


def offered(metadata: object, dialled: tuple[str, int], *, in_clear: bool) -> tuple[str, int] | None:
    """Where this metadata sends whoever dialled that host and port. In clear nothing tells who listens there: through a
    loopback it must be the one that the server listens on, and the address, or another user of this machine gets the
    token."""
    words = str(dict(metadata or ()).get(BULK_KEY, "")).split()  # type: ignore[call-overload]
    if len(words) != 4 or not all(n.isascii() and n.isdigit() and len(n) < 6 for n in words[:2]):
        return None
    host, port = dialled[0], int(words[0])
    if int(words[1]) != dialled[1] or not 0 < port < 65536:
        return None
    if not in_clear or not is_loopback(host):
        return host, port
    return (words[2], port) if is_loopback(words[2]) and words[3] == this_loopback() else None
