"""Every bit of a sealed message counts, old peers do not mind the seal, and damage ends a session but not a learner."""

from __future__ import annotations

import asyncio
import itertools
from types import ModuleType

import pytest
from wire_fakes import FakeSyncer, run, serving, until

from atoll.core.messages import Hello, Nothing, PushReply, Refusal, Stop, SyncerMessage, TensorSpec, Welcome
from atoll.errors import PayloadError, RefusedError
from atoll.wire import ClientOptions, control, run_sessions, sessions
from atoll.wire.control import SendToSyncer
from atoll.wire.convert import encode_learner_message, parse_learner_message
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.parts import encode_push_reply, parse_push_reply
from atoll.wire.seal import SEAL_BYTES, seal, unseal

HELLO = Hello("learner-0", "instance", 2, (TensorSpec("weight", (4, 4), "float32"),))


def test_a_sealed_message_comes_back_as_it_was() -> None:
    for message in (b"", b"x", encode_learner_message(HELLO)):
        assert unseal(seal(message)) == message


def test_every_flipped_bit_is_noticed() -> None:
    message = encode_learner_message(HELLO)
    sealed = seal(message)
    believed = 0
    for bit in range(8 * len(sealed)):
        flipped = bytearray(sealed)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            believed += unseal(bytes(flipped)) != bytes(flipped)
        except PayloadError:
            continue
        # Only the key of the seal itself can be hit unnoticed: the message is then whole, with a field behind it.
        assert len(message) <= bit // 8 < len(message) + 2
    assert believed == 0


def test_a_reader_that_does_not_know_the_seal_skips_it() -> None:
    sealed = seal(encode_learner_message(HELLO))
    assert parse_learner_message(sealed) == HELLO
    assert pb.LearnerMessage.FromString(sealed).hello.learner == "learner-0"
    assert parse_push_reply(seal(encode_push_reply(PushReply(True)))) == PushReply(True)


def test_a_message_without_a_seal_is_taken_as_it_is() -> None:
    message = encode_learner_message(Nothing(1, 0))
    assert len(seal(message)) == len(message) + SEAL_BYTES
    assert unseal(message) == message


class Handler:
    """A learner's side that says something as soon as it is up, and counts."""

    def __init__(self) -> None:
        self.ups = 0
        self.downs: list[str] = []
        self.heard: list[SyncerMessage] = []

    def hello(self) -> Hello:
        return HELLO

    def on_up(self, send: SendToSyncer, welcome: Welcome) -> None:
        self.ups += 1
        send(Nothing(self.ups, 0))

    def on_message(self, message: SyncerMessage) -> None:
        self.heard.append(message)

    def on_down(self, reason: str) -> None:
        self.downs.append(reason)


class Damage:
    """Seals as always, and flips one bit in the given messages, by their number."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers
        self._count = -1

    def __call__(self, message: bytes) -> bytes:
        self._count += 1
        sealed = bytearray(seal(message))
        if self._count in self._numbers:
            sealed[len(message) // 2] ^= 0x08
        return bytes(sealed)


@pytest.mark.parametrize(("module", "number"), [(control, 0), (control, 1), (sessions, 0), (sessions, 1)])
def test_damage_ends_a_session_and_not_the_learner(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, number: int
) -> None:
    """A damaged Hello or Nothing, Welcome or Stop: the learner comes back by itself and is heard and hears."""
    monkeypatch.setattr(module, "seal", Damage(number))

    async def scenario() -> None:
        syncer = FakeSyncer()
        async with serving(syncer) as server:
            handler, stop = Handler(), asyncio.Event()
            learner = asyncio.create_task(run_sessions(ClientOptions(server.address), handler, stop))
            while not (handler.heard and syncer.received) and not learner.done():
                await asyncio.sleep(0.01)
                for send in list(syncer.sends.values()):
                    send(Stop("enough"))
            stop.set()
            await learner
        damaged = [reason for reason in handler.downs if "changed on its way" in reason]
        assert len(damaged) == (module is sessions or number == 1)  # a damaged Nothing is told to its sender
        assert len(handler.downs) >= 2 and not any(Refusal.BAD_REQUEST in reason for reason in handler.downs)

    run(scenario())


def test_a_token_that_was_right_before_is_tried_some_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes may have been damaged; but a syncer that keeps refusing it is another run's."""

    async def scenario() -> None:
        handler, stop = Handler(), asyncio.Event()
        async with serving(FakeSyncer(), token="right") as server:
            address = server.address
            learner = asyncio.create_task(run_sessions(ClientOptions(address, "right"), handler, stop))
            await until(lambda: handler.ups == 1)
        async with serving(FakeSyncer(), token="another", listen=address):
            with pytest.raises(RefusedError) as refused:
                await learner
        assert refused.value.code == Refusal.TOKEN
        # In a row: on a busy machine an attempt in between may fail in another way, and the count begins again.
        in_a_row = itertools.takewhile(lambda reason: Refusal.TOKEN in reason, reversed(handler.downs))
        assert len(list(in_a_row)) == control.TOKEN_TRIES

    run(scenario())


def test_a_token_that_never_was_right_is_refused_at_once() -> None:
    async def scenario() -> None:
        handler = Handler()
        async with serving(FakeSyncer(), token="right") as server:
            with pytest.raises(RefusedError):
                await run_sessions(ClientOptions(server.address, "wrong"), handler, asyncio.Event())
        assert len(handler.downs) == 1

    run(scenario())
