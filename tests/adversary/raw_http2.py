"""HTTP/2 by hand, for callers that do what no honest library does: calls without an end, bodies that are never whole,
connections that say nothing. Only what these attacks need (RFC 9113 and 7541): headers are literals without Huffman."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
FRAME_BYTES_MAX = 16_384
STEP_S = 60.0
"""No wait for the syncer is longer."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """Literal header fields without indexing. Names and values below 127 bytes."""
    block = b""
    for name, value in fields:
        block += b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block


def call_headers(method: str, more: Iterable[tuple[str, str]] = ()) -> bytes:
    fields = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "syncer")]
    return header_block([*fields, ("content-type", "application/grpc"), ("te", "trailers"), *more])


class RawConnection:
    """One connection that sends what it is told, within the windows that the syncer grants. What the syncer says is
    thrown away, but for which calls it ended and with which status; pings and settings are acknowledged, so that the
    connection looks alive."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=STEP_S)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self._last_stream = -1
        self._input = b""
        self._window, self._initial_window = 65_535, 65_535
        self._used: dict[int, int] = {}
        """Bytes sent on each stream, less what the syncer has granted on top."""
        self.greeted = False
        self.is_open = True
        self.ended: dict[int, bytes] = {}
        """Calls that the syncer has ended, with the frame that ended them."""

    def close(self) -> None:
        self.socket.close()

    def greet(self) -> RawConnection:
        self.send(PREFACE + frame(SETTINGS, 0, 0))
        self.read_until(lambda: self.greeted)
        return self

    def send(self, data: bytes) -> bool:
        """False once the syncer has closed the connection, or takes nothing more."""
        try:
            self.socket.settimeout(STEP_S)
            self.socket.sendall(data)
        except OSError:
            self.is_open = False
        return self.is_open

    def begin_call(self, method: str, more: Iterable[tuple[str, str]] = ()) -> int:
        """Headers without an end; returns the stream."""
        self._last_stream += 2
        self._used[self._last_stream] = 0
        self.send(frame(HEADERS, END_HEADERS, self._last_stream, call_headers(method, more)))
        return self._last_stream

    def send_body(self, stream: int, body: bytes) -> int:
        """As much of this as the syncer takes; returns how much that was. The call has no end afterwards either."""
        sent = 0
        while sent < len(body) and self.is_open and stream not in self.ended:
            room = min(FRAME_BYTES_MAX, self._window, self._initial_window - self._used[stream], len(body) - sent)
            if room <= 0:
                if not self.read_until(lambda: min(self._window, self._initial_window - self._used[stream]) > 0, 1.0):
                    break
                continue
            self.send(frame(DATA, 0, stream, body[sent : sent + room]))
            self._window, self._used[stream], sent = self._window - room, self._used[stream] + room, sent + room
            if sent % (64 * FRAME_BYTES_MAX) < FRAME_BYTES_MAX:
                self.read()
        return sent

    def read_until(self, condition: Callable[[], bool], wait_s: float = STEP_S) -> bool:
        """Take in what comes until this holds. False if it does not within this time, or the connection was closed."""
        deadline_s = time.monotonic() + wait_s
        while not condition():
            if not self._receive(deadline_s - time.monotonic()):
                return condition()
        return True

    def read(self, wait_s: float = 0.001) -> bool:
        """Take in what comes, until nothing does for so long. False once the connection is closed."""
        while self._receive(wait_s):
            pass
        return self.is_open

    def _receive(self, wait_s: float) -> bool:
        try:
            self.socket.settimeout(max(wait_s, 0.001))
            data = self.socket.recv(65_536)
        except TimeoutError:
            return False
        except OSError:
            data = b""
        self.is_open = self.is_open and bool(data)
        self._input += data
        while len(self._input) >= 9:
            length = int.from_bytes(self._input[:3], "big")
            if len(self._input) < 9 + length:
                break
            kind, flags, stream = self._input[3], self._input[4], int.from_bytes(self._input[5:9], "big")
            payload, self._input = self._input[9 : 9 + length], self._input[9 + length :]
            self._take(kind, flags, stream, payload)
        return self.is_open

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == INITIAL_WINDOW_SIZE:
                    self._initial_window = value
            self.greeted = True
            self.send(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == WINDOW_UPDATE:
            self._used[stream] -= int.from_bytes(payload, "big")
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.ended.setdefault(stream, payload)


def grpc_message(body: bytes, size: int | None = None, compressed: bool = False) -> bytes:
    """The five bytes in front of a message, and as much of it as is given."""
    return bytes([compressed]) + struct.pack(">I", len(body) if size is None else size) + body
