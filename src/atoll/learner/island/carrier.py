"""A rank's own connections for payloads, on a thread of their own: it pushes and fetches the parts that it carries."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.core import FetchKind, FetchRequest, PushReply
from atoll.errors import AtollError, PayloadError
from atoll.wire import STRIPES_MAX, ClientOptions, RoutedBulk

U8 = NDArray[np.uint8]
T = TypeVar("T")
REACH_S = 5.0
"""A rank that has no connection after that is taken for one that cannot have any."""


@dataclass(frozen=True)
class Route:
    """What the rank that speaks was told by the syncer, for all of them."""

    learner: str
    generation: int
    secret: str
    address: str
    shards: tuple[str, ...]
    shard_of: tuple[int, ...]

    def values(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Wanted:
    """The parts of a payload that one rank fetches."""

    kind: FetchKind
    fragment: int
    version: int
    size: int
    """Of the whole payload."""
    ranges: tuple[tuple[int, int], ...]
    carriers: int
    """Ranks that fetch at the same time."""


class Carrier:
    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._bulk: RoutedBulk | None = None
        self._route: Route | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="atoll-rank-link", daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def bytes_up(self) -> int:
        return self._bulk.bytes_up if self._bulk is not None else 0

    @property
    def bytes_down(self) -> int:
        return self._bulk.bytes_down if self._bulk is not None else 0

    def stop(self, timeout_s: float) -> None:
        """Any thread, also if it never began."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)

    def give_up(self) -> None:
        """What is under way belongs to a session that is over."""
        if self._bulk is not None:
            self._submit(self._bulk.start_again())

    # ------------------------------------------------------------ on the worker's thread

    def route(self, route: Route) -> bool:
        """A session has begun. Whether everybody who serves fragments can be reached from here."""
        if not self._thread.is_alive():
            self._thread.start()
        try:
            return self._submit(self._follow(route)).result()
        except AtollError:  # an address that this rank's environment does not allow
            return False

    async def _follow(self, route: Route) -> bool:
        if self._bulk is None:
            self._bulk = RoutedBulk(replace(self._options, address=route.address))
        else:
            await self._bulk.start_again()
        await self._bulk.move(replace(self._options, address=route.address))
        self._bulk.route(route.shards, route.shard_of)
        self._route = route
        return await self._bulk.reach(REACH_S)

    def push(self, fragment: int, opening: bytes, pieces: Sequence[tuple[int, memoryview]]) -> Future[PushReply]:
        """This rank's stripe; all of them hear the answer to the whole."""
        assert self._bulk is not None
        return self._submit(self._bulk.push_stripe(fragment, opening, pieces))

    def fetch(self, wanted: Wanted) -> Future[U8]:
        """These parts, one behind the other."""
        return self._submit(self._fetch(wanted))

    async def _fetch(self, wanted: Wanted) -> U8:
        # All ranks and all fragments that are fetched at a time share what a syncer gives one learner.
        turns = asyncio.Semaphore(max(1, STRIPES_MAX // wanted.carriers))
        tasks = [asyncio.ensure_future(self._range(turns, wanted, *bounds)) for bounds in wanted.ranges]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return np.concatenate([*found, np.empty(0, np.uint8)])

    async def _range(self, turns: asyncio.Semaphore, wanted: Wanted, start: int, stop: int) -> U8:
        assert self._bulk is not None and self._route is not None
        who = (self._route.learner, self._route.generation, wanted.fragment, wanted.version)
        async with turns:
            request = FetchRequest(wanted.kind, *who, offset=start, length=stop - start, secret=self._route.secret)
            header, data = await self._bulk.fetch_range(request)
        if header.size != wanted.size:
            raise PayloadError(f"fragment {wanted.fragment} has {header.size} bytes, expected {wanted.size}")
        return data
