"""A learner whose every word is written by hand, for a syncer under examination. It trains nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from google.protobuf.message import DecodeError

from atoll.codec import get_codec
from atoll.core import Layout, SyncConfig, TensorSpec, build_layout, tensors_fingerprint
from atoll.errors import PayloadError
from atoll.instruments.conform.report import Report
from atoll.wire import raw

grpc, pb = raw.grpc, raw.pb

LOOK_S = 0.02
PROTOCOL = 3
PART_BYTES = 2**16
TENSORS = tuple(TensorSpec(f"w{number}", (512,), "float32") for number in range(2))
TOKENS = 32
"""Of a step."""


class Missing(Exception):
    """The syncer did not do in time what the scene needs to go on."""


class PlayedLearner:
    def __init__(self, address: str, name: str, report: Report, *, token: str = "", patience_s: float = 30.0) -> None:
        self.address, self.name, self.report, self.patience_s = address, name, report, patience_s
        self.instance = secrets.token_hex(8)
        self.metadata = ((raw.TOKEN_KEY, token),) if token else ()
        self.heard: list[Any] = []
        self.status: Any = None
        """How the last session ended: None while it is open, else a gRPC status."""
        self.welcome: Any = None
        self.config: SyncConfig | None = None
        self.steps = 0
        self.seqs: dict[int, int] = {}
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._bulk: Any = None
        self._channel: Any = None

    # ------------------------------------------------------------ sessions

    async def open(self, first: Any, *, damaged: bool = False) -> None:
        """Open a session with this as its first message."""
        await self.drop()
        self.heard, self.status = [], None
        self._channel = grpc.aio.insecure_channel(self.address, options=raw.control_channel_arguments())
        self._call = self._channel.stream_stream(raw.SESSION_METHOD)(metadata=self.metadata)
        self._reader = asyncio.create_task(self._read(self._call))
        await self._write(first, damaged=damaged)

    async def _read(self, call: Any) -> None:
        try:
            while (data := await call.read()) is not raw.EOF:
                self._hear(bytes(data))
            self.status = await call.code()
        except grpc.aio.AioRpcError as error:
            self.status = error.code()

    def _hear(self, data: bytes) -> None:
        try:
            message = pb.SyncerMessage.FromString(raw.unseal(data))
            self.report.kept("seal.right")
            known = message.WhichOneof("message") is not None
            self.report.check("message.valid", known, f"{len(data)} bytes that are no SyncerMessage")
            self.heard.append(message)
        except PayloadError:
            self.report.broken("seal.right", f"a message of {len(data)} bytes has the seal of other bytes")
        except DecodeError:
            self.report.broken("message.valid", f"{len(data)} bytes that are no SyncerMessage")

    async def _write(self, message: Any, *, damaged: bool = False) -> None:
        sealed = raw.seal(message.SerializeToString())
        if damaged:
            sealed = sealed[:-1] + bytes((sealed[-1] ^ 1,))
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(sealed)

    async def say(self, **message: Any) -> None:
        await self._write(pb.LearnerMessage(**message))

    def hello(self, *, brief: bool = False, tensors: tuple[TensorSpec, ...] = TENSORS, **fields: Any) -> Any:
        """A newcomer's, unless told otherwise."""
        rows = [pb.TensorSpec(name=t.name, shape=t.shape, dtype=t.dtype, merge=t.merge) for t in tensors]
        own: dict[str, Any] = {"learner": self.name, "instance": self.instance, "protocol": PROTOCOL}
        if fields.get("protocol", PROTOCOL) >= 3:
            own["fingerprint"] = tensors_fingerprint(tensors)
        return pb.LearnerMessage(hello=pb.Hello(tensors=[] if brief else rows, **{**own, **fields}))

    async def greet(self, **fields: Any) -> Any:
        """Say hello and take the welcome in. Missing if there is none."""
        await self.open(self.hello(**fields))
        self.welcome = await self.wait("welcome")
        self.config = SyncConfig.from_dict(json.loads(self.welcome.config_json))
        return self.welcome

    async def refused(self) -> Any:
        """The refusal that ends the session, or None."""
        with contextlib.suppress(Missing):
            await self.until(lambda: self._find("refused") or self._find("welcome") or self.status is not None)
        found = self._find("refused")
        return found[0] if found else None

    @property
    def welcomed(self) -> bool:
        return bool(self._find("welcome"))

    async def drop(self) -> None:
        """The connection is gone, without a word."""
        if self._call is not None:
            self._call.cancel()
            await self._channel.close()
            self._call = None
        if self._reader is not None:
            self._reader.cancel()

    async def close(self) -> None:
        await self.drop()
        if self._bulk is not None:
            await self._bulk.close()

    # ------------------------------------------------------------ hearing

    def _find(self, kind: str) -> list[Any]:
        return [getattr(m, kind) for m in self.heard if m.WhichOneof("message") == kind]

    async def until(self, happened: Callable[[], object], what: str = "") -> None:
        async def look() -> None:
            while not happened():
                await asyncio.sleep(LOOK_S)

        try:
            await asyncio.wait_for(look(), self.patience_s)
        except TimeoutError:
            raise Missing(what) from None

    async def wait(self, kind: str, condition: Callable[[Any], object] = lambda _message: True) -> Any:
        """The first message of this kind that fulfils the condition."""

        def found() -> list[Any]:
            return [message for message in self._find(kind) if condition(message)]

        await self.until(lambda: found() or self.status is not None or self._find("refused"), kind)
        if not found():
            refusals = self._find("refused")
            raise Missing(f"{kind} ({refusals[0].code if refusals else self.status})")
        return found()[0]

    @property
    def versions(self) -> list[int]:
        newest = [0] * len(self.layout.fragments)
        for message in self.heard:
            if message.WhichOneof("message") == "start":
                newest = [state.version for state in message.start.fragments]
            elif message.WhichOneof("message") == "published":
                newest[message.published.fragment] = message.published.version
        return newest

    @property
    def layout(self) -> Layout:
        assert self.config is not None
        return build_layout(TENSORS, self.config.fragments)

    # ------------------------------------------------------------ saying

    async def ready(self) -> None:
        start = await self.wait("start")
        await self.say(ready=pb.Ready(step=start.step, bases=self.versions))

    async def progress(self, steps: int = 1) -> None:
        self.steps += steps
        starts = self._find("start")
        await self.say(
            progress=pb.Progress(
                step=(starts[0].step if starts else 0) + self.steps,
                steps=self.steps,
                tokens=self.steps * TOKENS,
                step_ns=10**7,
                loss=1.0,
                bases=self.versions,
            )
        )

    def header(self, kind: int, fragment: int, payload: bytes, **lies: Any) -> Any:
        fields: dict[str, Any] = {
            "kind": kind,
            "learner": self.name,
            "generation": self.welcome.generation,
            "fragment": fragment,
            "base_version": -1,
            "codec": "fp32",
            "size": len(payload),
            "checksum": xxhash.xxh3_64_intdigest(payload),
            "secret": self.welcome.secret,
        }
        return pb.PushHeader(**{**fields, **lies})

    def contribution(self, fragment: int, value: float = 1e-3, **lies: Any) -> tuple[Any, bytes]:
        """Header and payload of one, all of whose values are the same; it takes the next number."""
        assert self.config is not None
        values = np.full(self.layout.fragments[fragment].size, value, np.float32)
        payload = get_codec(self.config.codec_up).encode_delta(values, None, None, feedback=False)[0].tobytes()
        asked = [request.round for request in self._find("request") if request.fragment == fragment]
        fields: dict[str, Any] = {
            "round": asked[-1] if asked else 0,
            "seq": self.seqs.get(fragment, 0),
            "base_version": self.versions[fragment],
            "steps": 1,
            "tokens": TOKENS,
            "codec": self.config.codec_up,
        }
        header = self.header(pb.PUSH_CONTRIBUTION, fragment, payload, **{**fields, **lies})
        return header, payload

    async def contribute(self, fragment: int, **lies: Any) -> Any:
        """One over bulk; a number that was taken is used up."""
        reply = await self.push(*self.contribution(fragment, **lies))
        if reply.accepted:
            self.seqs[fragment] = self.seqs.get(fragment, 0) + 1
        return reply

    async def push(self, header: Any, payload: bytes, *, damaged: bool = False) -> Any:
        """One stream; returns the PushReply. Damaged: a part has another checksum than its bytes."""
        opened = pb.PushOpen(header=header, attempt_id=secrets.randbits(64), stripes=1, part_bytes=PART_BYTES)
        parts = []
        for offset in range(0, max(1, len(payload)), PART_BYTES):
            data, opening = payload[offset : offset + PART_BYTES], b"" if offset else opened.SerializeToString()
            checksum = xxhash.xxh3_64_intdigest(opening + data) ^ int(damaged)
            part = pb.PushPart(offset=offset, data=data, checksum=checksum)
            if not offset:
                part.open.CopyFrom(opened)
            parts.append(part.SerializeToString())
        call = self._bulk_channel().stream_unary(raw.PUSH_METHOD)
        try:
            data = await call(iter(parts), metadata=self.metadata, timeout=self.patience_s)
            return pb.PushReply.FromString(raw.unseal(bytes(data)))
        except grpc.aio.AioRpcError as error:
            return pb.PushReply(code=f"gRPC status {error.code().name}")

    async def fetch(self, kind: int, fragment: int, version: int = -1, **fields: Any) -> tuple[list[Any], bytes]:
        """The parts of one fetch, and their bytes."""
        own = {"learner": self.name, "generation": self.welcome.generation, "secret": self.welcome.secret}
        request = pb.FetchRequest(kind=kind, fragment=fragment, version=version, **{**own, **fields})
        call = self._bulk_channel().unary_stream(raw.FETCH_METHOD)(
            raw.seal(request.SerializeToString()), metadata=self.metadata, timeout=self.patience_s
        )
        parts = []
        try:
            async for data in call:
                parts.append(pb.FetchPart.FromString(bytes(data)))
        except grpc.aio.AioRpcError as error:
            parts.append(pb.FetchPart(refused=pb.Refused(code=f"gRPC status {error.code().name}", detail="")))
        return parts, b"".join(part.data for part in parts)

    def _bulk_channel(self) -> Any:
        if self._bulk is None:
            self._bulk = grpc.aio.insecure_channel(self.address, options=raw.bulk_channel_arguments())
        return self._bulk

    async def ask(self, method: str, request: Any) -> bytes:
        """One question outside any session."""
        call = self._bulk_channel().unary_unary(method)
        return bytes(await call(request.SerializeToString(), metadata=self.metadata, timeout=self.patience_s))
