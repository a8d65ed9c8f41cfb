"""Push and fetch over loopback against a bare TCP socket, in one run.

    python benchmarks/transfer.py [--mib 256] [--repeats 7] [--only socket,gRPC]

Two processes in every case: this one is the learner, the other one the syncer (or a loop around `recv_into` and
`sendall`). Cases take turns within each repetition, so that a busy moment of the machine does not hit one case alone;
best and median are shown. Both sides of TCP reuse one buffer. Atoll's receiving sides return a fresh one each time and
check every part and the whole. "gRPC" is a syncer with `--bulk-port off`, "socket" one without that option: its
payloads of 1 MiB and more go past gRPC. "Parts" are a loop around the same checks, received straight into the payload.

The second table is what a transfer costs its process: CPU time, and what it takes from a thread that computes beside it
and gives the interpreter's lock up and takes it again many times in a millisecond, as one that trains does. That thread
counts its turns; those that it did not get, against those of a quiet time before and after, are the time that it was
held up: by the lock, or by somebody who took its core. On two cores it is both.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from statistics import median

import numpy as np
import xxhash

from atoll.core import (
    FetchHeader,
    FetchKind,
    FetchRequest,
    Hello,
    Identity,
    LearnerMessage,
    PushHeader,
    PushKind,
    PushReply,
)
from atoll.wire import MIB, BulkClient, ClientOptions, SendToLearner, ServerOptions, serve

HELD_UP_S = 2.0
"""Of transfers, for the second table."""


class Sink:
    """A syncer that takes every push, keeps nothing and hands out one content."""

    def __init__(self, content: np.ndarray) -> None:
        self._content = content
        self._checksum = xxhash.xxh3_64_intdigest(content.data)

    def open_session(
        self, session: int, hello: Hello, send: SendToLearner, identity: Identity | None = None
    ) -> None: ...

    def check_sender(self, header: PushHeader) -> None: ...

    def receive(self, session: int, message: LearnerMessage) -> None: ...

    def close_session(self, session: int, reason: str) -> None: ...

    def status(self) -> dict[str, object]:
        return {}

    async def push_begin(self, header: PushHeader) -> int:
        return header.size

    async def push_complete(self, header: PushHeader, payload: np.ndarray) -> PushReply:
        return PushReply(True)

    async def fetch_open(self, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        return FetchHeader(0, "fp32", self._content.nbytes, self._checksum), self._content.data


def content_of(size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)


def syncer_process(size: int, report: Connection, keys: str, bulk_port: int | None) -> None:
    async def main() -> None:
        tls = {"tls_certificate": f"{keys}/cert.pem", "tls_key": f"{keys}/key.pem"} if keys else {}
        server = await serve(Sink(content_of(size)), ServerOptions(bulk_port=bulk_port, **tls))
        report.send(server.address)
        await asyncio.to_thread(report.recv)
        await server.stop(0.0)

    asyncio.run(main())


def socket_process(size: int, report: Connection, parts_bytes: int, keys: str) -> None:
    """Receives `size` bytes and answers with one, or sends `size` bytes: as the first byte of each turn says."""
    buffer = memoryview(content_of(size))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        report.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        if keys:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(f"{keys}/cert.pem", f"{keys}/key.pem")
            connection = context.wrap_socket(connection, server_side=True)
        with connection:
            while turn := connection.recv(1):
                if turn == b"u":
                    receive_all(connection, buffer, parts_bytes)
                    connection.sendall(b"k")
                else:
                    send_all(connection, buffer, parts_bytes)


def connect(port: int, keys: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    if not keys:
        return connection
    return ssl.create_default_context(cafile=f"{keys}/ca.pem").wrap_socket(connection, server_hostname="127.0.0.1")


def send_all(connection: socket.socket, buffer: memoryview, parts_bytes: int) -> None:
    """As one run of bytes, or in parts with the checksum of each before it."""
    if not parts_bytes:
        return connection.sendall(buffer)
    for start in range(0, len(buffer), parts_bytes):
        part = buffer[start : start + parts_bytes]
        connection.sendall(xxhash.xxh3_64_digest(part))
        connection.sendall(part)


def receive_all(connection: socket.socket, buffer: memoryview, parts_bytes: int) -> None:
    """Straight into the payload; parts are checked, and so is the whole."""
    whole, checksum = xxhash.xxh3_64(), memoryview(bytearray(8))
    for start in range(0, len(buffer), parts_bytes or len(buffer)):
        part = buffer[start : start + (parts_bytes or len(buffer))]
        if parts_bytes:
            receive(connection, checksum)
        receive(connection, part)
        if parts_bytes:
            assert xxhash.xxh3_64_digest(part) == checksum
            whole.update(part)


def receive(connection: socket.socket, buffer: memoryview) -> None:
    received = 0
    while received < len(buffer):
        received += connection.recv_into(buffer[received:])


class Trainer(threading.Thread):
    """Computes in Python for some 20 microseconds, then without the interpreter's lock for as long, and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._data = bytes(400_000)
        self.turns = 0
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            for _ in range(400):
                pass
            xxhash.xxh3_64_intdigest(self._data)
            self.turns += 1

    async def turns_per_s(self, work: Callable[[], Awaitable[int]]) -> tuple[float, int]:
        """While this goes on, and what it gives."""
        began, before = time.perf_counter(), self.turns
        count = await work()
        return (self.turns - before) / (time.perf_counter() - began), count


