"""Pushes as a learner sends them, part by part, held against the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import xxhash
from google.protobuf.message import DecodeError

from atoll.instruments.conform.report import Report
from atoll.wire import raw

pb = raw.pb

Complete = Callable[[Any, bytes], Awaitable[Any]]
"""Header and payload of a push that is whole; returns its PushReply."""


class _Transfer:
    def __init__(self, opened: Any) -> None:
        self.opened = opened
        self.data = bytearray(min(opened.header.size, SIZE_MAX))
        self.bytes_placed = 0
        self.streams_ended = 0
        self.completing = False
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


SIZE_MAX = 2**31
"""Of a payload in an examination: models for it are small."""


class PushIntake:
    def __init__(self, report: Report, complete: Complete) -> None:
        self._report = report
        self._complete = complete
        self._transfers: dict[tuple[int, int, int, int], _Transfer] = {}

    async def receive(self, parts: AsyncIterator[bytes]) -> Any:
        """One stream of a transfer. All its streams wait for the one answer."""
        transfer: _Transfer | None = None
        async for data in parts:
            try:
                part = pb.PushPart.FromString(data)
            except DecodeError:
                self._report.broken("message.valid", "bytes that are no PushPart")
                return _refusal("bad_request", "bytes that are no PushPart")
            if transfer is None:
                transfer = self._join(part)
                if transfer is None:
                    return _refusal("bad_request", "a push begins with PushOpen")
            self._place(transfer, part)
            if transfer.bytes_placed >= len(transfer.data) and not transfer.completing:
                await self._finish(transfer)
        if transfer is None:
            self._report.broken("push.open", "a push without any part")
            return _refusal("bad_request", "a push without any part")
        transfer.streams_ended += 1
        if transfer.streams_ended >= transfer.opened.stripes and not transfer.completing:
            self._report.broken(
                "push.parts", f"the streams ended after {transfer.bytes_placed} of {transfer.opened.header.size} bytes"
            )
            transfer.answer.set_result(_refusal("wrong_size", "the streams ended early"))
        return await transfer.answer

    def _join(self, part: Any) -> _Transfer | None:
        if not part.HasField("open"):
            self._report.broken("push.open", "the first part of a stream has no PushOpen")
            return None
        opened, header = part.open, part.open.header
        right = raw.PART_BYTES_MIN <= opened.part_bytes <= raw.PART_BYTES_MAX and 1 <= opened.stripes <= raw.STRIPES_MAX
        self._report.check("push.open", right, f"part_bytes {opened.part_bytes}, stripes {opened.stripes}")
        key = (header.kind, header.fragment, header.seq, opened.attempt_id)
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = self._transfers[key] = _Transfer(opened)
        elif transfer.opened != opened:
            self._report.broken("push.open", "two stripes of one attempt have different PushOpens")
        return transfer

    def _place(self, transfer: _Transfer, part: Any) -> None:
        opening = part.open.SerializeToString(deterministic=True) if part.HasField("open") else b""
        size, step = len(transfer.data), transfer.opened.part_bytes
        expected = min(step, size - part.offset)
        right = part.offset % max(1, step) == 0 and len(part.data) == max(0, expected)
        self._report.check(
            "push.parts", right, f"a part of {len(part.data)} bytes at {part.offset} of {size}, cut by {step}"
        )
        summed = xxhash.xxh3_64_intdigest(opening + part.data) == part.checksum
        self._report.check("push.parts", summed, f"the part at {part.offset} has a wrong checksum")
        if right:
            transfer.data[part.offset : part.offset + len(part.data)] = part.data
            transfer.bytes_placed += len(part.data)

    async def _finish(self, transfer: _Transfer) -> None:
        transfer.completing = True
        header, payload = transfer.opened.header, bytes(transfer.data)
        self.check_payload(header, payload)
        transfer.answer.set_result(await self._complete(header, payload))

    def check_payload(self, header: Any, payload: bytes) -> None:
        right = header.size == len(payload) and header.checksum == xxhash.xxh3_64_intdigest(payload)
        self._report.check(
            "push.checksum",
            right,
            f"fragment {header.fragment}, number {header.seq}: the header says {header.size} bytes with checksum "
            f"{header.checksum:016x}, there are {len(payload)} with {xxhash.xxh3_64_intdigest(payload):016x}",
        )


def _refusal(code: str, detail: str) -> Any:
    return pb.PushReply(accepted=False, code=code, detail=f"{detail}; see docs/reference/wire.md")
