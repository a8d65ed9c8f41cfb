"""Somebody at the port for payloads who sends whatever he likes, when he likes."""

from __future__ import annotations

import socket
import ssl
import struct
from typing import Any

import numpy as np
import xxhash
from raw_learner import RawLearner

from atoll.codec import get_codec
from atoll.core import messages as m
from atoll.core.messages import Refused
from atoll.wire import direct, parts
from atoll.wire.direct import Wire
from atoll.wire.limits import PART_BYTES

WAIT_S = 60.0
"""No answer takes longer; nothing is asserted about how long it takes."""


class Peer:
    """One connection. Its calls block."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        plain = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self.socket = tls.wrap_socket(plain, server_hostname="127.0.0.1") if tls else plain
        self.wire = Wire(self.socket)
        self.wire._flags = 0  # its patience has an end

    def greet(self, token: str | bytes) -> bytes:
        """W, or R."""
        self.wire.send(direct.MAGIC)
        self.wire.send_frame(direct.TOKEN, token.encode() if isinstance(token, str) else token)
        return self.wire.receive_frame(direct.WELCOME + direct.REFUSED)[0]

    def open(
        self, header: m.PushHeader | bytes, *, attempt: int = 1, stripes: int = 1, part_bytes: int = PART_BYTES
    ) -> str:
        """Empty: it may send. Else the code of the refusal."""
        opening = (
            header
            if isinstance(header, bytes)
            else parts.encode_push_open(parts.PushOpen(header, attempt, stripes, part_bytes))
        )
        self.wire.send_message(direct.PUSH, opening)
        return self._code(direct.GO)

    def part(self, data: bytes, offset: int = 0, *, length: int | None = None, checksum: int | None = None) -> None:
        checksum = xxhash.xxh3_64_intdigest(data) if checksum is None else checksum
        self.wire.send(direct.PART.pack(offset, len(data) if length is None else length, checksum) + data)

    def end(self) -> m.PushReply:
        self.part(b"")
        return self.answer()

    def answer(self) -> m.PushReply:
        _, said = self.wire.receive_message(direct.ANSWER)
        assert isinstance(said, bytes)
        return parts.parse_push_reply(said)

    def fetch(self, request: m.FetchRequest | bytes) -> str:
        """Empty: its header came, and parts follow. Else the code of the refusal."""
        asked = request if isinstance(request, bytes) else parts.encode_fetch_request(request)
        self.wire.send_message(direct.FETCH, asked)
        return self._code(direct.HEADER)

    def _code(self, good: bytes) -> str:
        _, said = self.wire.receive_message(good + direct.REFUSED)
        return said.code if isinstance(said, Refused) else ""

    def is_cut(self) -> bool:
        """The other side has ended it, whatever it said before."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self.wire.close()

    def abort(self) -> None:
        """Gone without a word: a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def contribution(of: RawLearner, fragment: int = 0, **lies: Any) -> tuple[m.PushHeader, bytes]:
    """Header and payload of this learner's next contribution."""
    assert of.welcome is not None
    codec = of.welcome.config.codec_up
    values = np.full(of.layout.fragments[fragment].size, 0.001, np.float32)
    payload = get_codec(codec).encode_delta(values, None, None)[0].tobytes()
    seq = of._seqs[fragment] = of._seqs.get(fragment, -1) + 1
    honest = {"seq": seq, "base_version": of.versions()[fragment], "steps": 1, "tokens": 32, "codec": codec}
    return of.header(m.PushKind.CONTRIBUTION, fragment, payload, **{**honest, **lies}), payload


def theta_of(of: RawLearner, **lies: Any) -> m.FetchRequest:
    assert of.welcome is not None
    honest = {"learner": of.name, "generation": of.welcome.generation, "secret": of.welcome.secret}
    return m.FetchRequest(**{"kind": m.FetchKind.THETA, "fragment": 0, "version": m.NO_VERSION, **honest, **lies})
