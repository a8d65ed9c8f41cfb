"""Large payloads past gRPC: the same bits, the same refusals, and gRPC where it cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import socket
import ssl
import struct
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import certificate
from wire_fakes import FakeSyncer, bulk_client, fetch_request, payload_of, push_header, run, serving, until

from atoll.core import Identity, Role
from atoll.core import messages as m
from atoll.core.messages import PushReply, Refusal
from atoll.errors import LaunchError, RefusedError
from atoll.wire import (
    BulkClient,
    RunningServer,
    ServerOptions,
    check_ports,
    direct,
    direct_server,
    limits,
    parts,
    raw,
    serve,
)
from atoll.wire.direct import Wire
from atoll.wire.limits import MIB, PART_BYTES

SIZE = 9 * MIB + 17


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return certificate(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@contextlib.asynccontextmanager
async def past_grpc(
    service: FakeSyncer, tls: tuple[str, str] | None = None, stripes: int = 1, token: str = "", **options: Any
) -> AsyncIterator[tuple[RunningServer, BulkClient]]:
    """A server and a client that has as many connections past gRPC as it has stripes."""
    secured = {"tls_certificate": tls[0], "tls_key": tls[1]} if tls else {}
    trusted = {"tls_ca": tls[0]} if tls else {}
    async with (
        serving(service, token=token, **secured, **options) as server,
        bulk_client(server.address, token=token, stripes=stripes, **trusted) as client,
    ):
        small = payload_of(1000)
        await client.push(push_header(small, seq=100), small)
        while len(client._lanes._free) < stripes:
            client._lanes._open_another()
            await asyncio.sleep(0.01)
        service.pushed.clear()
        service.begun.clear()
        yield server, client


@pytest.mark.parametrize("stripes", [1, 2, 3])
@pytest.mark.parametrize("with_tls", [False, True])
@pytest.mark.parametrize("size", [MIB, SIZE, 16 * MIB])
def test_push_and_fetch_give_the_bits_that_grpc_gives(
    tls: tuple[str, str], size: int, with_tls: bool, stripes: int
) -> None:
    async def main() -> None:
        payload = payload_of(size)
        service = FakeSyncer(content=payload)
        async with past_grpc(service, tls if with_tls else None, stripes) as (server, client):
            _, through = await client.fetch(fetch_request())
            assert client.bytes_past_grpc == 0
            before = server.bytes_up, server.bytes_down
            assert await client.push(push_header(payload), payload) == PushReply(True)
            header, past = await client.fetch(fetch_request())
            assert client.bytes_past_grpc == 2 * size
            # A sender counts when the last part has gone, by which time it may be here.
            await until(lambda: (server.bytes_up, server.bytes_down) == (before[0] + size, before[1] + size))
            assert header.size == size and header.version == 7
            np.testing.assert_array_equal(service.pushed[0], payload)
            np.testing.assert_array_equal(past, through)
            np.testing.assert_array_equal(past, payload)
            assert server.transfers_count == 0 and len(service.begun) == 1

    run(main())


def test_a_range_comes_past_grpc_too() -> None:
    async def main() -> None:
        service = FakeSyncer(content=payload_of(SIZE))
        async with past_grpc(service) as (_, client):
            _, some = await client.fetch_range(fetch_request(version=7, offset=2 * MIB + 5, length=3 * MIB))
            np.testing.assert_array_equal(some, service.content[2 * MIB + 5 : 5 * MIB + 5])
            assert client.bytes_past_grpc == 3 * MIB

    run(main())


def test_small_payloads_and_inner_state_stay_with_grpc() -> None:
    async def main() -> None:
        payload = payload_of(MIB - 1)
        service = FakeSyncer(content=payload)
        async with past_grpc(service) as (_, client):
            await client.push(push_header(payload), payload)
            for _ in range(2):
                await client.fetch(fetch_request())
            inner = payload_of(2 * MIB)
            await client.push(push_header(inner, kind=m.PushKind.INNER, seq=0, round=0, codec="inner"), inner)
            assert client.bytes_past_grpc == 0

    run(main())


# ---------------------------------------------------------------- where it cannot be


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


def test_nobody_goes_past_a_proxy() -> None:
    async def main() -> None:
        payload = payload_of(2 * MIB)
        service = FakeSyncer(content=payload)

        async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection(*server.address.split(":"))
            await asyncio.gather(forward(reader, there[1]), forward(there[0], writer))

        async with serving(service) as server:
            proxy = await asyncio.start_server(serve_one, "127.0.0.1", 0)
            port = proxy.sockets[0].getsockname()[1]
            async with bulk_client(f"127.0.0.1:{port}") as client:
                for seq in range(3):
                    assert (await client.push(push_header(payload, seq=seq), payload)).accepted
                    await client.fetch(fetch_request())
                assert client.bytes_past_grpc == 0 and not server._direct._visitors  # type: ignore[union-attr]
            proxy.close()

    run(main())


def test_a_port_that_is_closed_is_told_of_once_and_grpc_carries_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        payload = payload_of(2 * MIB)
        service = FakeSyncer(content=payload)
        async with serving(service) as server, bulk_client(server.address) as client:
            server._direct.close()  # type: ignore[union-attr]
            for seq in range(4):
                assert (await client.push(push_header(payload, seq=seq), payload)).accepted
                await client.fetch(fetch_request())
                await asyncio.sleep(0.05)
            assert client.bytes_past_grpc == 0
            await client.start_again()  # the next session asks again
            await client.push(push_header(payload, seq=9), payload)
            await until(lambda: len(told()) == 2)

    def told() -> list[str]:
        return [r.getMessage() for r in caplog.records if "--bulk-port" in r.getMessage()]

    with caplog.at_level(logging.WARNING):
        run(main())
    assert "Connection refused" in told()[0] and len(told()) == 2


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_tunnel_of_the_same_number_gives_the_token_to_nobody_who_listens_here(
    monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """`ssh -L 7077:syncer:7077`: the syncer's other port is there, and here it is anybody's."""

    async def main() -> None:
        payload, heard = payload_of(2 * MIB), list[bytes]()

        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(await reader.read(100))
            writer.close()

        listening = await asyncio.start_server(impostor, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        async with serving(FakeSyncer(), token="right") as server, bulk_client(server.address, token="right") as client:
            with monkeypatch.context() as there:
                if elsewhere:
                    there.setattr(direct, "this_loopback", lambda: "another machine's")
                server._offer = direct.offer(("127.0.0.1", port), int(server.address.split(":")[1]))
            for seq in range(3):
                assert (await client.push(push_header(payload, seq=seq), payload)).accepted
                await asyncio.sleep(0.05)
            assert bool(heard) != elsewhere  # without a tunnel it is told from nobody
        listening.close()

    run(main())


def test_in_clear_a_name_leads_to_the_address_that_the_server_listens_on() -> None:
    """`localhost` may be [::1], where the same port is another user's."""
    said = direct.offer(("127.0.0.1", 9), 5)
    assert direct.offered(said, ("localhost", 5), in_clear=True) == ("127.0.0.1", 9)
    assert direct.offered(said, ("localhost", 5), in_clear=False) == ("localhost", 9)
    assert direct.offered(direct.offer(("10.0.0.1", 9), 5), ("localhost", 5), in_clear=True) is None
    assert direct.offered(said, ("198.18.0.1", 5), in_clear=True) == ("198.18.0.1", 9)  # of a test network


