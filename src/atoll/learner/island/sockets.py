"""`RankLink` over plain TCP sockets, for ranks whose framework has no collectives of the host to be used (JAX).

Every rank has three connections with every other one: for words, for the workers, and for the training threads. What is
sent has its length in front; a rank that expects another one says so instead of waiting. Nothing is pickled. Who
connects must know a secret that the ranks told each other through their framework; the bytes are not encrypted, as
gloo's and NCCL's are not.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.learner.island.link import I64, ISLAND_TIMEOUT_S, SPEAKER, cannot_go_on
from atoll.learner.island.watch import RankWatch

Tell = Callable[[bytes], list[bytes]]
"""Every rank's bytes (TOLD_BYTES_MAX at most), at all ranks: how they find each other."""
TOLD_BYTES_MAX = 1024
SECRET_BYTES = 16
HELLO = struct.Struct(f"<{SECRET_BYTES}sBI")
"""Secret, channel, rank."""
LENGTH = struct.Struct("<Q")
CONNECT_S = 5.0
"""For one address of a rank that has several: the next one is tried after that."""
WORDS, WORK, BESIDE = range(3)
ADDRESSES_MAX = 8


class Channel:
    """One connection with every other rank. Used by one thread at a time."""

    def __init__(self, timeout_s: float) -> None:
        self.peers: dict[int, socket.socket] = {}
        self._timeout_s = timeout_s

    def send(self, data: NDArray[Any]) -> None:
        """To everybody: few bytes, which the system takes at once."""
        packed = LENGTH.pack(data.nbytes) + data.tobytes()
        with said_clearly(self._timeout_s):
            for peer in self.peers.values():
                peer.settimeout(self._timeout_s)
                peer.sendall(packed)

    def swap(self, sends: Mapping[int, NDArray[Any]], receives: Mapping[int, NDArray[Any]]) -> None:
        """All at the same time: two ranks that send first would wait for each other."""
        with said_clearly(self._timeout_s), selectors.DefaultSelector() as selector:
            for rank in sends.keys() | receives.keys():
                peer = self.peers[rank]
                peer.setblocking(False)
                work = _Transfer(rank, peer, sends.get(rank), receives.get(rank))
                selector.register(peer, work.events, work)
            while selector.get_map():
                if not (ready := selector.select(self._timeout_s)):
                    raise TimeoutError("nothing came")
                for key, events in ready:
                    key.data.go_on(events)
                    if not key.data.events:
                        selector.unregister(key.fileobj)
                    elif key.data.events != key.events:
                        selector.modify(key.fileobj, key.data.events, key.data)

    def gather(self, own: NDArray[Any]) -> list[NDArray[Any]]:
        """Every rank's array of this size but the own one."""
        found = {rank: np.empty_like(own) for rank in self.peers}
        self.swap(dict.fromkeys(self.peers, own), found)
        return list(found.values())


class _Transfer:
    """What is on its way between this rank and another one."""

    def __init__(
        self, rank: int, peer: socket.socket, sent: NDArray[Any] | None, received: NDArray[Any] | None
    ) -> None:
        self._rank, self._peer = rank, peer
        self._leaving = [] if sent is None else [memoryview(LENGTH.pack(sent.nbytes)), _bytes_of(sent)]
        self._head = bytearray(LENGTH.size)
        self._coming = [] if received is None else [memoryview(self._head), _bytes_of(received)]
        self._expected = received.nbytes if received is not None else 0

    @property
    def events(self) -> int:
        return (selectors.EVENT_WRITE if self._leaving else 0) | (selectors.EVENT_READ if self._coming else 0)

    def go_on(self, events: int) -> None:
        if events & selectors.EVENT_WRITE and self._leaving:
            self._move(self._leaving, self._peer.send(self._leaving[0]))
        if events & selectors.EVENT_READ and self._coming:
            if not (count := self._peer.recv_into(self._coming[0])):
                raise ConnectionError(f"rank {self._rank} has ended")
            in_head = len(self._coming) == 2
            self._move(self._coming, count)
            if in_head and len(self._coming) < 2 and LENGTH.unpack(self._head)[0] != self._expected:
                raise ValueError(f"rank {self._rank} sends {LENGTH.unpack(self._head)[0]} bytes, not {self._expected}")

    @staticmethod
    def _move(parts: list[memoryview], count: int) -> None:
        parts[0] = parts[0][count:]
        while parts and not parts[0]:
            del parts[0]


class SocketWord:
    def __init__(self, channel: Channel, own: I64) -> None:
        self._channel, self._own = channel, own

    def wait(self) -> I64:
        found = {rank: np.empty_like(self._own) for rank in self._channel.peers}
        self._channel.swap({}, found)
        for other in found.values():
            self._own += other
        return self._own


