"""What a syncer prints when learners go away in the middle of something: at most a line, never a traceback."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest
from wire_fakes import FakeSyncer, fetch_request, hello, payload_of, push_header, run, serving, until

from atoll.core.messages import Hello, Progress
from atoll.wire import RunningServer, ServerOptions
from atoll.wire.convert import encode_learner_message
from atoll.wire.limits import MIB
from atoll.wire.parts import PushOpen, encode_fetch_request, encode_part, encode_push_open
from atoll.wire.seal import seal
from atoll.wire.sessions import Sessions
from atoll.wire.transport import FETCH_METHOD, PUSH_METHOD, SESSION_METHOD

CONTENT = payload_of(32 * MIB)
"""Far more than connection windows hold: whoever does not read leaves the syncer standing in the middle of it."""
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 4 * MIB)]


async def open_session(channel: Any) -> Any:
    call = channel.stream_stream(SESSION_METHOD)()
    await call.write(seal(encode_learner_message(hello())))
    await call.read()
    await call.write(seal(encode_learner_message(Progress(1, 1, 10, 1000, 1.0, (0,)))))
    return call


async def open_push(channel: Any) -> Any:
    call = channel.stream_unary(PUSH_METHOD)()
    opened = encode_push_open(PushOpen(push_header(CONTENT), 7, 1, MIB))
    await call.write(encode_part(0, CONTENT[:MIB].data, opened))
    await call.write(encode_part(MIB, CONTENT[MIB : 2 * MIB].data))
    return call


async def open_fetch(channel: Any) -> Any:
    call = channel.unary_stream(FETCH_METHOD)(seal(encode_fetch_request(fetch_request())))
    await call.read()
    return call


def printed(work: Coroutine[Any, Any, None], capfd: pytest.CaptureFixture[str], logged: list[logging.LogRecord]) -> str:
    """What a terminal would show: standard error, and records with the exceptions that they carry."""
    run(work)
    gc.collect()  # a task whose exception nobody asked for complains when it is collected
    told = "\n".join(f"{record.getMessage()} {'Traceback' if record.exc_info else ''}" for record in logged)
    return told + capfd.readouterr().err


@pytest.mark.parametrize("how", ["cancel", "close"])
@pytest.mark.parametrize("begin", [open_session, open_push, open_fetch])
def test_a_learner_that_goes_away_in_the_middle_leaves_no_traceback(
    begin: Callable[[Any], Coroutine[Any, Any, Any]],
    how: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        syncer = FakeSyncer(CONTENT)
        async with serving(syncer, transfer_idle_s=0.2) as server:
            channel = grpc.aio.insecure_channel(server.address, options=OPTIONS)
            call = await begin(channel)
            await until(lambda: bool(syncer.received or syncer.begun or syncer.fetches))
            if how == "cancel":
                call.cancel()
            await channel.close()
            await until(lambda: len(server._transfers) == 0 and server.sessions_count == 0)

    assert "Traceback" not in printed(scenario(), capfd, caplog.records)


def test_a_learner_too_slow_for_a_part_costs_a_line_and_gets_it_all_the_same(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.wire.server.PART_S", 0.2)

    async def scenario() -> None:
        async with serving(FakeSyncer(CONTENT)) as server:
            channel = grpc.aio.insecure_channel(server.address, options=OPTIONS)
            call = await open_fetch(channel)
            await until(lambda: any("has taken nothing" in record.getMessage() for record in caplog.records))
            parts = 1
            while await call.read() is not grpc.aio.EOF:
                parts += 1
            assert parts == len(CONTENT) // MIB and await call.code() == grpc.StatusCode.OK
            await channel.close()

    text = printed(scenario(), capfd, caplog.records)
    assert "Traceback" not in text and "learner a has taken nothing of fragment 0 for 0.2 s" in text


def test_the_deadline_of_a_learner_that_stands_still_ends_its_fetch(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.wire.server.PART_S", 0.2)
    ended: list[str] = []
    real = RunningServer._fetch

    async def watched(self: RunningServer, context: Any, identity: Any) -> None:
        try:
            await real(self, context, identity)
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    monkeypatch.setattr(RunningServer, "_fetch", watched)

    async def scenario() -> None:
        async with serving(FakeSyncer(CONTENT)) as server:
            channel = grpc.aio.insecure_channel(server.address, options=OPTIONS)
            call = channel.unary_stream(FETCH_METHOD)(seal(encode_fetch_request(fetch_request())), timeout=0.6)
            await call.read()
            await until(lambda: bool(ended))
            await channel.close()

    assert "Traceback" not in printed(scenario(), capfd, caplog.records)
    assert len(ended) == 1


class BrokenContext:
    """A stream whose connection is lost after the Hello."""

    def __init__(self) -> None:
        self._messages = [seal(encode_learner_message(hello()))]

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def read(self) -> bytes:
        if self._messages:
            return self._messages.pop()
        raise grpc.aio.InternalError("Failed execute_batch")

    async def write(self, message: bytes) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")


class QuietSyncer(FakeSyncer):
    """Has nothing to say at first, so that it is the reader that finds the connection broken."""

    def open_session(self, session: int, hello: Hello, send: Any, identity: Any = None) -> None:
        self.sends[session] = send


def test_a_connection_that_breaks_ends_its_session_with_a_reason_and_without_a_traceback(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    syncer = QuietSyncer()
    sessions = Sessions(syncer, ServerOptions())
    text = printed(sessions.serve(BrokenContext()), capfd, caplog.records)
    assert "Traceback" not in text
    assert [reason for _, reason in syncer.closed] == ["the connection broke (InternalError)"]


POLLERS = """
import asyncio, gc, threading
from atoll.wire.channel import ClientOptions, open_channel
from atoll.wire.transport import control_channel_arguments

async def connect():
    channel = open_channel(ClientOptions("127.0.0.1:1"), control_channel_arguments())
    await asyncio.sleep(0)
    return channel

def pollers():
    return {thread.ident for thread in threading.enumerate() if "_poll_wrapper" in thread.name}

before = pollers()
for _ in range(3):
    channel = asyncio.run(connect())
    del channel
    gc.collect()
print(len(before), before == pollers())
"""


def test_the_last_connection_takes_nothing_of_grpc_with_it() -> None:
    """It would wait for the poller in whatever thread collects the garbage, and has been seen to wait for ever."""
    said = subprocess.run([sys.executable, "-c", POLLERS], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split() == ["1", "True"]