@pytest.mark.parametrize("host", ["localhost", "[::1]", "[::]"])
def test_whoever_reaches_the_server_by_a_name_or_over_ipv6_reaches_this_port(host: str, tls: tuple[str, str]) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")

    async def main() -> None:
        payload = payload_of(2 * MIB)
        everywhere = host == "[::]"
        secured = {"token": "right", "tls_certificate": tls[0], "tls_key": tls[1]} if everywhere else {}
        async with serving(FakeSyncer(), listen=f"{host}:0", **secured) as server:
            address = server.address.replace("[::]", "127.0.0.1")
            trusted = {"token": "right", "tls_ca": tls[0]} if everywhere else {}
            async with bulk_client(address, stripes=1, **trusted) as client:
                await client.push(push_header(payload), payload)
                await until(lambda: bool(client._lanes._free) or client._lanes._given_up)
                assert (await client.push(push_header(payload, seq=2), payload)).accepted
                assert client.bytes_past_grpc == payload.nbytes

    run(main())


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_firewall_that_swallows_what_is_sent_costs_one_wait_and_no_contribution(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """It lets connections open, and their first words through."""

    async def swallowing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data[:left])
                left = max(0, left - len(data))
            await asyncio.sleep(60)  # nor does it tell of an end

    async def main() -> None:
        payload = payload_of(SIZE)
        service = FakeSyncer(content=payload)

        async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection("127.0.0.1", port_there)
            up, down = (PART_BYTES, 1 << 30) if way == "up" else (1 << 30, PART_BYTES)
            await asyncio.gather(swallowing(reader, there[1], up), swallowing(there[0], writer, down))

        async with serving(service) as server, bulk_client(server.address, stripes=1) as client:
            port_there = int(server._offer[0][1].split()[0])
            firewall = await asyncio.start_server(serve_one, "127.0.0.1", 0)
            place = ("127.0.0.1", firewall.sockets[0].getsockname()[1])
            server._offer = direct.offer(place, int(server.address.split(":")[1]))
            small = payload_of(1000)
            await client.push(push_header(small, seq=100), small)
            await until(lambda: bool(client._lanes._free))
            monkeypatch.setattr(limits, "DIRECT_STALL_S", 0.3)
            if way == "up":
                assert (await client.push(push_header(payload), payload)).accepted
                np.testing.assert_array_equal(service.pushed[-1], payload)
                assert len(service.pushed) == 2
            else:
                await client.fetch(fetch_request())  # its size is not known before
                _, content = await client.fetch(fetch_request())
                np.testing.assert_array_equal(content, payload)
            assert client._lanes._given_up and "nothing moved" in caplog.text
            firewall.close()

    with caplog.at_level(logging.WARNING):
        run(main())