async def hold_up(case: Callable[[], Awaitable[None]], trainer: Trainer) -> tuple[float, float, float]:
    """Milliseconds of one transfer beside the trainer, of CPU time that it takes, and that the trainer is held up."""

    async def quiet() -> int:
        before = time.process_time()
        await asyncio.sleep(HELD_UP_S / 2)
        alone.append((time.process_time() - before) / (HELD_UP_S / 2))
        return 0

    async def busy() -> int:
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < HELD_UP_S:
            await case()
            count += 1
        return count

    alone: list[float] = []
    first, _ = await trainer.turns_per_s(quiet)
    cpu, began = time.process_time(), time.perf_counter()
    beside, count = await trainer.turns_per_s(busy)
    taken, cpu = time.perf_counter() - began, time.process_time() - cpu
    last, _ = await trainer.turns_per_s(quiet)
    lost = max(0.0, 1 - beside / ((first + last) / 2)) * taken
    own = cpu - min(alone) * (taken - lost)  # without what the trainer itself took
    return 1e3 * taken / count, 1e3 * own / count, 1e3 * lost / count


Figures = tuple[dict[str, list[float]], dict[str, tuple[float, float, float]]]


async def measure(
    size: int, repeats: int, places: dict[str, ClientOptions], sockets: dict[str, tuple[socket.socket, int]]
) -> Figures:
    """Seconds of every repetition, by case, and what one costs its process."""
    payload, incoming = content_of(size), memoryview(np.zeros(size, np.uint8))
    header = PushHeader(
        PushKind.CONTRIBUTION, "a", 1, 0, 0, 0, 0, 0, 1, 1, "int4", size, xxhash.xxh3_64_intdigest(payload.data)
    )
    request = FetchRequest(FetchKind.THETA, "a", 1, 0, -1)
    clients = {name: BulkClient(place) for name, place in places.items()}

    def send(connection: socket.socket, parts_bytes: int) -> None:
        connection.sendall(b"u")
        send_all(connection, payload.data, parts_bytes)
        connection.recv(1)

    def take(connection: socket.socket, parts_bytes: int) -> None:
        connection.sendall(b"d")
        receive_all(connection, incoming, parts_bytes)

    async def up(connection: socket.socket, parts_bytes: int) -> None:
        await asyncio.to_thread(send, connection, parts_bytes)

    async def down(connection: socket.socket, parts_bytes: int) -> None:
        await asyncio.to_thread(take, connection, parts_bytes)

    async def push(client: BulkClient) -> None:
        assert (await client.push(header, payload)).accepted

    async def fetch(client: BulkClient) -> None:
        _, content = await client.fetch(request)
        assert content.nbytes == size

    cases: dict[str, Callable[[], Awaitable[None]]] = {}
    for name, place in sockets.items():
        cases[f"{name} up"] = lambda place=place: up(*place)
        cases[f"{name} down"] = lambda place=place: down(*place)
    for name, client in clients.items():
        cases[f"push, {name}"] = lambda client=client: push(client)
        cases[f"fetch, {name}"] = lambda client=client: fetch(client)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 2):
        for name, case in cases.items():
            if repeat < 2:  # the first turns open connections and buffers
                await case()
                continue
            began = time.perf_counter()
            await case()
            seconds[name].append(time.perf_counter() - began)
    trainer = Trainer()
    trainer.start()
    costs = {name: await hold_up(case, trainer) for name, case in cases.items()}
    trainer.ended = True
    for connection, _ in sockets.values():
        connection.close()
    for client in clients.values():
        await client.close()
    return seconds, costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=256, help="payload in MiB (6.1: a fragment of 99.5M parameters)")
    parser.add_argument("--only", default="", help="cases whose names have one of these words, beside TCP")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    size = int(arguments.mib * MIB)
    with tempfile.TemporaryDirectory() as folder:
        keys = f"{folder}/keys"
        make = [sys.executable, "-m", "atoll", "keys", "init", keys, "--name", "127.0.0.1"]
        subprocess.run(make, check=True, capture_output=True)
        seconds, costs = run(size, arguments.repeats, keys, arguments.only)
    machine = f"{os.cpu_count()} CPUs, Python {platform.python_version()}"
    print(f"{arguments.mib} MiB, {arguments.repeats} repetitions, {machine}\n")
    print("| case | best GB/s | median GB/s | best / TCP | median / TCP |\n|---|---|---|---|---|")
    for name, taken in seconds.items():
        reference = seconds["TCP up" if name.startswith("push") or name.endswith("up") else "TCP down"]
        rates = f"{size / min(taken) / 1e9:.2f} | {size / median(taken) / 1e9:.2f}"
        print(f"| {name} | {rates} | {min(reference) / min(taken):.2f} | {median(reference) / median(taken):.2f} |")
    print("\n| one transfer beside a thread that computes | ms | CPU ms here | held up, ms |\n|---|---|---|---|")
    for name, (taken_ms, cpu_ms, held_ms) in costs.items():
        print(f"| {name} | {taken_ms:.2f} | {cpu_ms:.2f} | {held_ms:.2f} |")


