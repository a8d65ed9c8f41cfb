"""Pushes and fetches over real sockets: whole, striped, refused, broken and resumed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import numpy as np
import pytest
from wire_fakes import FakeSyncer, bulk_client, fetch_request, payload_of, push_header, run, serving, until

from atoll.core.messages import FetchHeader, FetchRequest, PushReply, Refusal
from atoll.errors import LocalProtocolError, PayloadError, RefusedError, UnreachableError
from atoll.wire.channel import ClientOptions, open_channel
from atoll.wire.limits import MIB, PART_BYTES
from atoll.wire.parts import PushOpen, encode_part, encode_push_open, parse_push_reply
from atoll.wire.transport import PUSH_METHOD, bulk_channel_arguments, grpc

SIZES = [0, 1, 1000, PART_BYTES, PART_BYTES + 1, 9 * MIB + 17]


@pytest.mark.parametrize("stripes", [1, 2, 4])
@pytest.mark.parametrize("size", SIZES)
def test_push_and_fetch_round_trip(size: int, stripes: int) -> None:
    async def main() -> None:
        payload = payload_of(size)
        service = FakeSyncer(content=payload)
        async with serving(service) as server, bulk_client(server.address, stripes=stripes) as client:
            assert await client.push(push_header(payload), payload) == PushReply(True)
            header, fetched = await client.fetch(fetch_request())
            assert header.version == 7 and header.size == size
            np.testing.assert_array_equal(service.pushed[0], payload)
            np.testing.assert_array_equal(fetched, payload)
            assert len(service.begun) == len(service.pushed) == 1
            assert server.bytes_up == server.bytes_down == client.bytes_up == client.bytes_down == size
            assert server.transfers_count == 0

    run(main())


def test_fetch_pins_the_version_that_the_first_answer_named() -> None:
    async def main() -> None:
        service = FakeSyncer(content=payload_of(12 * MIB))
        async with serving(service) as server, bulk_client(server.address, stripes=3) as client:
            await client.fetch(fetch_request(version=-1))
            assert [request.version for request in service.fetches] == [-1, 7, 7, 7]

    run(main())


def test_fetch_refusal_reaches_the_caller() -> None:
    async def main() -> None:
        async with serving(FakeSyncer()) as server, bulk_client(server.address) as client:
            with pytest.raises(RefusedError, match="no version 3") as caught:
                await client.fetch(fetch_request(version=3))
            assert caught.value.code == Refusal.UNKNOWN_VERSION

    run(main())


def test_a_fetch_that_is_not_what_its_header_says_is_refused() -> None:
    async def main() -> None:
        service = FakeSyncer(content=payload_of(5 * MIB))
        original = service.fetch_open

        async def lying(request: FetchRequest) -> tuple[FetchHeader, memoryview]:
            header, content = await original(request)
            return dataclasses.replace(header, checksum=1), content

        service.fetch_open = lying  # type: ignore[method-assign]
        async with serving(service) as server, bulk_client(server.address) as client:
            with pytest.raises(PayloadError, match="version 7"):
                await client.fetch(fetch_request())

    run(main())


def test_a_push_may_be_smaller_than_the_most_that_its_codec_makes() -> None:
    async def main() -> None:
        payload = payload_of(5 * MIB)
        service = FakeSyncer(expected=7 * MIB)
        async with serving(service) as server, bulk_client(server.address) as client:
            assert (await client.push(push_header(payload), payload)).accepted
            assert [pushed.tobytes() for pushed in service.pushed] == [payload.tobytes()]

    run(main())


def test_push_with_a_wrong_size_is_refused_before_a_buffer_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        def no_buffer(*_: object) -> None:
            raise AssertionError("allocated")

        monkeypatch.setattr("atoll.wire.transfers.Assembly", no_buffer)
        payload = payload_of(5 * MIB)
        service = FakeSyncer(expected=5 * MIB - 1)
        async with serving(service) as server, bulk_client(server.address) as client:
            reply = await client.push(push_header(payload), payload)
            assert (reply.accepted, reply.code) == (False, Refusal.SIZE)
            assert "layout and codec" in reply.detail
            assert server.transfers_count == 0

    run(main())


def test_push_with_a_wrong_whole_checksum_is_refused() -> None:
    async def main() -> None:
        payload = payload_of(5 * MIB)
        service = FakeSyncer()
        async with serving(service) as server, bulk_client(server.address) as client:
            reply = await client.push(push_header(payload, checksum=1), payload)
            assert (reply.accepted, reply.code) == (False, Refusal.CHECKSUM)
            assert not service.pushed and server.transfers_count == 0
            assert (await client.push(push_header(payload), payload)).accepted

    run(main())


def test_a_payload_that_contradicts_its_header_is_our_own_error() -> None:
    async def main() -> None:
        payload = payload_of(10)
        async with serving(FakeSyncer()) as server, bulk_client(server.address) as client:
            with pytest.raises(LocalProtocolError, match="announces 10 bytes"):
                await client.push(push_header(payload), payload[:9])

    run(main())


class RawPush:
    """A push stream written by hand, for what our own client would never send."""

    def __init__(self, address: str) -> None:
        options = ClientOptions(address)
        self._channel = open_channel(options, bulk_channel_arguments())
        self._call = self._channel.stream_unary(PUSH_METHOD)(timeout=10.0)

    async def write(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass

    async def reply(self) -> PushReply:
        try:
            await self._call.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass
        reply = parse_push_reply(await self._call)
        await self._channel.close()
        return reply

    async def abort(self) -> None:
        self._call.cancel()
        await self._channel.close()


def opening(payload: np.ndarray, **changes: object) -> bytes:
    opened = PushOpen(push_header(payload), attempt_id=1, stripes=1, part_bytes=PART_BYTES)
    return encode_push_open(dataclasses.replace(opened, **changes))  # type: ignore[arg-type]


def messages_of(payload: np.ndarray, opened: bytes) -> list[bytes]:
    view = payload.data
    return [
        encode_part(offset, view[offset : offset + PART_BYTES], opened if offset == 0 else b"")
        for offset in range(0, payload.nbytes, PART_BYTES)
    ]


def flipped(message: bytes) -> bytes:
    return message[:-100] + bytes([message[-100] ^ 1]) + message[-99:]


def _first_part_without_opening(messages: list[bytes], payload: np.ndarray) -> list[bytes]:
    return [encode_part(0, payload.data[:PART_BYTES]), *messages[1:]]


def _oversized_last_part(messages: list[bytes], payload: np.ndarray) -> list[bytes]:
    return [*messages[:-1], encode_part(2 * PART_BYTES, payload.data[: PART_BYTES // 2 + 1])]


WRONG = {
    "corrupted": (lambda m, _: [m[0], flipped(m[1]), m[2]], Refusal.CHECKSUM),
    "truncated": (lambda m, _: m[:2], Refusal.SIZE),
    "cut inside a part": (lambda m, _: [m[0], m[1][:-5], m[2]], Refusal.BAD_REQUEST),
    "overlapping": (lambda m, _: [m[0], m[1], m[1]], Refusal.SIZE),
    "misplaced": (lambda m, p: [m[0], encode_part(PART_BYTES - 1, p.data[:PART_BYTES])], Refusal.SIZE),
    "past the end": (lambda m, p: [m[0], encode_part(3 * PART_BYTES, p.data[:1])], Refusal.SIZE),
    "oversized": (_oversized_last_part, Refusal.SIZE),
    "no opening": (_first_part_without_opening, Refusal.BAD_REQUEST),
    "no bytes at all": (lambda m, _: [], Refusal.BAD_REQUEST),
    "rubbish": (lambda m, _: [m[0], b"\xff" * 1000], Refusal.BAD_REQUEST),
    "rubbish first": (lambda m, _: [b"\x00" * 1000], Refusal.BAD_REQUEST),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_parts_are_refused_and_the_next_push_works(wrong: str) -> None:
    async def main() -> None:
        payload = payload_of(2 * PART_BYTES + PART_BYTES // 2)
        spoil, code = WRONG[wrong]
        service = FakeSyncer()
        async with serving(service) as server, bulk_client(server.address) as client:
            raw = RawPush(server.address)
            for message in spoil(messages_of(payload, opening(payload)), payload):
                await raw.write(message)
            reply = await raw.reply()
            assert (reply.accepted, reply.code) == (False, code), reply.detail
            assert server.transfers_count == 0 and not service.pushed
            assert (await client.push(push_header(payload), payload)).accepted

    run(main())


def test_stripes_are_joined_in_any_order_and_get_one_answer() -> None:
    async def main() -> None:
        payload = payload_of(4 * PART_BYTES)
        opened = opening(payload, stripes=2)
        service = FakeSyncer()
        async with serving(service) as server:
            first, second = RawPush(server.address), RawPush(server.address)
            view = payload.data
            await first.write(encode_part(3 * PART_BYTES, view[3 * PART_BYTES :], opened))
            await second.write(encode_part(1 * PART_BYTES, view[PART_BYTES : 2 * PART_BYTES], opened))
            await first.write(encode_part(2 * PART_BYTES, view[2 * PART_BYTES : 3 * PART_BYTES]))
            await second.write(encode_part(0, view[:PART_BYTES]))
            assert await asyncio.gather(first.reply(), second.reply()) == [PushReply(True), PushReply(True)]
            np.testing.assert_array_equal(service.pushed[0], payload)
            assert len(service.begun) == len(service.pushed) == 1

    run(main())


def test_a_broken_stream_frees_the_transfer_and_a_retry_works() -> None:
    async def main() -> None:
        payload = payload_of(3 * PART_BYTES)
        service = FakeSyncer()
        async with serving(service) as server, bulk_client(server.address) as client:
            raw = RawPush(server.address)
            await raw.write(messages_of(payload, opening(payload))[0])
            await until(lambda: server.bytes_up == PART_BYTES)
            await raw.abort()
            await until(lambda: server.transfers_count == 0)
            assert (await client.push(push_header(payload), payload)).accepted
            assert len(service.begun) == 2 and len(service.pushed) == 1

    run(main())


def test_a_newer_attempt_replaces_one_that_hangs() -> None:
    async def main() -> None:
        payload = payload_of(3 * PART_BYTES)
        service = FakeSyncer()
        async with serving(service) as server, bulk_client(server.address) as client:
            raw = RawPush(server.address)
            await raw.write(messages_of(payload, opening(payload))[0])
            await until(lambda: server.bytes_up == PART_BYTES)
            assert (await client.push(push_header(payload), payload)).accepted
            assert (await raw.reply()).code == Refusal.BUSY
            assert len(service.pushed) == 1

    run(main())


def test_a_transfer_that_goes_silent_is_freed() -> None:
    async def main() -> None:
        payload = payload_of(3 * PART_BYTES)
        async with serving(FakeSyncer(), transfer_idle_s=0.1) as server:
            raw = RawPush(server.address)
            await raw.write(messages_of(payload, opening(payload, stripes=2))[0])
            await until(lambda: server.transfers_count == 1)
            await until(lambda: server.transfers_count == 0)
            assert (await raw.reply()).code == Refusal.BUSY

    run(main())


def test_transfers_are_bounded_per_learner_and_a_busy_syncer_is_asked_again() -> None:
    async def main() -> None:
        payload = payload_of(1000)
        service = FakeSyncer()
        service.hold_completion = asyncio.Event()
        async with (
            serving(service, transfers_per_learner_max=1) as server,
            bulk_client(server.address) as client,
        ):
            first = asyncio.create_task(client.push(push_header(payload, seq=1), payload))
            await until(lambda: server.transfers_count == 1)
            raw = RawPush(server.address)
            header = push_header(payload, seq=2)
            await raw.write(encode_part(0, payload.data, encode_push_open(PushOpen(header, 2, 1, PART_BYTES))))
            assert (await raw.reply()).code == Refusal.BUSY
            second = asyncio.create_task(client.push(header, payload))
            await asyncio.sleep(0.03)
            service.hold_completion.set()
            assert (await first).accepted and (await second).accepted

    run(main())


@pytest.mark.parametrize("learner, words", [("a", "learner a has too many bytes of pushes"), ("b", "the syncer has")])
def test_bytes_of_transfers_are_bounded_for_one_learner_and_in_all(learner: str, words: str) -> None:
    async def main() -> None:
        payload = payload_of(4000)
        service = FakeSyncer()
        service.hold_completion = asyncio.Event()
        in_all = 4 * (payload.nbytes + 10) if learner == "a" else 2 * payload.nbytes - 1
        async with serving(service, transfer_bytes_max=in_all) as server, bulk_client(server.address) as client:
            # Whoever has nothing under way may have one of any size that the service takes.
            first = asyncio.create_task(client.push(push_header(payload, seq=1), payload))
            await until(lambda: len(service.begun) == 1)
            raw = RawPush(server.address)
            header = push_header(payload, seq=2, learner=learner)
            await raw.write(encode_part(0, payload.data, encode_push_open(PushOpen(header, 2, 1, PART_BYTES))))
            reply = await raw.reply()
            assert reply.code == Refusal.BUSY and words in reply.detail
            service.hold_completion.set()
            assert (await first).accepted
            assert (await client.push(header, payload)).accepted  # what is over counts no more

    run(main())


def test_fetches_are_bounded_for_one_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.wire.server.FETCHES_PER_LEARNER_MAX", 2)

    async def main() -> None:
        service = FakeSyncer(content=payload_of(1000))
        service.hold_fetch = asyncio.Event()
        async with serving(service) as server, bulk_client(server.address) as client:
            waiting = [asyncio.create_task(client.fetch(fetch_request())) for _ in range(2)]
            await until(lambda: len(service.fetches) == 2)
            with pytest.raises(RefusedError, match="learner a has too many fetches"):
                await client.fetch(fetch_request())
            service.hold_fetch.set()
            assert (await client.fetch(fetch_request(learner="b")))[1].nbytes == 1000
            assert [(await task)[1].nbytes for task in waiting] == [1000, 1000]
            assert (await client.fetch(fetch_request()))[1].nbytes == 1000

    run(main())


def test_an_unreachable_syncer_is_given_up_after_bounded_attempts() -> None:
    async def main() -> None:
        async with serving(FakeSyncer()) as server:
            address = server.address
        async with bulk_client(address) as client:
            payload = payload_of(10)
            with pytest.raises(UnreachableError, match="attempts to push"):
                await client.push(push_header(payload), payload)
            with pytest.raises(UnreachableError, match="attempts to fetch"):
                await client.fetch(fetch_request())

    run(main())


def test_a_syncer_that_was_away_is_found_again() -> None:
    async def main() -> None:
        payload = payload_of(10)
        async with serving(FakeSyncer()) as server:
            address = server.address
        async with bulk_client(address) as client:
            for _ in range(3):
                with pytest.raises(UnreachableError):
                    await client.push(push_header(payload), payload)
            service = FakeSyncer(content=payload)
            async with serving(service, listen=address):
                while not service.pushed:
                    with contextlib.suppress(UnreachableError):
                        await client.push(push_header(payload), payload)
                assert (await client.fetch(fetch_request()))[1].nbytes == 10

    run(main())


def test_transfers_that_are_given_up_end_at_once_and_the_next_ones_work() -> None:
    """With the session that they belong to. Their callers hear that the syncer is unreachable, and go on."""

    async def main() -> None:
        syncer = FakeSyncer()
        async with serving(syncer) as server, bulk_client(server.address) as client:
            syncer.hold_fetch = asyncio.Event()
            waiting = asyncio.create_task(client.fetch(fetch_request()))
            await until(lambda: bool(syncer.fetches))
            await client.start_again()
            with pytest.raises(UnreachableError, match="the session ended"):
                await waiting
            syncer.hold_fetch.set()
            header, payload = await client.fetch(fetch_request())
            assert payload.nbytes == header.size

    run(main())
