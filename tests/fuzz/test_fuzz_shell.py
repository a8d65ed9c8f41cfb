"""A syncer on a real port, with one honest learner and many that send anything: the honest one does not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import xxhash
from fuzz_engine import soak_cases, soak_seed
from fuzz_streams import push_stream
from fuzz_wire import PUSH_OPENS, noise
from world import TENSORS

from atoll.codec import get_codec
from atoll.core import messages as m
from atoll.core.config import SyncConfig
from atoll.core.layout import build_layout
from atoll.observe.writer import NullWriter
from atoll.syncer.shell import SyncerShell
from atoll.wire import BulkClient, ClientOptions, ServerOptions, fetch_status, serve
from atoll.wire.control import ControlClient
from atoll.wire.convert import encode_learner_message, parse_syncer_message
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.parts import encode_part, encode_push_open, parse_fetch_refused, parse_part, parse_push_reply
from atoll.wire.seal import unseal
from atoll.wire.transport import EOF, FETCH_METHOD, LEAVE_METHOD, PUSH_METHOD, SESSION_METHOD, STATUS_METHOD, grpc

ATTACKS = 250
"""In the default run: sessions, pushes and fetches, a few messages each."""
ANSWER_S = 30.0
"""A call that is neither answered nor closed after this hangs. They take milliseconds."""
CODEC = "fp32"


class Honest:
    """A learner that gives the first parameters and then reports its steps."""

    def __init__(self, address: str) -> None:
        self.options = ClientOptions(address)
        self.layout = build_layout(TENSORS, 4)
        self.steps = 0

    async def push(self, kind: m.PushKind, fragment: int, seq: int) -> m.PushReply:
        values = np.zeros(self.layout.fragments[fragment].size, np.float32)
        payload = values.view(np.uint8) if kind is m.PushKind.SEED else get_codec(CODEC).encode(values + 1.0)
        base, counted = (-1, (0, 0)) if kind is m.PushKind.SEED else (0, (1, 10))
        checksum = xxhash.xxh3_64_intdigest(payload.data)
        header = m.PushHeader(kind, "honest", 1, fragment, 0, 0, seq, base, *counted, "fp32", payload.nbytes, checksum)
        return await self.bulk.push(header, payload)

    async def join(self) -> None:
        self.control, self.bulk = ControlClient(self.options), BulkClient(self.options)
        welcome = await self.control.open(m.Hello("honest", "h", 2, TENSORS))
        assert welcome.seed and welcome.fingerprint == self.layout.fingerprint
        self.messages = aiter(self.control)
        for fragment in range(4):
            assert (await self.push(m.PushKind.SEED, fragment, 0)).accepted
        while not isinstance(await anext(self.messages), m.Start):
            pass
        self.control.send(m.Ready(0, (0, 0, 0, 0)))

    async def step(self, shell: SyncerShell) -> None:
        """Its word still counts."""
        self.steps += 1
        self.control.send(m.Progress(self.steps, self.steps, 10 * self.steps, 10**6, 1.0, (0, 0, 0, 0)))
        member = shell.machine.membership.members["honest"]
        while member.steps < self.steps:
            await asyncio.sleep(0.001)
        assert str(member.state) == "active" and member.generation == 1

    async def close(self) -> None:
        await self.control.__aexit__()
        await self.bulk.close()


async def attack_session(channel: Any, rng: Random, number: int) -> None:
    hello = m.Hello(f"evil-{number}", "e", rng.choice((1, 2)), TENSORS)
    said = [encode_learner_message(hello)] if rng.random() < 0.85 else []
    said += [noise(pb.LearnerMessage)(rng) for _ in range(rng.choice((1, 3, 8)))]
    if rng.random() < 0.3:
        said.insert(rng.randrange(len(said) + 1), rng.randbytes(rng.choice((0, 1, 40))))
    call = channel.stream_stream(SESSION_METHOD)()
    try:
        for message in said:
            await call.write(message)
        await call.done_writing()
        while (answer := await call.read()) is not EOF:
            parse_syncer_message(unseal(answer))  # the syncer itself never talks nonsense
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # closed on us: that is an answer, too


async def attack_push(channel: Any, rng: Random, number: int) -> None:
    parts = [noise(pb.PushPart)(rng) for _ in range(rng.choice((0, 1, 2)))]
    kind = rng.randrange(3)
    if kind == 0:
        parts = [rng.choice(push_stream()), *parts]
    elif kind == 1:
        parts = [encode_part(0, memoryview(rng.randbytes(9)), encode_push_open(rng.choice(PUSH_OPENS))), *parts]
    else:
        parts = [encode_part(0, memoryview(b"x"), noise(pb.PushOpen)(rng)), *parts]
    call = channel.stream_unary(PUSH_METHOD)()
    try:
        for part in parts:
            await call.write(part)
        await call.done_writing()
        assert not parse_push_reply(unseal(await call)).accepted
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass


async def attack_fetch(channel: Any, rng: Random, number: int) -> None:
    request = noise(pb.FetchRequest)(rng) if rng.random() < 0.8 else rng.randbytes(20)
    async for message in channel.unary_stream(FETCH_METHOD)(request):
        part = parse_part(message)
        if part.refused is not None:
            assert parse_fetch_refused(part.refused).code


async def attack_status(channel: Any, rng: Random, number: int) -> None:
    await channel.unary_unary(STATUS_METHOD)(rng.randbytes(50))


async def attack_leave(channel: Any, rng: Random, number: int) -> None:
    request = rng.choice((rng.randbytes(50), pb.AskToLeaveRequest(learner="nobody").SerializeToString()))
    assert pb.AskToLeaveReply.FromString(await channel.unary_unary(LEAVE_METHOD)(request)).refused.code


ATTACK: tuple[Callable[[Any, Random, int], Awaitable[None]], ...] = (
    *(attack_session, attack_session, attack_session),
    *(attack_push, attack_push, attack_fetch, attack_status, attack_leave),
)


async def storm(seed: int, attacks: int) -> None:
    config = SyncConfig(fragments=4, learners_expected=1, quorum="1", codec_up=CODEC, codec_down=CODEC)
    shell = SyncerShell(config, "fuzzed", NullWriter())
    server = await serve(shell, ServerOptions(listen="127.0.0.1:0", transfer_idle_s=0.2))
    shell.platform.close_link = server.close_session
    honest = Honest(server.address)
    channel = grpc.aio.insecure_channel(server.address)
    try:
        await honest.join()
        for number in range(attacks):
            rng = Random(f"shell/{seed}/{number}")
            attack = rng.choice(ATTACK)
            try:
                async with asyncio.timeout(ANSWER_S):
                    await attack(channel, rng, number)
                    await honest.step(shell)
            except Exception as error:
                raise AssertionError(f"{attack.__name__}, seed {seed}, case {number}") from error
            assert shell.failure is None and not shell.fenced and not shell.finished.is_set()
        ledger = shell.machine.ledger
        for fragment in range(4):
            line = ledger.fragment_totals(fragment)
            assert line.processed == line.merged + line.pending + sum(line.discarded.values())
        replies = [await honest.push(m.PushKind.CONTRIBUTION, fragment, 0) for fragment in range(4)]
        assert all(reply.accepted for reply in replies), replies
        assert (await fetch_status(honest.options))["run"] == "fuzzed"
        while any(transfer for transfer in (server.transfers_count, server.sessions_count - 1)):
            await asyncio.sleep(0.01)  # the fuzzers' own are all given up
    finally:
        await honest.close()
        await channel.close()
        await server.stop(0.0)
        await shell.close()


def test_the_honest_learner_does_not_notice() -> None:
    asyncio.run(storm(0, ATTACKS))


@pytest.mark.soak
def test_soak() -> None:
    asyncio.run(storm(soak_seed(), soak_cases() // 10))