class SocketLink:
    """Made by all ranks at the same place of their scripts."""

    def __init__(
        self, rank: int, size: int, tell: Tell, *, towards: str = "", timeout_s: float = ISLAND_TIMEOUT_S
    ) -> None:
        """`towards` is a host that every rank has a route to: the address that leads there is one of this rank's."""
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._channels = [Channel(timeout_s) for _ in (WORDS, WORK, BESIDE)]
        with said_clearly(timeout_s), socket.create_server(("", 0), backlog=3 * size) as door:
            own = {"port": door.getsockname()[1], "hosts": _hosts(towards), "machine": _machine()}
            own["secret"] = secrets.token_hex(SECRET_BYTES)
            told = [json.loads(text) for text in tell(json.dumps(own).encode())]
            self._secret = bytes.fromhex(told[SPEAKER]["secret"])
            for other in range(rank):
                for number, channel in enumerate(self._channels):
                    channel.peers[other] = self._reach(told[other], number)
            self._let_in(door)

    def watch(self) -> RankWatch:
        """Look out for ranks that end before they part."""
        return RankWatch(self._channels[BESIDE].peers)

    def close(self) -> None:
        """This rank goes on without the others: those that wait for it shall not."""
        for channel in self._channels:
            for peer in channel.peers.values():
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)

    def _reach(self, other: Mapping[str, Any], channel: int) -> socket.socket:
        near = ["127.0.0.1"] if other["machine"] == _machine() else []
        failed: OSError | None = None
        for host in [*near, *other["hosts"]]:
            try:
                peer = socket.create_connection((host, other["port"]), CONNECT_S)
                peer.sendall(HELLO.pack(self._secret, channel, self.rank))
                if peer.recv(1) == b"\1":
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return peer
                peer.close()
            except OSError as error:
                failed = error
        raise ConnectionError(f"no way to {other['hosts']}, port {other['port']}: {failed}")

    def _let_in(self, door: socket.socket) -> None:
        """The ranks above this one; whoever does not know the secret is left standing."""
        deadline_s = time.monotonic() + self._timeout_s
        while any(len(channel.peers) < self.size - 1 for channel in self._channels):
            if (left_s := deadline_s - time.monotonic()) <= 0:
                raise TimeoutError("not every rank has connected")
            door.settimeout(left_s)
            peer, _ = door.accept()
            peer.settimeout(CONNECT_S)
            try:
                secret, channel, rank = HELLO.unpack(_exactly(peer, HELLO.size))
                known = secrets.compare_digest(secret, self._secret) and channel <= BESIDE and rank > self.rank
                if known and rank < self.size and rank not in self._channels[channel].peers:
                    peer.sendall(b"\1")
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._channels[channel].peers[rank] = peer
                    continue
            except OSError:
                pass
            peer.close()

    # ------------------------------------------------------------ RankLink

    def start(self, word: I64) -> SocketWord:
        self._channels[WORDS].send(word)
        return SocketWord(self._channels[WORDS], word)

    def tell(self, head: I64) -> None:
        others = self._channels[WORK].peers
        if self.rank == SPEAKER:
            self._channels[WORK].swap(dict.fromkeys(others, head), {})
        else:
            self._channels[WORK].swap({}, {SPEAKER: head})

    def add_up(self, values: I64) -> None:
        for other in self._channels[WORK].gather(values):
            values += other

    def exchange(self, sends: Mapping[int, NDArray[Any]], receives: Mapping[int, NDArray[Any]]) -> None:
        self._channels[WORK].swap(sends, receives)

    def exchange_now(self, sends: Mapping[int, NDArray[Any]], receives: Mapping[int, NDArray[Any]]) -> None:
        self._channels[BESIDE].swap(sends, receives)

    def compare(self, text: str) -> list[str]:
        beside, own = self._channels[BESIDE], np.frombuffer(text.encode(), np.uint8)
        sizes = {rank: np.zeros(1, np.int64) for rank in beside.peers}
        beside.swap(dict.fromkeys(beside.peers, np.array([own.size])), sizes)
        found = {rank: np.empty(int(size[0]), np.uint8) for rank, size in sizes.items()}
        beside.swap(dict.fromkeys(beside.peers, own), found)
        return [(own if rank == self.rank else found[rank]).tobytes().decode() for rank in range(self.size)]


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _exactly(peer: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        if not (more := peer.recv(count - len(found))):
            raise ConnectionError("it has gone")
        found += more
    return found


def _machine() -> str:
    """The same for processes that can reach each other at 127.0.0.1, most likely."""
    try:
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return socket.gethostname()


def _hosts(towards: str) -> list[str]:
    """Addresses of this machine that another one may know it by, the likeliest first."""
    found: list[str] = []
    if towards:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((towards, 9))  # sends nothing
                found.append(probe.getsockname()[0])
        except OSError:
            pass
    try:
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    except OSError:
        pass
    return list(dict.fromkeys(found))[:ADDRESSES_MAX]


@contextmanager
def said_clearly(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise cannot_go_on(error, timeout_s) from error
