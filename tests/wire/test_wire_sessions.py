"""Control sessions over real sockets: greetings, refusals, order, bounds, reconnecting."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import socket
import threading
from dataclasses import replace

import pytest
from ports import quiet_port
from wire_fakes import FakeSyncer, bulk_client, fetch_request, hello, payload_of, push_header, run, serving, until

from atoll.core import messages as m
from atoll.core.config import SyncConfig
from atoll.errors import ConfigError, FencedError, RefusedError, UnreachableError
from atoll.wire import BulkClient, ClientOptions, ControlClient, SendToSyncer, ask_to_leave, fetch_status, run_sessions
from atoll.wire.channel import Backoff, open_channel
from atoll.wire.control import PIECES_SINCE
from atoll.wire.convert import encode_learner_message, parse_syncer_message
from atoll.wire.limits import HELLO_PIECE_BYTES, MESSAGE_BYTES_MAX
from atoll.wire.seal import unseal
from atoll.wire.sessions import EncodedOnce, Session
from atoll.wire.transport import EOF, PIECES_KEY, SESSION_METHOD, control_channel_arguments, grpc


def progress(step: int) -> m.Progress:
    return m.Progress(step, step, step * 100, 10**6, math.nan, (0,))


class Learner:
    """A handler that writes down what happens."""

    def __init__(self, name: str = "a") -> None:
        self.name = name
        self.send: SendToSyncer | None = None
        self.ups: list[m.Welcome] = []
        self.messages: list[m.SyncerMessage] = []
        self.downs: list[str] = []

    def hello(self) -> m.Hello:
        return hello(self.name)

    def on_up(self, send: SendToSyncer, welcome: m.Welcome) -> None:
        self.send = send
        self.ups.append(welcome)

    def on_message(self, message: m.SyncerMessage) -> None:
        self.messages.append(message)

    def on_down(self, reason: str) -> None:
        self.downs.append(reason)


def test_messages_go_both_ways_in_order() -> None:
    async def main() -> None:
        service = FakeSyncer()
        async with serving(service) as server, ControlClient(ClientOptions(server.address)) as client:
            welcome = await client.open(hello())
            assert welcome.run == "run" and welcome.config == SyncConfig()
            sent = [m.Ready(3, (0, -1)), m.Nothing(4, 1), m.Leave("done")]
            for message in sent:
                client.send(message)
            for fragment in range(50):
                service.sends[1](m.Request(9, 0, fragment))
            await until(lambda: len(service.received) == 3)
            assert service.received == [(1, message) for message in sent]
            server.close_session(1, "enough")
            assert [message async for message in client] == [m.Request(9, 0, fragment) for fragment in range(50)]
            await until(lambda: bool(service.closed))
            assert service.closed == [(1, "enough")]

    run(main())


def test_a_refused_hello_says_why() -> None:
    async def main() -> None:
        service = FakeSyncer()
        async with serving(service) as server, ControlClient(ClientOptions(server.address)) as client:
            with pytest.raises(RefusedError, match="update the learner") as caught:
                await client.open(hello(protocol=99))
            assert caught.value.code == m.Refusal.PROTOCOL
            assert not service.closed

    run(main())


def test_a_second_instance_fences_the_first() -> None:
    async def main() -> None:
        service, learner = FakeSyncer(), Learner()
        async with serving(service) as server:
            sessions = asyncio.create_task(run_sessions(ClientOptions(server.address), learner, asyncio.Event()))
            await until(lambda: bool(learner.ups))
            service.sends[1](m.Refused(m.Refusal.FENCED, "a newer process has this id; stop this one"))
            with pytest.raises(FencedError, match="newer process"):
                await sessions
            await until(lambda: bool(service.closed))
            assert len(service.closed) == len(learner.downs) == 1

    run(main())


@pytest.mark.parametrize("token", ["", "wrong"])
def test_a_wrong_token_is_refused_on_every_call(token: str) -> None:
    async def main() -> None:
        service = FakeSyncer(content=payload_of(10))
        async with serving(service, token="right") as server:
            options = ClientOptions(server.address, token=token)
            with pytest.raises(RefusedError, match="run token") as caught:
                await run_sessions(options, Learner(), asyncio.Event())
            assert caught.value.code == m.Refusal.TOKEN
            with pytest.raises(RefusedError, match="run token"):
                await fetch_status(options)
            with pytest.raises(RefusedError, match="run token"):
                await ask_to_leave(options, "a")
            async with bulk_client(server.address, token=token) as client:
                with pytest.raises(RefusedError, match="run token"):
                    await client.push(push_header(payload_of(10)), payload_of(10))
                with pytest.raises(RefusedError, match="run token"):
                    await client.fetch(fetch_request())
            assert not service.sends and not service.begun and not service.fetches
            assert await fetch_status(ClientOptions(server.address, token="right")) == {"learners": 0}

    run(main())


def test_a_learner_comes_back_after_the_syncer_restarts_on_the_same_port() -> None:
    async def main() -> None:
        learner, stop = Learner(), asyncio.Event()
        first, second = FakeSyncer(), FakeSyncer()
        async with serving(first) as server:
            address = server.address
            sessions = asyncio.create_task(run_sessions(ClientOptions(address), learner, stop))
            await until(lambda: len(learner.ups) == 1)
        await until(lambda: bool(learner.downs))
        assert [number for number, _ in first.closed] == [1]
        async with serving(second, listen=address):
            await until(lambda: len(learner.ups) == 2)
            assert learner.send is not None
            learner.send(m.Leave("finished"))
            stop.set()
            await sessions
            assert second.received == [(1, m.Leave("finished"))]
            await until(lambda: bool(second.closed))
            assert second.closed == [(1, "the learner closed its stream")]

    run(main())


def test_unreachable_is_reported_and_retried_until_asked_to_stop() -> None:
    async def main() -> None:
        async with serving(FakeSyncer()) as server:
            address = server.address
        learner, stop = Learner(), asyncio.Event()
        sessions = asyncio.create_task(run_sessions(ClientOptions(address), learner, stop))
        await until(lambda: len(learner.downs) >= 3)
        assert not learner.ups and "check that it runs there" in learner.downs[0]
        stop.set()
        await sessions
        with pytest.raises(UnreachableError, match=f"connection refused at {address}.*atoll syncer --listen"):
            await fetch_status(ClientOptions(address))

    run(main())


def test_of_several_unsent_progress_only_the_newest_is_sent() -> None:
    async def main() -> None:
        service = FakeSyncer()
        async with serving(service) as server, ControlClient(ClientOptions(server.address)) as client:
            await client.open(hello())
            for step in range(1, 1001):
                client.send(progress(step))
            client.send(m.Nothing(1, 0))
            client.send(progress(1001))
            await until(lambda: len(service.received) >= 2)
            await client.finish()
            steps = [said.step for _, said in service.received if isinstance(said, m.Progress)]
            assert steps == [1001] and isinstance(service.received[0][1], m.Nothing)

    run(main())


class Slow:
    """Writes one message at a time, when told to."""

    def __init__(self) -> None:
        self.written: list[m.SyncerMessage] = []
        self.open = asyncio.Event()

    async def write(self, data: bytes) -> None:
        await self.open.wait()
        self.written.append(parse_syncer_message(unseal(data)))


def test_requests_overtake_updates_and_notices_do_not() -> None:
    """On a thin link updates wait; what is small and urgent goes first, and versions of one fragment stay in order."""

    async def main() -> None:
        session, link = Session(1, 10**6, EncodedOnce().bytes_of), Slow()
        writing = asyncio.create_task(session.write_to(link))
        for version, update in ((1, b"x" * 100), (2, b""), (3, b"")):
            session.send(m.Published(0, version, version, 0, -1, 1, 0, update))
        session.send(m.Published(1, 1, 1, 0, -1, 1, 0))
        session.send(m.Request(4, 0, 0))
        link.open.set()
        await until(lambda: len(link.written) == 5)
        writing.cancel()
        names = [(said.fragment, getattr(said, "version", "asked")) for said in link.written]  # type: ignore[union-attr]
        assert names == [(1, 1), (0, "asked"), (0, 1), (0, 2), (0, 3)]

    run(main())


def test_a_learner_that_does_not_read_is_closed_and_its_queue_freed() -> None:
    async def main() -> None:
        service = FakeSyncer()
        async with serving(service, session_queue_bytes_max=100_000) as server:
            options = ClientOptions(server.address)
            channel = open_channel(options, control_channel_arguments())
            call = channel.stream_stream(SESSION_METHOD)()
            await call.write(encode_learner_message(hello()))
            await until(lambda: bool(service.sends))
            text = m.Upcoming(tuple(range(4000)))
            for _ in range(100_000):
                if service.closed:
                    break
                for _ in range(10):
                    service.sends[1](text)
                await asyncio.sleep(0)
            assert [number for number, _ in service.closed] == [1]
            assert "does not read" in service.closed[0][1]
            service.sends[1](text)  # A late send does nothing.
            async with ControlClient(options) as other:
                await other.open(hello("b"))  # The others are unharmed.
            await channel.close()

    run(main())


@pytest.mark.parametrize("bad", [b"", b"\xff\xff\xff", encode_learner_message(hello())])
def test_a_message_that_breaks_the_rules_ends_the_session_with_a_reason(bad: bytes) -> None:
    async def main() -> None:
        service = FakeSyncer()
        async with serving(service) as server:
            channel = open_channel(ClientOptions(server.address), control_channel_arguments())
            call = channel.stream_stream(SESSION_METHOD)()
            await call.write(encode_learner_message(hello()))
            assert isinstance(parse_syncer_message(await call.read()), m.Welcome)
            await call.write(bad)
            refused = parse_syncer_message(await call.read())
            assert isinstance(refused, m.Refused) and refused.code == m.Refusal.BAD_REQUEST
            assert await call.read() is EOF
            await until(lambda: bool(service.closed))
            assert len(service.closed) == 1 and not service.received
            await channel.close()

    run(main())


def test_a_hello_that_is_larger_than_a_message_comes_in_pieces() -> None:
    async def main() -> None:
        syncer = FakeSyncer()
        syncer.protocol = PIECES_SINCE
        shape = tuple(range(1, 41))
        tensors = tuple(m.TensorSpec(f"{number:0900d}", shape, "float32") for number in range(10_000))
        large = replace(hello(protocol=PIECES_SINCE), tensors=tensors)
        assert len(encode_learner_message(large)) > MESSAGE_BYTES_MAX
        async with serving(syncer) as server, ControlClient(ClientOptions(server.address)) as client:
            assert (await client.open(large)).run == "run"
            assert syncer.hellos == [large]

    run(main())


@pytest.mark.parametrize("pieces, sent", [("0", 0), ("33", 0), ("many", 0), ("2", 1), ("2", 2)])
def test_pieces_that_make_no_hello_are_refused(pieces: str, sent: int) -> None:
    async def main() -> None:
        async with serving(FakeSyncer()) as server:
            channel = grpc.aio.insecure_channel(server.address)
            call = channel.stream_stream(SESSION_METHOD)(metadata=((PIECES_KEY, pieces),))
            with contextlib.suppress(grpc.aio.AioRpcError):  # refused before all of it was written
                for _ in range(sent):
                    await call.write(bytes(HELLO_PIECE_BYTES + 1))
                await call.done_writing()
            answer = parse_syncer_message(unseal(await call.read()))
            assert isinstance(answer, m.Refused) and "no usable Hello" in answer.detail
            await channel.close()

    run(main())


def test_sessions_are_bounded() -> None:
    async def main() -> None:
        async with serving(FakeSyncer(), sessions_max=1) as server:
            options = ClientOptions(server.address)
            async with ControlClient(options) as first, ControlClient(options) as second:
                await first.open(hello("a"))
                with pytest.raises(RefusedError, match="1 sessions"):
                    await second.open(hello("b"))

    run(main())


def test_stop_reaches_a_learner_before_the_syncer_goes() -> None:
    async def main() -> None:
        service, learner, stop = FakeSyncer(), Learner(), asyncio.Event()
        async with serving(service) as server:
            sessions = asyncio.create_task(run_sessions(ClientOptions(server.address), learner, stop))
            await until(lambda: bool(learner.ups))
            service.sends[1](m.Stop("budget spent"))
            await server.stop(1.0)
            await until(lambda: bool(learner.downs))
            assert learner.messages == [m.Stop("budget spent")]
            stop.set()
            await sessions

    run(main())


def test_waits_double_up_to_a_bound_with_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.wire.channel.BACKOFF_S_MIN", 0.1)
    monkeypatch.setattr("atoll.wire.channel.BACKOFF_S_MAX", 5.0)
    backoff = Backoff()
    full = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    for wait, most in zip([backoff.next_s() for _ in full], full, strict=True):
        assert most / 2 <= wait <= most
    backoff.reset()
    assert backoff.next_s() <= 0.1


def test_asked_to_stop_while_a_syncer_accepts_but_never_answers() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            learner, stop = Learner(), asyncio.Event()
            options = ClientOptions(f"127.0.0.1:{silent.getsockname()[1]}")
            sessions = asyncio.create_task(run_sessions(options, learner, stop))
            await asyncio.sleep(0.05)
            stop.set()
            await sessions  # `run` bounds it
            assert not learner.ups and learner.downs == ["asked to stop"]

    run(main())


def test_learner_and_syncer_may_have_event_loops_of_their_own_in_one_process() -> None:
    service, addresses, done = FakeSyncer(), queue.Queue[str](), threading.Event()

    async def syncer() -> None:
        async with serving(service) as server:
            addresses.put(server.address)
            await asyncio.to_thread(done.wait, 20.0)

    async def learner() -> None:
        payload = payload_of(100_000)
        options = ClientOptions(addresses.get(timeout=20.0))
        async with ControlClient(options) as client, bulk_client(options.address) as bulk:
            await client.open(hello())
            for seq in range(20):
                client.send(progress(seq))
                assert (await bulk.push(push_header(payload, seq=seq), payload)).accepted

    thread = threading.Thread(target=run, args=(syncer(),))
    thread.start()
    try:
        run(learner())
    finally:
        done.set()
        thread.join(10.0)
    assert len(service.pushed) == 20


def test_of_several_addresses_each_is_tried_and_transfers_follow_the_session() -> None:
    async def main() -> None:
        learner, stop = Learner(), asyncio.Event()
        first, second = FakeSyncer(), FakeSyncer(content=payload_of(10))
        elsewhere, there = f"127.0.0.1:{quiet_port()}", f"127.0.0.1:{quiet_port()}"
        async with serving(first, listen=elsewhere):
            bulk = BulkClient(ClientOptions(f"{there},{elsewhere}"))
            sessions = asyncio.create_task(
                run_sessions(ClientOptions(f"{there}, {elsewhere}"), learner, stop, bulk.move)
            )
            await until(lambda: len(learner.ups) == 1)
            assert len(first.hellos) == 1 and len(learner.downs) == 1
            await bulk.push(push_header(payload_of(10)), payload_of(10))
            assert len(first.pushed) == 1
            assert await fetch_status(ClientOptions(f"{there},{elsewhere}")) == {"learners": 1}
        async with serving(second, listen=there):  # the syncer was moved
            await until(lambda: len(learner.ups) == 2)
            _, content = await bulk.fetch(fetch_request())
            assert bytes(content) == payload_of(10).tobytes()
            stop.set()
            await sessions
            await bulk.close()

    run(main())


def test_a_fetch_between_two_attempts_ends_with_its_session() -> None:
    async def main() -> None:
        address = f"127.0.0.1:{quiet_port()}"
        bulk = BulkClient(ClientOptions(address))  # nobody is there any more
        fetching = asyncio.create_task(bulk.fetch(fetch_request()))
        await asyncio.sleep(0.05)  # it has tried, and waits to try again
        await bulk.start_again()
        with pytest.raises(UnreachableError, match="the session ended"):
            await fetching
        async with serving(FakeSyncer(content=payload_of(10)), listen=address):
            _, content = await bulk.fetch(fetch_request())
            assert bytes(content) == payload_of(10).tobytes()
        await bulk.close()

    run(main())


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:7077,127.0.0.1", "is not host:port"),
        ("127.0.0.1:7077,,127.0.0.1:7078", "is not host:port"),
        ("127.0.0.1:7077,127.0.0.1:0", "has port 0"),
        (",".join(["127.0.0.1:7077"] * 9), "give at most 8"),
        ("127.0.0.1:7077,example.org:7077", "would be sent in clear"),
    ],
)
def test_every_one_of_several_addresses_is_checked(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClientOptions(address, token="secret")