SYNCERS = {
    "gRPC, 1 connection": ("", None, 1),
    "gRPC, 2 connections": ("", None, 2),
    "socket, 1 connection": ("", 0, 1),
    "socket, 2 connections": ("", 0, 2),
    "gRPC with TLS": ("tls", None, 1),
    "socket with TLS": ("tls", 0, 1),
}
"""By case: in clear or not, the port for payloads, connections."""


def run(size: int, repeats: int, keys: str, only: str) -> Figures:
    forms = {"TCP": (0, ""), "parts over TCP": (MIB, ""), "parts over TLS": (MIB, keys)}
    words = only.split(",")
    forms = {name: form for name, form in forms.items() if name == "TCP" or any(word in name for word in words)}
    chosen = {name: syncer for name, syncer in SYNCERS.items() if any(word in name for word in words)}
    context = multiprocessing.get_context("spawn")
    processes, ends, kinds = [], [], {}
    for tls, bulk_port, _ in chosen.values():
        if (tls, bulk_port) not in kinds:
            here, there = context.Pipe()
            ends.append(here)
            kinds[tls, bulk_port] = here
            given = (size, there, keys if tls else "", bulk_port)
            processes.append(context.Process(target=syncer_process, args=given, daemon=True))
    pipes = {name: context.Pipe() for name in forms}
    for name, form in forms.items():
        processes.append(context.Process(target=socket_process, args=(size, pipes[name][1], *form), daemon=True))
    for process in processes:
        process.start()
    addresses = {kind: end.recv() for kind, end in kinds.items()}
    places = {
        name: ClientOptions(addresses[tls, bulk_port], stripes=stripes, tls_ca=f"{keys}/ca.pem" if tls else "")
        for name, (tls, bulk_port, stripes) in chosen.items()
    }
    sockets = {name: (connect(pipes[name][0].recv(), tls), parts_bytes) for name, (parts_bytes, tls) in forms.items()}
    figures = asyncio.run(measure(size, repeats, places, sockets))
    for end in ends:
        end.send("stop")
    for process in processes:
        process.join(10)
    return figures


if __name__ == "__main__":
    main()
