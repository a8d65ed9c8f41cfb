"""Sessions between versions: the newest protocol that both sides know, and nothing newer than it on the wire."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
from wire_fakes import FakeSyncer, hello, run, serving, until

from atoll.core import messages as m
from atoll.core.config import SyncConfig
from atoll.errors import RefusedError, RemoteProtocolError
from atoll.wire import ClientOptions, ControlClient, SendToSyncer, build_version, run_sessions
from atoll.wire.channel import open_channel
from atoll.wire.convert import encode_learner_message, encode_syncer_message, parse_syncer_message
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.transport import SESSION_METHOD, control_channel_arguments
from atoll.wire.versions import SETTINGS_1, SINCE, hello_in, learner_message_in, settings_in

REPORT = m.DataReport("train", 1, 100, 2)
LATER: dict[str, Any] = {"epoch": 3, "checksums": (6, 7), "wants_inner": True, "frozen": 8, "fingerprint": "9"}
HELLO = dataclasses.replace(hello(), bases=(4, 5), **LATER)
BRIEF = dataclasses.replace(HELLO, tensors=())


class Learner:
    """A handler that greets with everything that the newest protocol can say."""

    def __init__(self) -> None:
        self.send: SendToSyncer | None = None
        self.ups: list[m.Welcome] = []
        self.messages: list[m.SyncerMessage] = []
        self.downs: list[str] = []

    def hello(self) -> m.Hello:
        return HELLO

    def on_up(self, send: SendToSyncer, welcome: m.Welcome) -> None:
        self.send = send
        self.ups.append(welcome)

    def on_message(self, message: m.SyncerMessage) -> None:
        self.messages.append(message)

    def on_down(self, reason: str) -> None:
        self.downs.append(reason)


def test_a_learner_speaks_the_older_protocol_to_an_older_syncer_and_the_newer_one_after_its_upgrade() -> None:
    async def main() -> None:
        learner, stop = Learner(), asyncio.Event()
        older, newer = FakeSyncer(), FakeSyncer()
        older.protocol = 1
        async with serving(older) as server:
            address = server.address
            sessions = asyncio.create_task(run_sessions(ClientOptions(address), learner, stop))
            await until(lambda: len(learner.ups) == 1)
            assert [h.protocol for h in older.hellos] == [3, 2, 1] and learner.ups[0].protocol == 1
            later = {"epoch": 0, "checksums": (), "wants_inner": False, "frozen": 0, "fingerprint": ""}
            assert older.hellos[2] == dataclasses.replace(HELLO, protocol=1, **later)
            assert not learner.downs  # the learner is not told of the first attempt
        async with serving(newer, listen=address):
            await until(lambda: len(learner.ups) == 2)
            assert newer.hellos == [BRIEF] and learner.ups[1].protocol == 3
            assert learner.send is not None
            learner.send(REPORT)
            newer.sends[1](m.DataLeases("train", 1))
            await until(lambda: bool(newer.received) and bool(learner.messages))
            assert newer.received == [(1, REPORT)] and learner.messages == [m.DataLeases("train", 1)]
            stop.set()
            await sessions

    run(main())


@pytest.mark.parametrize("code, hellos_count", [(m.Refusal.PROTOCOL, 3), (m.Refusal.LAYOUT, 1), (m.Refusal.TENSORS, 2)])
def test_only_a_refused_protocol_is_tried_again_and_the_oldest_is_final(code: m.Refusal, hellos_count: int) -> None:
    async def main() -> None:
        service = FakeSyncer()

        def refuse(session: int, greeting: m.Hello, *_others: Any) -> None:
            service.hellos.append(greeting)
            raise RefusedError(code, "not with you; update the learner")

        service.open_session = refuse  # type: ignore[method-assign]
        async with serving(service) as server:
            with pytest.raises(RefusedError, match="not with you") as caught:
                await run_sessions(ClientOptions(server.address), Learner(), asyncio.Event())
            assert caught.value.code == code and len(service.hellos) == hellos_count

    run(main())


def test_a_message_that_the_session_does_not_know_is_not_sent_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        service = FakeSyncer()
        service.protocol = 1
        async with serving(service) as server, ControlClient(ClientOptions(server.address)) as client:
            await client.open(hello(protocol=1))
            with caplog.at_level(logging.ERROR):
                client.send(REPORT)
                service.sends[1](m.Heal((0,)))
            assert "DataReport was not sent" in caplog.text and "Heal was not sent" in caplog.text
            client.send(m.Leave("done"))
            service.sends[1](m.Stop("enough"))
            await until(lambda: bool(service.received))
            assert service.received == [(1, m.Leave("done"))]
            server.close_session(1, "enough")
            assert [message async for message in client] == [m.Stop("enough")]

    run(main())


def test_a_learner_that_sends_what_its_session_does_not_know_is_turned_away() -> None:
    async def main() -> None:
        service = FakeSyncer()
        async with serving(service) as server:
            channel = open_channel(ClientOptions(server.address), control_channel_arguments())
            call = channel.stream_stream(SESSION_METHOD)()
            await call.write(encode_learner_message(hello(protocol=1)))
            assert isinstance(parse_syncer_message(await call.read()), m.Welcome)
            await call.write(encode_learner_message(m.Nothing(1, 0)))
            await call.write(encode_learner_message(REPORT))
            refused = parse_syncer_message(await call.read())
            assert isinstance(refused, m.Refused) and "DataReport in a session of protocol 1" in refused.detail
            assert service.received == [(1, m.Nothing(1, 0))]
            await channel.close()

    run(main())


def test_a_welcome_in_a_protocol_that_was_not_offered_is_an_error() -> None:
    async def main() -> None:
        service = FakeSyncer()

        def welcome(session: int, greeting: m.Hello, send: Any, _identity: Any) -> None:
            send(m.Welcome("run", 1, 1, SyncConfig(), "f" * 64, False, greeting.protocol + 1))

        service.open_session = welcome  # type: ignore[method-assign]
        async with serving(service) as server, ControlClient(ClientOptions(server.address)) as client:
            with pytest.raises(RemoteProtocolError, match="protocol 2 but this learner offered 1 to 1"):
                await client.open(hello(protocol=1))

    run(main())


# ---------------------------------------------------------------- what older ones get to see


def test_a_hello_in_protocol_1_has_only_the_fields_of_protocol_1() -> None:
    encoded = pb.LearnerMessage.FromString(encode_learner_message(hello_in(HELLO, 1))).hello
    known = {"learner", "instance", "protocol", "tensors", "generation", "run", "bases", "outstanding"}
    assert {field.name for field, _ in encoded.ListFields()} <= known
    assert hello_in(HELLO, 2) == dataclasses.replace(HELLO, protocol=2, fingerprint="")


def test_the_list_of_tensors_goes_out_only_when_the_syncer_asks_for_it() -> None:
    async def main() -> None:
        service, learner, stop = FakeSyncer(), Learner(), asyncio.Event()
        service.knows_model = False
        async with serving(service) as server:
            sessions = asyncio.create_task(run_sessions(ClientOptions(server.address), learner, stop))
            await until(lambda: len(learner.ups) == 1)
            assert service.hellos == [BRIEF, HELLO] and not learner.downs
            stop.set()
            await sessions

    run(main())


def test_progress_in_protocol_1_has_only_its_fields_and_causes() -> None:
    counts = (m.DiscardCount(0, m.Discard.STALE, 5), m.DiscardCount(0, m.Discard.EARLIER_RUN, 7))
    newer = (m.DiscardCount(0, m.Discard.ROLLED_BACK, 11), m.DiscardCount(1, m.Discard.ROLLED_BACK, 13))
    progress = m.Progress(1, 2, 3, 4, 0.5, (6,), counts + newer, pending=(8,))
    told = learner_message_in(progress, 1)
    assert isinstance(told, m.Progress)
    assert dataclasses.replace(told, discarded=()) == m.Progress(1, 2, 3, 4, 0.5, (6,))
    # No token is lost: what protocol 1 cannot name is added to what it can.
    assert set(told.discarded) == {
        m.DiscardCount(0, m.Discard.STALE, 5),
        m.DiscardCount(0, m.Discard.EARLIER_RUN, 18),
        m.DiscardCount(1, m.Discard.EARLIER_RUN, 13),
    }
    assert learner_message_in(progress, 2) is progress


def test_a_welcome_in_protocol_1_has_only_the_fields_and_settings_of_protocol_1() -> None:
    welcome = m.Welcome("run", 1, 1, SyncConfig(), "f" * 64, True)
    encoded = pb.SyncerMessage.FromString(encode_syncer_message(welcome)).welcome
    known = {"run", "epoch", "generation", "config_json", "fingerprint", "seed"}
    assert {field.name for field, _ in encoded.ListFields()} <= known
    assert set(json.loads(encoded.config_json)) == SETTINGS_1 - {"merge"}, "it knows no half-rda, nor needs to"
    assert parse_syncer_message(encode_syncer_message(welcome)) == welcome  # absent means 1
    newer = pb.SyncerMessage.FromString(encode_syncer_message(dataclasses.replace(welcome, protocol=2))).welcome
    assert newer.protocol == 2 and json.loads(newer.config_json) == settings_in(SyncConfig().to_dict(), 2)


def test_settings_that_came_later_are_left_out_for_protocol_1() -> None:
    settings = {"sync_every": 24, "colour": "blue"}
    assert settings_in(settings, 1) == {"sync_every": 24}
    assert settings_in(settings, 2) == settings


def test_every_kind_of_message_that_came_later_is_listed() -> None:
    """Protocol 1 had the fields of the two outer messages up to these numbers; the rest must be in SINCE."""
    later = [field for field in pb.LearnerMessage.DESCRIPTOR.fields if field.number > 6]
    later += [field for field in pb.SyncerMessage.DESCRIPTOR.fields if field.number > 10]
    assert {field.message_type.name for field in later} == {kind.__name__ for kind in SINCE}
    assert all(m.PROTOCOL_OLDEST < protocol <= m.PROTOCOL_VERSION for protocol in SINCE.values())


def test_a_checkout_that_was_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed every `atoll status`, and with it every relay."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("atoll.wire.versions.version", missing)
    assert build_version() == "unknown"
