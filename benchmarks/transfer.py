"""Push and fetch over loopback against a bare TCP socket, in one run.

    python benchmarks/transfer.py [--mib 256] [--repeats 7]

Two processes in every case: this one is the learner, the other one the syncer (or a loop around `recv_into` and
`sendall`). Cases take turns within each repetition, so that a busy moment of the machine does not hit one case alone;
best and median are shown. Both sides of TCP reuse one buffer. Atoll's receiving sides return a fresh one each time and
check every part and the whole.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import socket
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


def syncer_process(size: int, report: Connection) -> None:
    async def main() -> None:
        server = await serve(Sink(content_of(size)), ServerOptions())
        report.send(server.address)
        await asyncio.to_thread(report.recv)
        await server.stop(0.0)

    asyncio.run(main())


def tcp_process(size: int, report: Connection) -> None:
    """Receives `size` bytes and answers with one, or sends `size` bytes: as the first byte of each turn says."""
    buffer = memoryview(content_of(size))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        report.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            while turn := connection.recv(1):
                if turn == b"u":
                    receive_all(connection, buffer)
                    connection.sendall(b"k")
                else:
                    connection.sendall(buffer)


def receive_all(connection: socket.socket, buffer: memoryview) -> None:
    received = 0
    while received < len(buffer):
        received += connection.recv_into(buffer[received:])


async def measure(size: int, repeats: int, address: str, tcp_port: int) -> dict[str, list[float]]:
    """Seconds of every repetition, by case."""
    payload, incoming = content_of(size), memoryview(np.zeros(size, np.uint8))
    header = PushHeader(
        PushKind.CONTRIBUTION, "a", 1, 0, 0, 0, 0, 0, 1, 1, "int4", size, xxhash.xxh3_64_intdigest(payload.data)
    )
    request = FetchRequest(FetchKind.THETA, "a", 1, 0, -1)
    connection = socket.create_connection(("127.0.0.1", tcp_port))
    clients = {stripes: BulkClient(ClientOptions(address, stripes=stripes)) for stripes in STRIPES}

    async def tcp_up() -> None:
        connection.sendall(b"u")
        connection.sendall(payload.data)
        connection.recv(1)

    async def tcp_down() -> None:
        connection.sendall(b"d")
        receive_all(connection, incoming)

    async def push(client: BulkClient) -> None:
        assert (await client.push(header, payload)).accepted

    async def fetch(client: BulkClient) -> None:
        _, content = await client.fetch(request)
        assert content.nbytes == size

    cases: dict[str, Callable[[], Awaitable[None]]] = {"TCP up": tcp_up, "TCP down": tcp_down}
    for stripes, client in clients.items():
        cases[f"push, {stripes} connections"] = lambda client=client: push(client)
        cases[f"fetch, {stripes} connections"] = lambda client=client: fetch(client)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats + 1):
        for name, case in cases.items():
            began = time.perf_counter()
            await case()
            seconds[name].append(time.perf_counter() - began)
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
    context = multiprocessing.get_context("spawn")
    here, there = zip(*(context.Pipe() for _ in range(2)), strict=True)
    processes = [
        context.Process(target=target, args=(size, end), daemon=True)
        for target, end in zip((syncer_process, tcp_process), there, strict=True)
    ]
    for process in processes:
        process.start()
    seconds = asyncio.run(measure(size, arguments.repeats, here[0].recv(), here[1].recv()))
    here[0].send("stop")
    for process in processes:
        process.join(10)

    machine = f"{os.cpu_count()} CPUs, Python {platform.python_version()}"
    print(f"{arguments.mib} MiB, {arguments.repeats} repetitions, {machine}\n")
    print("| case | best GB/s | median GB/s | best / TCP | median / TCP |\n|---|---|---|---|---|")
    for name, taken in seconds.items():
        reference = seconds["TCP up" if name.startswith(("push", "TCP up")) else "TCP down"]
        rates = f"{size / min(taken) / 1e9:.2f} | {size / median(taken) / 1e9:.2f}"
        print(f"| {name} | {rates} | {min(reference) / min(taken):.2f} | {median(reference) / median(taken):.2f} |")


if __name__ == "__main__":
    main()
