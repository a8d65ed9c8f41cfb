"""Whose token a call carries, what ends with it, and how a large Hello is read."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from wire_fakes import FakeSyncer, fetch_request, hello, payload_of, push_header, run, serving, until

from atoll.core import Identity, Role
from atoll.core import messages as m
from atoll.errors import ConfigError, RefusedError
from atoll.wire import (
    MIB,
    BulkClient,
    ClientOptions,
    ControlClient,
    ServerOptions,
    ask_to_leave,
    fetch_status,
    limits,
    parts,
    serve,
    sessions,
)
from atoll.wire.channel import open_channel
from atoll.wire.seal import seal, unseal
from atoll.wire.transport import FETCH_METHOD, PUSH_METHOD, bulk_channel_arguments


class Book:
    """Tokens are names."""

    people: ClassVar[dict[str, Role]] = {
        "a": Role.LEARNER,
        "b": Role.LEARNER,
        "eye": Role.OBSERVER,
        "boss": Role.OPERATOR,
    }

    def find(self, token: str) -> Identity | str:
        return Identity(token, self.people[token]) if token in self.people else "nobody's; ask for one"


def code_of(error: pytest.ExceptionInfo[RefusedError]) -> str:
    return error.value.code


def test_a_call_carries_the_identity_of_its_token() -> None:
    async def main() -> None:
        service = FakeSyncer()
        async with serving(service, keys=Book()) as server:

            def options(token: str) -> ClientOptions:
                return ClientOptions(server.address, token=token)

            async with ControlClient(options("a")) as client:
                await client.open(hello("a"))
            assert service.identities == [Identity("a", Role.LEARNER)]
            with pytest.raises(RefusedError) as caught:
                await fetch_status(options("stranger"))
            assert code_of(caught) == m.Refusal.TOKEN and "nobody's" in caught.value.detail
            assert await fetch_status(options("eye"))
            assert await ask_to_leave(options("boss"), "a") == await ask_to_leave(options("a"), "a") == "active"
            for token in ("b", "eye"):
                with pytest.raises(RefusedError) as caught:
                    await ask_to_leave(options(token), "a")
                assert code_of(caught) == m.Refusal.NOT_ALLOWED
            payload = payload_of(1000)
            for token in ("b", "eye", "boss"):
                bulk = BulkClient(options(token))
                assert (await bulk.push(push_header(payload), payload)).code == m.Refusal.NOT_ALLOWED
                with pytest.raises(RefusedError) as caught:
                    await bulk.fetch(fetch_request())
                assert code_of(caught) == m.Refusal.NOT_ALLOWED
                await bulk.close()
            assert not service.begun and not service.fetches, "nothing was opened for them"

    run(main())


def test_a_push_without_the_secret_disturbs_no_other() -> None:
    """It has the key of the one under way and another attempt id: with the secret it would replace it."""

    async def main() -> None:
        service = FakeSyncer()
        service.secret, service.hold_completion = "right", asyncio.Event()
        payload = payload_of(1000)
        async with serving(service) as server:
            bulk = BulkClient(ClientOptions(server.address))
            header = push_header(payload, secret="right")
            pushing = asyncio.create_task(bulk.push(header, payload))
            await until(lambda: server.transfers_count == 1)
            for secret in ("", "wrong", "Right"):
                reply = await bulk.push(replace(header, secret=secret), payload)
                assert reply.code == m.Refusal.SECRET
            service.hold_completion.set()
            assert (await pushing).accepted and len(service.begun) == 1
            await bulk.close()

    run(main())


def test_what_is_under_way_ends_with_its_key() -> None:
    async def main() -> None:
        service = FakeSyncer()
        service.content = payload_of(16 * MIB)
        payload = payload_of(4 * MIB)
        async with serving(service, keys=Book()) as server:
            calls = [await begin(ClientOptions(server.address, token=token), payload) for token in ("a", "b")]
            await until(lambda: len(service.begun) == len(service.fetches) == 2)
            server.revoke("a", "the key of 'a' was revoked; ask for a new one")
            channel, push, fetch = calls[0]
            reply = parts.parse_push_reply(unseal(await push.read()))
            assert reply.code == m.Refusal.KEY_REVOKED and "revoked" in reply.detail
            assert await taken(fetch) < service.content.nbytes
            await channel.close()
            channel, push, fetch = calls[1]
            assert await taken(fetch) == service.content.nbytes, "the others go on"
            await channel.close()

    run(main())


async def begin(options: ClientOptions, payload: Any) -> tuple[Any, Any, Any]:
    """A push of which the first part has come, and a fetch of which nobody reads."""
    channel = open_channel(options, bulk_channel_arguments())
    header = push_header(payload, learner=options.token)
    opening = parts.encode_push_open(parts.PushOpen(header, 1, 1, MIB))
    push = channel.stream_stream(PUSH_METHOD)(metadata=options.metadata)
    await push.write(parts.encode_part(0, memoryview(payload[:MIB]), opening))
    fetch = channel.unary_stream(FETCH_METHOD)(
        seal(parts.encode_fetch_request(fetch_request(learner=options.token))), metadata=options.metadata
    )
    return channel, push, fetch


async def taken(fetch: Any) -> int:
    """Bytes that still come."""
    count = 0
    try:
        async for message in fetch:
            count += parts.parse_part(message).data.nbytes
    except Exception as error:
        assert type(error).__name__ == "AioRpcError", error
    return count


def test_a_run_has_one_token_or_keys() -> None:
    with pytest.raises(ConfigError, match="not both"):
        ServerOptions(token="x", keys=Book())
    with pytest.raises(ConfigError, match="atoll keys init"):
        asyncio.run(serve(FakeSyncer(), ServerOptions(listen="0.0.0.0:0", keys=Book())))


# ---------------------------------------------------------------- large Hellos


def large(tensors_count: int) -> m.Hello:
    tensors = tuple(m.TensorSpec(f"layer.{i}.weight", (8, 8), "float32") for i in range(tensors_count))
    return replace(hello(), tensors=tensors)


def test_a_large_hello_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[tuple[int, int]] = []
    real = sessions.parse_learner_message

    def parse(data: bytes) -> m.LearnerMessage:
        threads.append((len(data), threading.get_ident()))
        return real(data)

    monkeypatch.setattr(sessions, "parse_learner_message", parse)

    async def main() -> None:
        service = FakeSyncer()
        async with serving(service) as server:
            for count in (10, 20_000):
                async with ControlClient(ClientOptions(server.address)) as client:
                    await client.open(large(count))
        assert [len(one.tensors) for one in service.hellos] == [10, 20_000]

    run(main())
    (small, here), (size, there) = threads
    assert small < limits.HELLO_INLINE_BYTES_MAX < size
    assert here == threading.get_ident() != there


def test_large_hellos_are_held_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HELLO_BYTES_HELD_MAX", 300_000)

    async def main() -> None:
        async with serving(FakeSyncer()) as server, ControlClient(ClientOptions(server.address)) as client:
            with pytest.raises(RefusedError) as caught:
                await client.open(large(20_000))
            assert code_of(caught) == m.Refusal.BUSY

    run(main())
