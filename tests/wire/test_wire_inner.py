"""Inner state and healing over real sockets: bounds, and services that take their time."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from wire_fakes import FakeSyncer, bulk_client, fetch_request, payload_of, push_header, run, serving, until

from atoll.core.messages import INNER_PIECE_BYTES, FetchHeader, FetchKind, FetchRequest, PushKind, PushReply, Refusal
from atoll.errors import RefusedError, UnreachableError
from atoll.wire.channel import deadline_s
from atoll.wire.limits import FETCH_WAIT_S, INNER_RATE_MIN, PUSH_WAIT_S

INNER = {"kind": PushKind.INNER, "fragment": 3, "steps": 4, "seq": 2, "codec": "inner", "base_version": -1}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines without the time to connect and to transfer, so that a service that takes its time runs into them."""
    monkeypatch.setattr("atoll.wire.limits.BULK_DEADLINE_S_MIN", 0.2)
    monkeypatch.setattr("atoll.wire.limits.BULK_RATE_MIN", 2**40)
    monkeypatch.setattr("atoll.wire.limits.BULK_ATTEMPTS_MAX", 1)


@pytest.mark.parametrize("stripes", [1, 2])
@pytest.mark.parametrize("size", [1, 100_000, INNER_PIECE_BYTES])
def test_a_piece_of_inner_state_goes_up_and_down(size: int, stripes: int) -> None:
    async def main() -> None:
        piece = payload_of(size)
        service = FakeSyncer(content=piece)
        async with serving(service) as server, bulk_client(server.address, stripes=stripes) as client:
            header = push_header(piece, **INNER, tokens=3 * INNER_PIECE_BYTES + 5)
            assert await client.push(header, piece) == PushReply(True)
            assert service.begun == [header]
            request = fetch_request(kind=FetchKind.INNER, fragment=3, version=7)
            _, fetched = await client.fetch(request)
            np.testing.assert_array_equal(fetched, piece)
            np.testing.assert_array_equal(service.pushed[0], piece)
            assert dataclasses.replace(service.fetches[0], length=0) == request

    run(main())


def test_a_fragment_that_heals_goes_up_whole() -> None:
    async def main() -> None:
        fragment = payload_of(9_000_000)
        service = FakeSyncer()
        async with serving(service) as server, bulk_client(server.address) as client:
            header = push_header(fragment, kind=PushKind.HEAL, base_version=12, codec="fp32")
            assert (await client.push(header, fragment)).accepted
            assert service.begun == [header]
            np.testing.assert_array_equal(service.pushed[0], fragment)

    run(main())


def test_a_piece_that_is_too_large_is_refused_before_the_service_hears_of_it() -> None:
    async def main() -> None:
        piece = payload_of(INNER_PIECE_BYTES + 1)
        service = FakeSyncer()
        async with serving(service) as server, bulk_client(server.address) as client:
            reply = await client.push(push_header(piece, **INNER, tokens=piece.nbytes), piece)
            assert (reply.accepted, reply.code) == (False, Refusal.BAD_REQUEST)
            assert "size of a piece" in reply.detail and not service.begun

    run(main())


def test_a_syncer_that_answers_with_too_large_a_piece_is_not_believed() -> None:
    async def main() -> None:
        service = FakeSyncer(content=payload_of(INNER_PIECE_BYTES + 1))
        async with serving(service) as server, bulk_client(server.address) as client:
            with pytest.raises(UnreachableError, match=r"FetchHeader\.size"):
                await client.fetch(fetch_request(kind=FetchKind.INNER, version=7))
            assert (await client.fetch(fetch_request()))[1].nbytes == INNER_PIECE_BYTES + 1

    run(main())


# ---------------------------------------------------------------- services that take their time


def test_an_answer_that_waits_for_room_does_not_run_into_a_deadline(impatient: None) -> None:
    """Nor is a transfer that waits for its answer given up as idle."""

    async def main() -> None:
        piece = payload_of(1000)
        service = FakeSyncer()
        service.hold_completion = asyncio.Event()
        async with serving(service, transfer_idle_s=0.1) as server, bulk_client(server.address) as client:
            push = asyncio.create_task(client.push(push_header(piece, **INNER, tokens=1000), piece))
            await until(lambda: server.transfers_count == 1)
            await asyncio.sleep(0.5)
            service.hold_completion.set()
            assert (await push).accepted
            assert len(service.begun) == len(service.pushed) == 1  # at the first attempt

    run(main())


@pytest.mark.parametrize("stripes", [1, 2])
def test_a_piece_that_is_not_there_yet_is_waited_for(stripes: int, impatient: None) -> None:
    async def main() -> None:
        service = FakeSyncer(content=payload_of(6_000_000))
        service.hold_fetch = asyncio.Event()
        async with serving(service) as server, bulk_client(server.address, stripes=stripes) as client:
            request = fetch_request(kind=FetchKind.INNER, version=7)
            fetch = asyncio.create_task(client.fetch(request))
            await until(lambda: bool(service.fetches))
            await asyncio.sleep(0.5)
            assert not fetch.done() and len(service.fetches) == 1
            service.hold_fetch.set()
            _, fetched = await fetch
            np.testing.assert_array_equal(fetched, service.content)

    run(main())


def test_a_wait_ends_when_the_joiner_goes_away() -> None:
    async def main() -> None:
        service, cancelled = FakeSyncer(), asyncio.Event()

        async def wait(request: FetchRequest) -> tuple[FetchHeader, memoryview]:
            service.fetches.append(request)
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            raise RefusedError(Refusal.BUSY, "the piece did not come; ask again")

        service.fetch_open = wait  # type: ignore[method-assign]
        async with serving(service) as server:
            async with bulk_client(server.address) as client:
                fetch = asyncio.create_task(client.fetch(fetch_request(kind=FetchKind.INNER, version=0)))
                await until(lambda: bool(service.fetches))
                fetch.cancel()
            await cancelled.wait()

    run(main())


def test_deadlines_leave_room_for_the_waits() -> None:
    """What a service may take (see SyncerService), on top of a transfer at the slowest rate."""
    assert deadline_s(INNER_PIECE_BYTES, PUSH_WAIT_S) >= PUSH_WAIT_S + deadline_s(INNER_PIECE_BYTES)
    # The joiner may need that long to fetch a piece.
    assert deadline_s(INNER_PIECE_BYTES, rate=INNER_RATE_MIN) <= PUSH_WAIT_S
    assert FETCH_WAIT_S >= 60.0
