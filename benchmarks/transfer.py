"""Push and fetch over loopback against a bare TCP socket, in one run.

    python benchmarks/transfer.py [--mib 256] [--repeats 7]

Two processes in every case: this one is the learner, the other one the syncer (or a loop around `recv_into` and
`sendall`). Cases take turns within each repetition, so that a busy moment of the machine does not hit one case alone;
best and median are shown. Both sides of TCP reuse one buffer. Atoll's receiving sides return a fresh one each time and
check every part and the whole. "Parts over TCP" and "over TLS" is what Atoll could have without gRPC: the same checks,
received straight into the payload.
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

STRIPES = (1, 2, 4)


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


def syncer_process(size: int, report: Connection, keys: str) -> None:
    async def main() -> None:
        tls = {"tls_certificate": f"{keys}/cert.pem", "tls_key": f"{keys}/key.pem"} if keys else {}
        server = await serve(Sink(content_of(size)), ServerOptions(**tls))
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


async def measure(
    size: int, repeats: int, places: dict[str, ClientOptions], sockets: dict[str, tuple[socket.socket, int]]
) -> dict[str, list[float]]:
    """Seconds of every repetition, by case."""
    payload, incoming = content_of(size), memoryview(np.zeros(size, np.uint8))
    header = PushHeader(
        PushKind.CONTRIBUTION, "a", 1, 0, 0, 0, 0, 0, 1, 1, "int4", size, xxhash.xxh3_64_intdigest(payload.data)
    )
    request = FetchRequest(FetchKind.THETA, "a", 1, 0, -1)
    clients = {name: BulkClient(place) for name, place in places.items()}

    async def up(connection: socket.socket, parts_bytes: int) -> None:
        connection.sendall(b"u")
        send_all(connection, payload.data, parts_bytes)
        connection.recv(1)

    async def down(connection: socket.socket, parts_bytes: int) -> None:
        connection.sendall(b"d")
        receive_all(connection, incoming, parts_bytes)

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
    for _ in range(repeats + 1):
        for name, case in cases.items():
            began = time.perf_counter()
            await case()
            seconds[name].append(time.perf_counter() - began)
    for connection, _ in sockets.values():
        connection.close()
    for client in clients.values():
        await client.close()
    return {name: taken[1:] for name, taken in seconds.items()}  # The first turn opens connections and buffers.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="payload in MiB")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    size = arguments.mib * MIB
    with tempfile.TemporaryDirectory() as folder:
        keys = f"{folder}/keys"
        make = [sys.executable, "-m", "atoll", "keys", "init", keys, "--name", "127.0.0.1"]
        subprocess.run(make, check=True, capture_output=True)
        seconds = run(size, arguments.repeats, keys)
    machine = f"{os.cpu_count()} CPUs, Python {platform.python_version()}"
    print(f"{arguments.mib} MiB, {arguments.repeats} repetitions, {machine}\n")
    print("| case | best GB/s | median GB/s | best / TCP | median / TCP |\n|---|---|---|---|---|")
    for name, taken in seconds.items():
        reference = seconds["TCP up" if name.startswith("push") or name.endswith("up") else "TCP down"]
        rates = f"{size / min(taken) / 1e9:.2f} | {size / median(taken) / 1e9:.2f}"
        print(f"| {name} | {rates} | {min(reference) / min(taken):.2f} | {median(reference) / median(taken):.2f} |")


def run(size: int, repeats: int, keys: str) -> dict[str, list[float]]:
    forms = {"TCP": (0, ""), "parts over TCP": (MIB, ""), "parts over TLS": (MIB, keys)}
    context = multiprocessing.get_context("spawn")
    here, there = zip(*(context.Pipe() for _ in range(2 + len(forms))), strict=True)
    processes = [
        context.Process(target=syncer_process, args=(size, end, tls), daemon=True)
        for end, tls in zip(there[:2], ("", keys), strict=True)
    ]
    for end, form in zip(there[2:], forms.values(), strict=True):
        processes.append(context.Process(target=socket_process, args=(size, end, *form), daemon=True))
    for process in processes:
        process.start()
    address = here[0].recv()
    places = {f"{stripes} connections": ClientOptions(address, stripes=stripes) for stripes in STRIPES}
    places["TLS, 1 connection"] = ClientOptions(here[1].recv(), stripes=1, tls_ca=f"{keys}/ca.pem")
    sockets = {
        name: (connect(end.recv(), tls), parts_bytes)
        for (name, (parts_bytes, tls)), end in zip(forms.items(), here[2:], strict=True)
    }
    seconds = asyncio.run(measure(size, repeats, places, sockets))
    for end in here[:2]:
        end.send("stop")
    for process in processes:
        process.join(10)
    return seconds


if __name__ == "__main__":
    main()
