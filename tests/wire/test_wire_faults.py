"""Faults on the way: a small TCP proxy cuts and corrupts real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from wire_fakes import FakeSyncer, bulk_client, fetch_request, payload_of, push_header, run, serving

from atoll.core.messages import Refusal
from atoll.errors import RefusedError
from atoll.wire.address import split_address
from atoll.wire.limits import MIB


class Proxy:
    """Forwards bytes; the next connections are cut after `cuts` bytes, or have one byte flipped at `flips`."""

    def __init__(self, target: str) -> None:
        self._target = split_address(target)
        self.cuts: list[int] = []
        self.flips: list[int] = []
        self.address = ""
        self.connections_count = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections_count += 1
        cut = self.cuts.pop(0) if self.cuts else None
        flip = self.flips.pop(0) if self.flips else None
        up_reader, up_writer = await asyncio.open_connection(*self._target)
        pipes = [
            asyncio.create_task(self._pipe(reader, up_writer, cut, flip)),
            asyncio.create_task(self._pipe(up_reader, writer, cut, flip)),
        ]
        self._tasks.update(pipes)
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for closing in (writer, up_writer):
            closing.transport.abort()

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: int | None, flip: int | None
    ) -> None:
        passed = 0
        while data := await reader.read(64 * 1024):
            if flip is not None and passed <= flip < passed + len(data):
                at = flip - passed
                data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
            passed += len(data)
            if cut is not None and passed > cut:
                return
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def proxied(target: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in proxy._tasks:
            task.cancel()


@pytest.mark.parametrize("stripes", [1, 2])
def test_a_fetch_that_breaks_is_resumed_where_it_broke(stripes: int) -> None:
    async def main() -> None:
        payload = payload_of(14 * MIB)
        service = FakeSyncer(content=payload)
        async with serving(service) as server, proxied(server.address) as proxy:
            proxy.cuts = [6 * MIB + 100, 3 * MIB]
            async with bulk_client(proxy.address, stripes=stripes) as client:
                header, fetched = await client.fetch(fetch_request())
            np.testing.assert_array_equal(fetched, payload)
            assert header.version == 7 and proxy.connections_count > stripes
            resumed = [request for request in service.fetches if request.offset]
            assert resumed and all(request.version == 7 for request in resumed)
            # Less than a second copy went over the wire: what had arrived was not asked for again.
            assert client.bytes_down == payload.nbytes
            assert server.bytes_down < 2 * payload.nbytes

    run(main())


@pytest.mark.parametrize("stripes", [1, 2])
def test_a_push_that_breaks_is_sent_again(stripes: int) -> None:
    async def main() -> None:
        payload = payload_of(9 * MIB)
        service = FakeSyncer()
        async with serving(service) as server, proxied(server.address) as proxy:
            proxy.cuts = [3 * MIB]
            async with bulk_client(proxy.address, stripes=stripes) as client:
                assert (await client.push(push_header(payload), payload)).accepted
            assert len(service.pushed) == 1
            np.testing.assert_array_equal(service.pushed[0], payload)
            assert server.transfers_count == 0

    run(main())


@pytest.mark.parametrize("at", [100, 700_000, 2_000_000, 3_500_003])
def test_a_byte_flipped_on_the_way_never_gets_through(at: int) -> None:
    async def main() -> None:
        payload = payload_of(5 * MIB)
        service = FakeSyncer(content=payload)
        async with serving(service) as server, proxied(server.address) as proxy:
            proxy.flips = [at]
            async with bulk_client(proxy.address, stripes=1) as client:
                _, fetched = await client.fetch(fetch_request())
                np.testing.assert_array_equal(fetched, payload)
            proxy.flips = [at]
            async with bulk_client(proxy.address, stripes=1) as client:
                reply = await client.push(push_header(payload), payload)
                # Refused, or the damaged connection was dropped and the push repeated.
                assert reply.accepted or reply.code in (Refusal.CHECKSUM, Refusal.BAD_REQUEST, Refusal.SIZE)
            for pushed in service.pushed:
                np.testing.assert_array_equal(pushed, payload)

    run(main())


def test_content_that_changes_under_its_version_is_never_accepted() -> None:
    async def main() -> None:
        service = FakeSyncer(content=payload_of(14 * MIB))
        async with serving(service) as server, bulk_client(server.address, stripes=2) as client:
            original = service.fetch_open

            async def changing(request):  # type: ignore[no-untyped-def]
                if request.offset:
                    service.content = payload_of(14 * MIB, seed=1)
                return await original(request)

            service.fetch_open = changing  # type: ignore[method-assign]
            with pytest.raises(RefusedError, match="changed while it was fetched"):
                await client.fetch(fetch_request())

    run(main())
