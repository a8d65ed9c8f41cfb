"""A learner that says whatever it is told to say: no machine of ours keeps it honest.

It speaks the real protocol over real sockets, through the wire's own client classes, so that what it lies about is what
its messages claim and nothing else. Calls block; the sockets live on a thread of their own.

    liar = RawLearner(syncer.address, "liar")
    liar.join()
    liar.say(Progress(step=2**60, ...))
    reply = liar.contribute(0, tokens=10**12)
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import xxhash

from atoll.codec import get_codec
from atoll.core import Layout, TensorSpec, build_layout
from atoll.core import messages as m
from atoll.errors import RefusedError, RemoteProtocolError, UnreachableError
from atoll.wire import BulkClient, ClientOptions, ControlClient, fetch_status

T = TypeVar("T")
M = TypeVar("M")
WAIT_S = 60.0
"""No wait is longer; nothing is asserted about how long things take."""
BEAT_S = 2.0
"""As a learner's heartbeat."""
TENSORS = tuple(TensorSpec(f"w{i}", (256,), "float32") for i in range(2))
"""A small model. Those that join a real learner's run give the real one's tensors."""


class RawLearner:
    def __init__(
        self,
        address: str,
        name: str = "liar",
        *,
        token: str = "",
        tensors: tuple[TensorSpec, ...] = TENSORS,
        **options: Any,
    ) -> None:
        self.name, self.tensors = name, tensors
        self.instance = secrets.token_hex(8)
        self.options = ClientOptions(address=address, token=token, **options)
        self.heard: list[Any] = []
        """What the syncer has said, in order."""
        self.ended = ""
        """Why the session is over."""
        self.refused: RefusedError | None = None
        self.steps = self.tokens = 0
        self.beats = True
        """Whether it says its last report again when it has nothing else to say."""
        self._reported: m.Progress | None = None
        self._seqs: dict[int, int] = {}
        self._tasks: list[asyncio.Future[None]] = []
        self._news = threading.Condition()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._control: ControlClient | None = None
        self._bulk: BulkClient | None = None
        self.welcome: m.Welcome | None = None

    # ------------------------------------------------------------ sessions

    def hello(self, **lies: Any) -> m.Welcome:
        """Say hello, as a newcomer unless told otherwise. Raises RefusedError."""
        fields: dict[str, Any] = {"protocol": m.PROTOCOL_VERSION, "tensors": self.tensors, "instance": self.instance}
        return self._on_loop(self._open(m.Hello(**{"learner": self.name, **fields, **lies})))

    async def _open(self, hello: m.Hello) -> m.Welcome:
        self._control, self.ended, self.refused = ControlClient(self.options), "", None
        self._bulk = self._bulk or BulkClient(self.options)
        self.welcome = await self._control.open(hello)
        self._tasks = [asyncio.ensure_future(work(self._control)) for work in (self._read, self._beat)]
        return self.welcome

    async def _beat(self, control: ControlClient) -> None:
        """Say the last report again now and then, as learners do whose steps are long."""
        while True:
            await asyncio.sleep(BEAT_S)
            if self.beats and self._reported is not None:
                control.send(self._reported)

    async def _read(self, control: ControlClient) -> None:
        ended = "the syncer ended the session"
        try:
            async for message in control:
                with self._news:
                    self.heard.append(message)
                    self._news.notify_all()
        except RefusedError as error:
            self.refused, ended = error, str(error)
        except (UnreachableError, RemoteProtocolError, asyncio.CancelledError) as error:
            ended = str(error) or "closed"
        with self._news:
            self.ended = ended
            self._news.notify_all()

    def join(self, step: int | None = None, values: float = 0.01, **lies: Any) -> RawLearner:
        """Come in as an honest learner does: seed the run if asked to, adopt what there is, say ready."""
        welcome = self.hello(**lies)
        if welcome.seed:
            self.seed(values)
        start = self.wait(m.Start)
        self.say(m.Ready(start.step if step is None else step, self.versions()))
        deadline_s = time.monotonic() + WAIT_S
        while not self.ended and self._state_there() != "active":
            assert time.monotonic() < deadline_s, "never active"
            time.sleep(0.02)
        return self

    def _state_there(self) -> str:
        """What the syncer takes it for."""
        status = self._on_loop(fetch_status(self.options))
        return str(next((x["state"] for x in status["members"] if x["learner"] == self.name), ""))

    def drop(self) -> None:
        """The connection is gone, without a word."""
        if self._control is not None:
            self._on_loop(self._leave(self._control))
            self._control = None

    async def _leave(self, control: ControlClient) -> None:
        for task in self._tasks:
            task.cancel()
        await control.__aexit__()

    def close(self) -> None:
        self.drop()
        if self._bulk is not None:
            self._on_loop(self._bulk.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ------------------------------------------------------------ what it says

    def say(self, message: m.LearnerMessage) -> None:
        assert self._control is not None
        self._reported = message if isinstance(message, m.Progress) else self._reported
        self._loop.call_soon_threadsafe(self._control.send, message)

    def progress(self, steps: int = 1, tokens: int = 32, **lies: Any) -> None:
        """Report so many more steps of so many tokens each, and whatever else is claimed."""
        self.steps += steps
        self.tokens += steps * tokens
        start = next((x.step for x in self.heard if isinstance(x, m.Start)), 0)
        fields = {"step": start + self.steps, "steps": self.steps, "tokens": self.tokens, "step_ns": 10**7}
        self.say(m.Progress(**{**fields, "loss": 1.0, "bases": self.versions(), **lies}))

    def contribute(self, fragment: int = 0, values: float = 0.001, **lies: Any) -> m.PushReply:
        """Push a contribution, all of whose values are the same. Lies are fields of its header."""
        assert self.welcome is not None
        payload = get_codec(self.welcome.config.codec_up).encode_delta(self._full(fragment, values), None, None)[0]
        seq = self._seqs[fragment] = self._seqs.get(fragment, -1) + 1
        base, asked = self.versions()[fragment], self._asked(fragment)
        codec = self.welcome.config.codec_up
        fields = {"round": asked, "seq": seq, "base_version": base, "steps": 1, "tokens": 32, "codec": codec}
        return self.push(m.PushKind.CONTRIBUTION, fragment, payload.tobytes(), **{**fields, **lies})

    def seed(self, values: float = 0.01) -> None:
        for fragment in range(len(self.layout.fragments)):
            payload = self._full(fragment, values).tobytes()
            reply = self.push(m.PushKind.SEED, fragment, payload, codec=m.WHOLE_CODEC)
            assert reply.accepted, reply

    def push(self, kind: m.PushKind, fragment: int, payload: bytes, **lies: Any) -> m.PushReply:
        """One attempt over bulk; returns the syncer's answer."""
        assert self._bulk is not None
        header = self.header(kind, fragment, payload, **lies)
        return self._on_loop(self._bulk._push_once(header, memoryview(payload)))

    def header(self, kind: m.PushKind, fragment: int, payload: bytes, **lies: Any) -> m.PushHeader:
        assert self.welcome is not None
        counters = {"round": 0, "attempt": 0, "seq": 0, "base_version": -1, "steps": 0, "tokens": 0, "codec": "fp32"}
        size: dict[str, Any] = {"size": len(payload), "checksum": xxhash.xxh3_64_intdigest(payload)}
        size["secret"] = self.welcome.secret
        fields = {"learner": self.name, "generation": self.welcome.generation, **counters, **size}
        return m.PushHeader(**{"kind": kind, "fragment": fragment, **fields, **lies})

    # ------------------------------------------------------------ what it hears

    @property
    def layout(self) -> Layout:
        assert self.welcome is not None
        return build_layout(self.tensors, self.welcome.config.fragments)

    def versions(self) -> tuple[int, ...]:
        """The newest version of each fragment that it was told of."""
        newest = [0] * len(self.layout.fragments)
        for message in list(self.heard):
            if isinstance(message, m.Start):
                newest = [state.version for state in message.fragments]
            elif isinstance(message, m.Published):
                newest[message.fragment] = message.version
        return tuple(newest)

    def _asked(self, fragment: int) -> int:
        asked = [x.round for x in list(self.heard) if isinstance(x, m.Request) and x.fragment == fragment]
        return asked[-1] if asked else 0

    def wait(self, kind: type[M], condition: Callable[[M], bool] = lambda _: True) -> M:
        """The first message of this kind that fulfils the condition."""

        def found() -> M | None:
            return next((x for x in self.heard if isinstance(x, kind) and condition(x)), None)

        self.wait_until(lambda: found() is not None or bool(self.ended), kind.__name__)
        message = found()
        assert message is not None, f"no {kind.__name__}: {self.ended}"
        return message

    def wait_ended(self) -> str:
        """Why the syncer has ended the session."""
        self.wait_until(lambda: bool(self.ended), "the end of the session")
        return self.ended

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        with self._news:
            while not condition():
                assert time.monotonic() < deadline_s, f"never heard: {what}"
                self._news.wait(0.2)

    # ------------------------------------------------------------ inside

    def _full(self, fragment: int, value: float) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.full(self.layout.fragments[fragment].size, value, np.float32)

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)