def test_a_slow_link_is_no_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel still holds goes on moving, long after the last call."""

    async def main() -> None:
        payload = payload_of(2 * MIB)
        service = FakeSyncer()

        async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection("127.0.0.1", port_there)

            async def slowly() -> None:
                with contextlib.suppress(OSError):
                    while data := await reader.read(1 << 16):
                        there[1].write(data)
                        await asyncio.sleep(0.05)

            await asyncio.gather(slowly(), forward(there[0], writer))

        async with serving(service) as server, bulk_client(server.address, stripes=1) as client:
            port_there = int(server._offer[0][1].split()[0])
            link = await asyncio.start_server(serve_one, "127.0.0.1", 0, limit=1 << 16)
            link.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            place = ("127.0.0.1", link.sockets[0].getsockname()[1])
            server._offer = direct.offer(place, int(server.address.split(":")[1]))
            small = payload_of(1000)
            await client.push(push_header(small, seq=100), small)
            await until(lambda: bool(client._lanes._free))
            monkeypatch.setattr(limits, "DIRECT_STALL_S", 0.5)
            assert (await client.push(push_header(payload), payload)).accepted
            assert client.bytes_past_grpc == payload.nbytes and not client._lanes._given_up
            link.close()

    run(main())


def test_ports_that_cannot_be_had_are_said_before_another_is_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(LaunchError, match="--bulk-port off"):
        check_ports("127.0.0.1:0", taken.getsockname()[1])
    with pytest.raises(LaunchError, match="is for gRPC already"):
        check_ports("127.0.0.1:17099", 17099)
    check_ports("127.0.0.1:0", None)


def test_a_connection_for_which_there_is_no_thread_is_closed_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        async with serving(FakeSyncer()) as server:
            with monkeypatch.context() as full:
                full.setattr(threading.Thread, "start", none)
                wire = connected(server, None)
                await asyncio.sleep(0.05)
            await is_closed(wire)
            assert not server._direct._visitors  # type: ignore[union-attr]
            wire.close()

    run(main())


def test_a_server_without_the_port_offers_none() -> None:
    async def main() -> None:
        payload = payload_of(2 * MIB)
        async with serving(FakeSyncer(), bulk_port=None) as server, bulk_client(server.address) as client:
            for seq in range(2):
                assert (await client.push(push_header(payload, seq=seq), payload)).accepted
            assert client.bytes_past_grpc == 0 and not client._lanes._all

    run(main())


def test_a_port_that_is_taken_is_said_before_anything_is_served() -> None:
    async def main() -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as taken,
            pytest.raises(LaunchError, match="--bulk-port off"),
        ):
            await serve(FakeSyncer(), ServerOptions(bulk_port=taken.getsockname()[1]))

    run(main())


@pytest.mark.parametrize("said", ["", "x y a b", "70000 5 a b", "5", "9 5", "5 6 a b", "-1 5 a b", "0 5 a b"])
def test_an_offer_that_makes_no_sense_is_none(said: str) -> None:
    assert direct.offered(((direct.BULK_KEY, said),), ("far", 5), in_clear=False) is None
    assert direct.offered(((direct.BULK_KEY, "9 5 a b"),), ("far", 5), in_clear=False) == ("far", 9)


# ---------------------------------------------------------------- what breaks


def test_a_push_whose_connection_breaks_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        payload = payload_of(SIZE)
        service = FakeSyncer()
        async with past_grpc(service) as (server, client):
            monkeypatch.setattr(Wire, "send_part", breaking(Wire.send_part, at=3))
            assert await client.push(push_header(payload), payload) == PushReply(True)
            np.testing.assert_array_equal(service.pushed[0], payload)
            assert len(service.pushed) == 1 and len(service.begun) == 2
            assert server.transfers_count == 0

    run(main())


def breaking(whole: Any, at: int) -> Any:
    """The same, but the connection is cut before its `at`-th call."""
    calls = []

    def broken(self: Wire, *arguments: Any) -> Any:
        calls.append(self)
        if len(calls) == at:
            self.cut()
        return whole(self, *arguments)

    return broken


def test_a_fetch_that_breaks_goes_on_where_it_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        service = FakeSyncer(content=payload_of(SIZE))
        async with past_grpc(service) as (_, client):
            await client.fetch(fetch_request())
            service.fetches.clear()
            monkeypatch.setattr(Wire, "receive_data", breaking(Wire.receive_data, at=4))
            _, content = await client.fetch(fetch_request())
            np.testing.assert_array_equal(content, service.content)
            first, second = [request.offset for request in service.fetches]
            assert first == 0 and second >= 3 * MIB and not second % MIB  # what had come before the cut counts

    run(main())


def test_a_part_that_is_damaged_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        service = FakeSyncer(content=payload_of(SIZE))
        async with past_grpc(service) as (_, client):
            await client.fetch(fetch_request())
            whole, calls = Wire.receive_into, []

            def damaged(self: Wire, room: memoryview) -> None:
                whole(self, room)
                if len(room) == PART_BYTES:
                    calls.append(room)
                    room[5] ^= len(calls) == 2

            monkeypatch.setattr(Wire, "receive_into", damaged)
            _, content = await client.fetch(fetch_request())
            np.testing.assert_array_equal(content, service.content)
            assert len(calls) == 2  # the rest came through gRPC: a connection that erred is not used again

    run(main())


def test_two_faults_in_a_row_leave_it_to_grpc(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        payload = payload_of(SIZE)
        service = FakeSyncer()
        async with past_grpc(service, stripes=1) as (_, client):

            def dead(self: Wire, *_: Any) -> None:
                self.cut()
                raise OSError("broken on the way")

            monkeypatch.setattr(Wire, "send_part", dead)
            for seq in range(2):
                assert (await client.push(push_header(payload, seq=seq), payload)).accepted
            assert client.bytes_past_grpc == 0
            await until(lambda: "closed the connection" in caplog.text or "broken" in caplog.text)

    with caplog.at_level(logging.WARNING):
        run(main())


def test_a_session_that_ends_gives_up_what_is_under_way() -> None:
    async def main() -> None:
        payload = payload_of(SIZE)
        service = FakeSyncer()
        async with past_grpc(service) as (_, client):
            service.hold_completion = asyncio.Event()
            pushing = asyncio.create_task(client.push(push_header(payload), payload))
            await until(lambda: client.bytes_past_grpc > 0 or len(service.begun) == 1)
            await client.start_again()
            with pytest.raises(Exception, match="the session ended"):
                await pushing
            service.hold_completion.set()

    run(main())


# ---------------------------------------------------------------- strangers and liars


def connected(server: RunningServer, token: str | None = "") -> Wire:
    """A connection by hand; greeted, if there is a token."""
    connection = socket.create_connection(("127.0.0.1", int(server._offer[0][1].split()[0])), 10)
    wire = Wire(connection)
    if token is not None:
        wire.send(direct.MAGIC)
        wire.send_frame(direct.TOKEN, token.encode())
    return wire


async def hears(wire: Wire, kinds: bytes) -> tuple[bytes, Any]:
    return await asyncio.to_thread(wire.receive_message, kinds)


async def is_closed(wire: Wire) -> None:
    def read() -> None:
        with pytest.raises(OSError):
            wire.receive(1)

    await asyncio.to_thread(read)


def opening(payload: np.ndarray, **changes: Any) -> bytes:
    return parts.encode_push_open(parts.PushOpen(push_header(payload, **changes), 1, 1, PART_BYTES))


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, direct.MAGIC + struct.pack("<cI", b"T", 1 << 31), b"\x16\x03"],
)
def test_garbage_is_shut_out_and_disturbs_nobody(garbage: bytes) -> None:
    async def main() -> None:
        payload = payload_of(2 * MIB)
        service = FakeSyncer()
        async with past_grpc(service) as (server, client):
            wire = connected(server, None)
            wire.send(garbage)
            assert (await client.push(push_header(payload), payload)).accepted
            assert client.bytes_past_grpc == payload.nbytes
            if len(garbage) > 2:
                await is_closed(wire)
            wire.close()
            await until(lambda: len(server._direct._visitors) == 1)  # type: ignore[union-attr]

    run(main())


def test_a_wrong_token_is_refused_before_anything_else_is_read() -> None:
    async def main() -> None:
        service = FakeSyncer(content=payload_of(2 * MIB))
        async with past_grpc(service, token="right") as (server, _):
            wire = connected(server, "wrong")
            _, refused = await hears(wire, direct.WELCOME + direct.REFUSED)
            assert refused.code == Refusal.TOKEN and "ATOLL_TOKEN" in refused.detail
            await is_closed(wire)
            assert not service.begun and not service.fetches

    run(main())


@pytest.mark.parametrize(
    ("changes", "expected", "code"),
    [
        ({"secret": "another's"}, None, Refusal.SECRET),
        ({}, MIB, Refusal.SIZE),
        ({"size": 1 << 35}, MIB, Refusal.SIZE),
        ({"fragment": 1 << 40}, None, Refusal.BAD_REQUEST),
    ],
)
def test_a_push_is_refused_with_the_names_that_grpc_has(
    changes: dict[str, Any], expected: int | None, code: str
) -> None:
    async def main() -> None:
        payload = payload_of(2 * MIB)
        async with past_grpc(FakeSyncer(expected=expected)) as (server, client):
            wire = connected(server)
            await hears(wire, direct.WELCOME)
            for _ in range(2):  # it stays open: nothing of the payload was sent
                wire.send_message(direct.PUSH, opening(payload, **changes))
                _, refused = await hears(wire, direct.GO + direct.REFUSED)
                assert refused.code == code
            assert server.transfers_count == 0
            if code != Refusal.BAD_REQUEST and "size" not in changes:
                assert (await client.push(push_header(payload, **changes), payload)).code == code
            wire.close()

    run(main())


@pytest.mark.parametrize(
    ("part", "code"),
    [
        (direct.PART.pack(0, 1 << 31, 0), Refusal.BAD_REQUEST),
        (direct.PART.pack(0, 100, 0), Refusal.SIZE),
        (direct.PART.pack(64 * MIB, PART_BYTES, 0), Refusal.SIZE),
        (direct.PART.pack(0, PART_BYTES, 1) + bytes(PART_BYTES), Refusal.CHECKSUM),
        (direct.PART.pack(0, 0, 0), Refusal.SIZE),
    ],
)
def test_parts_that_lie_end_their_own_push_only(part: bytes, code: str) -> None:
    async def main() -> None:
        payload = payload_of(2 * MIB)
        service = FakeSyncer()
        async with past_grpc(service) as (server, client):
            wire = connected(server)
            await hears(wire, direct.WELCOME)
            wire.send_message(direct.PUSH, opening(payload, seq=5))
            await hears(wire, direct.GO)
            await asyncio.to_thread(wire.send, part)
            _, answer = await hears(wire, direct.ANSWER)
            assert parts.parse_push_reply(answer).code == code
            assert server.transfers_count == 0
            assert (await client.push(push_header(payload), payload)).accepted
            assert client.bytes_past_grpc == payload.nbytes
            wire.close()

    run(main())


def test_a_stripe_that_comes_while_the_whole_is_decided_hears_the_answer() -> None:
    """As that of a rank whose blocks are not in this payload: it has nothing to bring."""

    async def main() -> None:
        payload = payload_of(2 * MIB)
        service = FakeSyncer()
        async with past_grpc(service) as (server, _):
            service.hold_completion = asyncio.Event()
            opened = parts.encode_push_open(parts.PushOpen(push_header(payload), 1, 2, PART_BYTES))
            first, second = connected(server), connected(server)
            for wire in (first, second):
                await hears(wire, direct.WELCOME)
            first.send_message(direct.PUSH, opened)
            await hears(first, direct.GO)
            for offset in (0, PART_BYTES):
                await asyncio.to_thread(first.send_part, offset, payload[offset : offset + PART_BYTES].data)
            transfer = next(iter(server._transfers._by_key.values()))
            await until(lambda: transfer.completing and transfer.assembly is None)
            second.send_message(direct.PUSH, opened)
            await until(lambda: transfer.streams_joined == 2)
            await asyncio.sleep(0.2)  # its thread is waiting for the answer
            service.hold_completion.set()
            await hears(second, direct.GO)
            for wire in (first, second):
                wire.send_part(0, payload[:0].data)
                _, answer = await hears(wire, direct.ANSWER)
                assert parts.parse_push_reply(answer).accepted
                wire.close()

    run(main())


def test_who_stands_still_in_the_middle_is_given_up_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_server, "WATCH_S", 0.05)
    monkeypatch.setattr(limits, "DIRECT_ENDING_S", 0.1)

    async def main() -> None:
        payload = payload_of(4 * MIB)
        service = FakeSyncer(content=payload)
        async with past_grpc(service, transfer_idle_s=0.3, transfer_bytes_max=16 * MIB) as (server, client):
            wire = connected(server)
            await hears(wire, direct.WELCOME)
            wire.send_message(direct.PUSH, opening(payload, learner="b"))
            await hears(wire, direct.GO)
            wire.send_part(0, payload[:PART_BYTES].data)
            wire.send(direct.PART.pack(PART_BYTES, PART_BYTES, 0) + bytes(1000))
            assert server.transfers_count == 1
            assert (await client.push(push_header(payload), payload)).accepted  # nobody else waits
            await until(lambda: server.transfers_count == 0)
            await is_closed(wire)
            fetching = connected(server)
            await hears(fetching, direct.WELCOME)
            service.content = payload_of(64 * MIB)
            fetching.send_message(direct.FETCH, parts.encode_fetch_request(fetch_request()))  # and takes nothing
            await until(lambda: len(service.fetches) > 0)
            await until(lambda: len(server._direct._visitors) == 1)  # type: ignore[union-attr]
            assert server._fetches._held.total() == 0
            wire.close()
            fetching.close()

    run(main())


def test_strangers_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_server, "WATCH_S", 0.05)
    monkeypatch.setattr(limits, "STRANGER_S", 0.5)
    monkeypatch.setattr(limits, "DIRECT_STRANGERS_MAX", 3)
    monkeypatch.setattr(limits, "DIRECT_CONNECTIONS_MAX", 6)

    async def main() -> None:
        payload = payload_of(2 * MIB)
        async with past_grpc(FakeSyncer()) as (server, client):
            silent = [await asyncio.to_thread(connected, server, None) for _ in range(20)]
            await asyncio.sleep(0.1)
            assert len(server._direct._visitors) <= 6  # type: ignore[union-attr]
            assert (await client.push(push_header(payload), payload)).accepted
            assert client.bytes_past_grpc == payload.nbytes
            await until(lambda: len(server._direct._visitors) == 1)  # type: ignore[union-attr]
            for wire in silent:
                await is_closed(wire)
                wire.close()

    run(main())


def test_who_stands_still_in_a_handshake_is_cut(tls: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_server, "WATCH_S", 0.05)
    monkeypatch.setattr(limits, "STRANGER_S", 0.3)

    async def main() -> None:
        async with serving(FakeSyncer(), tls_certificate=tls[0], tls_key=tls[1]) as server:
            wire = connected(server, None)
            wire.send(b"\x16\x03\x01")  # the beginning of a ClientHello
            await is_closed(wire)
            await until(lambda: not server._direct._visitors)  # type: ignore[union-attr]
            wire.close()

    run(main())


def test_a_connection_that_the_server_closed_meanwhile_is_replaced() -> None:
    async def main() -> None:
        payload = payload_of(2 * MIB)
        async with past_grpc(FakeSyncer()) as (server, client):
            for visitor in list(server._direct._visitors):  # type: ignore[union-attr]
                visitor.cut()  # as after DIRECT_IDLE_S
            await until(lambda: not server._direct._visitors)  # type: ignore[union-attr]
            assert (await client.push(push_header(payload), payload)).accepted
            assert client._lanes._faults == 0 and client.bytes_past_grpc == 0
            await until(lambda: bool(client._lanes._free))
            assert (await client.push(push_header(payload, seq=2), payload)).accepted
            assert client.bytes_past_grpc == payload.nbytes

    run(main())


def test_no_payload_is_held_once_it_was_sent() -> None:
    async def main() -> None:
        payload = payload_of(2 * MIB)
        async with past_grpc(FakeSyncer()) as (_, client):
            assert (await client.push(push_header(payload), payload)).accepted
            assert client.bytes_past_grpc == payload.nbytes
            gone = weakref.ref(payload)
            del payload
            await until(lambda: gone() is None)

    run(main())


def test_budgets_hold_as_they_do_for_grpc() -> None:
    async def main() -> None:
        payload = payload_of(4 * MIB)
        service = FakeSyncer(content=payload)
        # A quarter of it is one learner's: the first may have its one thing, a second at the same time is too much.
        async with past_grpc(service, transfer_bytes_max=20 * MIB) as (server, _):
            wires = [connected(server) for _ in range(2)]
            for seq, wire in enumerate(wires):
                await hears(wire, direct.WELCOME)
                wire.send_message(direct.PUSH, opening(payload, seq=seq))
            said = [await hears(wire, direct.GO + direct.REFUSED) for wire in wires]
            assert sorted(kind for kind, _ in said) == [direct.GO, direct.REFUSED]
            assert [r.code for _, r in said if isinstance(r, m.Refused)] == [Refusal.BUSY]
            for wire in wires:
                wire.close()
            await until(lambda: server.transfers_count == 0)

    run(main())


SMALL_WINDOW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 16),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 4 * MIB),
]


@pytest.mark.parametrize("past", [True, False])
def test_fetches_that_stand_still_keep_no_more_versions_than_a_learners_share(past: bool) -> None:
    """Each version is another copy, and stays as long as somebody has not read it."""

    async def main() -> None:
        size, share = 16 * MIB, 2
        service = FakeSyncer(content=payload_of(size))
        async with contextlib.AsyncExitStack() as ending:
            given = {"transfer_bytes_max": 4 * share * size, "bulk_port": 0 if past else None}
            server = await ending.enter_async_context(serving(service, **given))
            refused = 0
            channels, calls = [], []
            for version in range(6):
                service.content = payload_of(size, version)
                for _ in range(2):  # of the same version any number
                    request = parts.encode_fetch_request(fetch_request())
                    if past:
                        wire = connected(server)
                        ending.callback(wire.close)
                        await hears(wire, direct.WELCOME)
                        wire.send_message(direct.FETCH, request)
                        kind, _ = await hears(wire, direct.HEADER + direct.REFUSED)
                        refused += kind == direct.REFUSED
                    else:
                        # A window that grew would take a whole payload in: then nobody stands still.
                        channel = raw.grpc.aio.insecure_channel(server.address, SMALL_WINDOW)
                        channels.append(channel)
                        call = channel.unary_stream(raw.FETCH_METHOD)(raw.seal(request), timeout=30)
                        calls.append(call)  # one that is collected is cancelled, and keeps nothing any more
                        refused += parts.parse_part(await call.read()).refused is not None
            assert refused == 2 * (6 - share)
            service.content = payload_of(size, 9)
            async with bulk_client(server.address) as client:  # another learner is not touched
                _, content = await client.fetch(fetch_request(learner="b"))
                np.testing.assert_array_equal(content, service.content)
            for channel in channels:
                await channel.close()
        await until(lambda: not server._contents._held and not server._contents._bytes._held)

    run(main())


class Book:
    """Tokens are names, until they are not."""

    def __init__(self) -> None:
        self.revoked = False

    def find(self, token: str) -> Identity | str:
        return "this key was revoked" if self.revoked else Identity(token, Role.LEARNER)


def test_a_key_serves_its_owner_alone_and_not_once_it_is_revoked() -> None:
    async def main() -> None:
        payload = payload_of(2 * MIB)
        book = Book()
        async with serving(FakeSyncer(content=payload), keys=book) as server:
            wire = connected(server, "a")
            await hears(wire, direct.WELCOME)
            wire.send_message(direct.PUSH, opening(payload, learner="b"))
            _, refused = await hears(wire, direct.GO + direct.REFUSED)
            assert isinstance(refused, m.Refused) and refused.code != Refusal.TOKEN
            wire.send_message(direct.FETCH, parts.encode_fetch_request(fetch_request(learner="b")))
            _, refused = await hears(wire, direct.HEADER + direct.REFUSED)
            assert isinstance(refused, m.Refused)
            book.revoked = True
            wire.send_message(direct.FETCH, parts.encode_fetch_request(fetch_request()))
            _, refused = await hears(wire, direct.HEADER + direct.REFUSED)
            assert refused.code == Refusal.TOKEN
            server.revoke("a", "revoked")
            await is_closed(wire)
            wire.close()

    run(main())


def test_a_certificate_from_elsewhere_gets_no_payload(tls: tuple[str, str], tmp_path: Path) -> None:
    """The same trust as gRPC's: who listens there with another certificate is not spoken to."""
    other = certificate(tmp_path, "127.0.0.1")

    async def main() -> None:
        payload = payload_of(2 * MIB)
        async with serving(FakeSyncer(), tls_certificate=tls[0], tls_key=tls[1]) as server:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*other)
            server._direct._tls = context  # type: ignore[union-attr]
            async with bulk_client(server.address, tls_ca=tls[0]) as client:
                for seq in range(3):
                    assert (await client.push(push_header(payload, seq=seq), payload)).accepted
                    await asyncio.sleep(0.05)
                assert client.bytes_past_grpc == 0 and client._lanes._given_up

    run(main())


