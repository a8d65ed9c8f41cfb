"""Whom a shard hears: what is not known yet must come again, what is over is refused for good."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from atoll.core import Refusal
from atoll.core.messages import PushHeader, PushKind
from atoll.errors import RefusedError
from atoll.syncer import shard_calls as calls
from atoll.syncer.shard import ShardService
from atoll.syncer.shard_arrays import ShardArrays
from atoll.wire import ShardPeer, limits
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.seal import seal


def header(generation: int, secret: str) -> PushHeader:
    return PushHeader(PushKind.CONTRIBUTION, "l0", generation, 0, 1, 0, 0, 0, 1, 1, "int4", 4, 0, secret)


async def shard_that_knows(generation: int, secret: str) -> ShardService:
    shard = ShardService(cast(ShardArrays, None), lambda why: None)
    await shard._do(calls.SENDER, {"learner": "l0", "generation": generation, "secret": secret})
    return shard


@pytest.mark.parametrize(
    ("generation", "secret", "code"),
    [
        (3, "s", Refusal.BUSY),  # a new process, here before the syncer's word of it
        (1, "s", Refusal.STALE_GENERATION),
        (2, "t", Refusal.SECRET),
    ],
)
def test_a_push_that_is_not_of_the_session_is_refused(generation: int, secret: str, code: str) -> None:
    shard = asyncio.run(shard_that_knows(2, "s"))
    with pytest.raises(RefusedError) as refused:
        shard.check_sender(header(generation, secret))
    assert refused.value.code == code
    shard.check_sender(header(2, "s"))


def test_a_learner_whose_key_has_ended_pushes_and_fetches_nothing_here() -> None:
    """The syncer says so: a shard's own copy of the registry may be older."""

    async def revoked() -> None:
        shard = await shard_that_knows(2, "s")
        shard.check_sender(header(2, "s"))
        await shard._do(calls.REVOKED, {"learner": "l0"})
        shard.check_sender(header(2, "s"))

    with pytest.raises(RefusedError, match="no session"):
        asyncio.run(revoked())


def test_calls_of_both_sides_cross_and_fail_when_the_link_ends() -> None:
    """Two peers joined by queues: answers find their calls, refusals keep their code, large bytes arrive whole."""

    async def talk() -> None:
        up, down = asyncio.Queue[bytes](), asyncio.Queue[bytes]()

        async def answer(method: str, values: dict[str, object], data: object) -> tuple[dict[str, object], bytes]:
            if method == "no":
                raise RefusedError(Refusal.BUSY, "later")
            if method == "never":
                await asyncio.sleep(3600)
            return {"echo": values, "method": method}, b"x" * (3 << 20) if method == "large" else b""

        first = ShardPeer(down.get, up.put, answer)
        second = ShardPeer(up.get, down.put, answer)
        running = [asyncio.create_task(peer.run()) for peer in (first, second)]
        large = asyncio.create_task(first.call("large", {}))
        answers = await asyncio.gather(*(peer.call("ask", {"n": n}) for n in range(5) for peer in (first, second)))
        assert sorted(values["echo"]["n"] for values, _ in answers) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert (await large)[1].nbytes == 3 << 20
        with pytest.raises(RefusedError, match="later"):
            await second.call("no", {})
        waiting = asyncio.create_task(first.call("never", {}))
        await asyncio.sleep(0)
        first.close("the link has ended")
        with pytest.raises(Exception, match="the link has ended"):
            await waiting
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_a_link_holds_no_more_than_this_process_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the run's token may open one, as a relay does; each message may be large, and never end."""
    monkeypatch.setattr(limits, "SHARD_CALLS_MAX", 8)

    async def flood(size: int) -> int:
        sent = 0

        async def read() -> bytes:
            nonlocal sent
            sent += 1
            frame = pb.ShardFrame(id=sent, kind=pb.SHARD_CALL, method="m", part=b"x", json_bytes=0, bytes=size)
            return seal(bytes(frame.SerializeToString()))

        async def write(_data: bytes) -> None: ...
        async def answer(*_: object) -> Any: ...

        peer = ShardPeer(read, write, answer)
        assert "send less" in await peer.run()
        return sent

    assert asyncio.run(flood(1000)) == 9
    assert asyncio.run(flood(limits.PUSH_BYTES_MAX)) <= 9
