"""Payloads of a learner whose run has shards: a fragment's go to the shard that serves it, the rest to the syncer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

from atoll.core import messages as m
from atoll.errors import ConfigError, RemoteProtocolError
from atoll.wire import parts
from atoll.wire.bulk import Buffer, BulkClient
from atoll.wire.channel import ClientOptions
from atoll.wire.service import Bytes


class RoutedBulk:
    """As one BulkClient. Connections to shards are made when a Welcome first names them."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._syncer = BulkClient(options)
        self._shards: dict[str, BulkClient] = {}
        self._of: tuple[BulkClient, ...] = ()
        """By fragment: who serves it. Empty: the syncer does."""

    @property
    def routed(self) -> bool:
        """True while shards serve the fragments."""
        return bool(self._of)

    @property
    def bytes_up(self) -> int:
        return sum(client.bytes_up for client in self._all())

    @property
    def bytes_down(self) -> int:
        return sum(client.bytes_down for client in self._all())

    @property
    def bytes_past_grpc(self) -> int:
        return sum(client.bytes_past_grpc for client in self._all())

    def route(self, shards: Sequence[str], shard_of: Sequence[int]) -> None:
        """The syncer has said who serves what. Raises RemoteProtocolError for an address that cannot be used."""
        for address in shards:
            if address not in self._shards:
                self._shards[address] = BulkClient(self._at(address))
        self._of = tuple(self._shards[shards[index]] for index in shard_of)

    def _at(self, address: str) -> ClientOptions:
        """The token goes where the syncer says only under the rules that hold for the syncer itself."""
        try:
            return replace(self._options, address=address)
        except ConfigError as error:
            raise RemoteProtocolError(f"the syncer names a shard at {address!r} that cannot be used: {error}") from None

    def _all(self) -> list[BulkClient]:
        return [self._syncer, *self._shards.values()]

    def _for(self, fragment: int, inner: bool) -> BulkClient:
        return self._of[fragment] if not inner and 0 <= fragment < len(self._of) else self._syncer

    async def push(self, header: m.PushHeader, payload: Buffer) -> m.PushReply:
        return await self._for(header.fragment, header.kind is m.PushKind.INNER).push(header, payload)

    async def fetch(self, request: m.FetchRequest) -> tuple[m.FetchHeader, Bytes]:
        return await self._for(request.fragment, request.kind is m.FetchKind.INNER).fetch(request)

    async def fetch_range(self, request: m.FetchRequest) -> tuple[m.FetchHeader, Bytes]:
        return await self._for(request.fragment, request.kind is m.FetchKind.INNER).fetch_range(request)

    async def push_stripe(self, fragment: int, opening: bytes, pieces: Sequence[tuple[int, memoryview]]) -> m.PushReply:
        return await self._for(fragment, inner=False).push_stripe(opening, pieces)

    @staticmethod
    def opening(header: m.PushHeader, stripes: int, part_bytes: int) -> bytes:
        """What every stripe of one attempt begins with."""
        return parts.encode_push_open(parts.PushOpen(header, secrets.randbits(64), stripes, part_bytes))

    async def reach(self, patience_s: float) -> bool:
        """Whether everybody who serves fragments can be reached from here."""
        return all(await asyncio.gather(*(client.reach(patience_s) for client in set(self._of) or {self._syncer})))

    @property
    def address(self) -> str:
        """Where the syncer is, as was found last."""
        return self._syncer.address

    async def move(self, place: ClientOptions) -> None:
        await self._syncer.move(place)

    async def start_again(self) -> None:
        await asyncio.gather(*(client.start_again() for client in self._all()))

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._all()))