def test_nothing_is_left_when_the_server_stops() -> None:
    earlier = {*threading.enumerate()}  # of other tests, whose learners may still be ending

    def bulk_threads() -> int:
        return sum(thread.name == "atoll-bulk" for thread in {*threading.enumerate()} - earlier)

    async def main() -> None:
        payload = payload_of(2 * MIB)
        async with past_grpc(FakeSyncer()) as (_, client):
            assert (await client.push(push_header(payload), payload)).accepted
            assert bulk_threads() == 2
        await until(lambda: bulk_threads() == 0)

    run(main())


def test_a_refusal_of_a_fetch_reaches_the_caller_and_the_connection_stays() -> None:
    async def main() -> None:
        service = FakeSyncer(content=payload_of(2 * MIB))
        async with past_grpc(service) as (_, client):
            await client.fetch(fetch_request())
            with pytest.raises(RefusedError, match="no version 3"):
                await client.fetch(fetch_request(version=3))
            _, content = await client.fetch(dataclasses.replace(fetch_request(), version=7))
            assert client.bytes_past_grpc == content.nbytes and not client._lanes._faults

    run(main())


def test_a_transfer_that_nobody_waits_for_any_more_fails_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio told of an exception that was never retrieved, with a traceback, when a session ended in a transfer."""

    async def main() -> None:
        go = threading.Event()

        def fails(wire: Wire) -> None:
            go.wait(10)
            raise OSError("it broke after all")

        async with past_grpc(FakeSyncer()) as (_, client):
            lane = client._lanes._free[-1]
            waits = asyncio.create_task(lane.do(fails, 30))
            await asyncio.sleep(0)
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            go.set()
            await asyncio.sleep(0.1)  # the thread reports to this loop

    with caplog.at_level(logging.ERROR):
        run(main())
        gc.collect()
    assert "never retrieved" not in caplog.text
