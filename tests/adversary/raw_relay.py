"""Whoever attaches to a syncer's port as a relay and says whatever it is told to say.

A relay holds its learners' contributions, tells the syncer their norms, and sends one payload for them when their round
closes. This one says any norm, and sends any bytes, or none.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from raw_learner import WAIT_S, RawLearner

from atoll.codec import get_codec
from atoll.core import messages as m
from atoll.errors import AtollError
from atoll.syncer import relay_calls as calls
from atoll.syncer.shard_calls import header_values
from atoll.wire import ClientOptions, ShardConnection

Answer = Callable[[dict[str, Any]], tuple[dict[str, Any], Any]]


class LyingRelay:
    """`answers` makes what it sends for contributions that it was asked for."""

    def __init__(self, address: str, answers: Answer, token: str = "") -> None:
        self.asked: list[dict[str, Any]] = []
        self._answers = answers
        self._options = ClientOptions(address=address, token=token)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._connection: ShardConnection | None = None

    def attach(self) -> None:
        """Be a relay. Raises what the syncer says to that."""
        self._on_loop(self._attach())

    async def _attach(self) -> None:
        self._connection = ShardConnection(self._options, self._answer)
        await self._connection.__aenter__()
        await self._connection.peer.call(
            calls.RELAY, {"version": calls.RELAY_LINK_VERSION, "name": secrets.token_hex(8)}
        )

    async def _answer(self, method: str, values: dict[str, Any], _data: Any) -> tuple[dict[str, Any], Any]:
        if method != calls.GATHER:
            return {}, b""
        self.asked.append(values)
        answered = self._answers(values)
        return await answered if asyncio.iscoroutine(answered) else answered

    def offer(self, of: RawLearner, /, norm: Any = 0.01, **lies: Any) -> m.PushReply:
        """Say that a contribution of this learner waits here."""
        assert of.welcome is not None
        codec, fragment = of.welcome.config.codec_up, lies.get("fragment", 0)
        header = m.PushHeader(
            kind=m.PushKind.CONTRIBUTION,
            learner=of.name,
            generation=of.welcome.generation,
            fragment=fragment,
            round=of._asked(0),
            attempt=0,
            seq=of._seqs.get(0, -1) + 1,
            base_version=of.versions()[0],
            steps=2,
            tokens=64,
            codec=codec,
            size=100,
            checksum=0,
            secret=of.welcome.secret,
        )
        of._seqs[0] = header.seq
        values = {**header_values(header), **lies}
        return m.PushReply(**self.call(calls.OFFER, {"header": values, "finite": True, "norm": norm})[0])

    def call(self, method: str, values: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        assert self._connection is not None
        return self._on_loop(self._connection.peer.call(method, values))

    @property
    def closed(self) -> str:
        """Why the link is over."""
        assert self._connection is not None
        return self._connection.peer.closed

    def wait_closed(self) -> str:
        deadline_s = time.monotonic() + WAIT_S
        while not self.closed:
            assert time.monotonic() < deadline_s, "the syncer goes on with this relay"
            time.sleep(0.02)
        return self.closed

    def close(self) -> None:
        if self._connection is not None:
            try:
                self._on_loop(self._connection.__aexit__())
            except (AtollError, TimeoutError):
                pass
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)


def group(learner: RawLearner, value: float, **lies: Any) -> tuple[dict[str, Any], Any]:
    """A part of a merge all of whose values are the same, in the run's codec."""
    assert learner.welcome is not None
    codec = learner.welcome.config.codec_up
    values = learner._full(0, value)
    payload = get_codec(codec).encode_delta(values, None, None)[0]
    slices = len(learner.layout.fragments[0].slices)
    norm = float(np.linalg.norm(values.astype(np.float64)) / np.sqrt(slices))
    return {"codec": codec, "radii": [norm] * slices, "directed": [1.0] * slices, **lies}, payload
