"""Payloads of a rank on their way: made ready to be pushed, fetched, and put together or taken apart in the island.

No rank has a whole payload but for small ones, and those that have to go through the rank that speaks because another
one cannot reach the syncer by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.core import INLINE_BYTES_MAX, FetchKind, OutgoingPayload, PushReply
from atoll.errors import AtollError
from atoll.learner.island.carrier import Carrier, Wanted
from atoll.learner.island.intervals import Intervals
from atoll.learner.island.link import SPEAKER, RankLink
from atoll.learner.island.parameters import RankParameters, moved
from atoll.learner.island.payloads import PayloadShares
from atoll.wire import MIB

U8 = NDArray[np.uint8]
Key = tuple[int, int]
"""Fragment and number of a contribution, or one of the numbers below."""
SEED, HELD = -1, -2
DIGEST_BYTES = 4 * MIB
"""The rank that speaks has so many bytes of others at a time while it computes a checksum."""
FETCH_PATIENCE_S = 20.0
"""The rank that speaks has its own parts already. One that takes so much longer is in the others' way."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Stands for a payload that the ranks have in parts."""

    key: Key
    stripes: int
    part_bytes: int


class NotFetchedError(Exception):
    """This rank does not have its parts."""


class Freight:
    def __init__(self, parameters: RankParameters, link: RankLink, carrier: Carrier) -> None:
        self._link = link
        self._carrier = carrier
        self._speaks = link.rank == SPEAKER
        self._ready: dict[Key, tuple[PayloadShares, U8]] = {}
        """What this rank carries of payloads that are to be pushed."""
        self._pushing: dict[Key, Future[PushReply]] = {}
        self._fetching: dict[Key, Future[U8]] = {}
        """By fragment and version."""
        self.shares = cache(
            lambda fragment, sections: PayloadShares(sections, parameters.blocks(fragment), self._link.rank)
        )

    def _moved(self, exchange: Any, source: U8, size: int) -> U8:
        return moved(exchange, source, size, self._link.exchange)

    # ------------------------------------------------------------ inside of the island; all ranks together

    def _collected(self, shares: PayloadShares, have: Sequence[Intervals], mine: U8, start: int, stop: int) -> U8:
        """Some bytes of a payload, at the rank that speaks; elsewhere nothing."""
        size = stop - start if self._speaks else 0
        return self._moved(shares.to_speaker(have, start, stop), mine, size)

    def digest(self, fragment: int, sections: tuple[int, ...], mine: U8) -> int:
        """The checksum of a payload of which each rank has made its own blocks; 0 where nobody asks."""
        shares, hasher = self.shares(fragment, sections), xxhash.xxh3_64()
        for start in range(0, shares.size, DIGEST_BYTES):
            stop = min(start + DIGEST_BYTES, shares.size)
            hasher.update(self._collected(shares, shares.made, mine, start, stop).data)
        return hasher.intdigest() if self._speaks else 0

    def shared_out(self, fragment: int, sections: tuple[int, ...], payload: U8 | None) -> U8:
        """This rank's blocks of what the one that speaks has."""
        shares = self.shares(fragment, sections)
        source = payload if payload is not None else np.empty(0, np.uint8)
        return self._moved(shares.from_speaker(), source, shares.made[self._link.rank].count)

    # ------------------------------------------------------------ outwards

    def load(self, key: Key, fragment: int, sections: tuple[int, ...], mine: U8) -> OutgoingPayload:
        """Have a payload ready to be pushed, from each rank's own blocks. At the speaker: what to push."""
        shares = self.shares(fragment, sections)
        if shares.size <= INLINE_BYTES_MAX:
            whole = self._collected(shares, shares.made, mine, 0, shares.size)
            return OutgoingPayload(whole.tobytes(), int(whole.nbytes), xxhash.xxh3_64_intdigest(whole.data))
        checksum = self.digest(fragment, sections, mine)
        carried = self._moved(shares.outward, mine, shares.carried[self._link.rank].count)
        self._ready[key] = (shares, carried)
        return OutgoingPayload(Apart(key, shares.stripes, shares.step), shares.size, checksum)

    def push(self, key: Key, fragment: int, opening: bytes) -> Future[PushReply] | None:
        """Begin to push what this rank carries of it."""
        if key not in self._ready:
            return None
        shares, carried = self._ready[key]
        view, runs = carried.data, shares.carried[self._link.rank]
        pieces = [
            (start + into, view[at + into : at + min(into + shares.step, stop - start)])
            for start, stop, at in zip(runs.start.tolist(), runs.stop.tolist(), runs.at.tolist(), strict=True)
            for into in range(0, stop - start, shares.step)
        ]
        if not pieces:
            return None
        self._pushing[key] = self._carrier.push(fragment, opening, pieces)
        return self._pushing[key]

    def stuck(self, key: Key) -> bool:
        """What this rank carries did not get through."""
        push = self._pushing.get(key)
        return push is not None and push.done() and (push.cancelled() or push.exception() is not None)

    def gather(self, key: Key) -> U8 | None:
        """The whole of what is ready, at the rank that speaks: another rank cannot push its parts."""
        if key not in self._ready:
            return None
        shares, carried = self._ready[key]
        return self._collected(shares, shares.carried, carried, 0, shares.size)

    def unload(self, key: Key) -> None:
        self._ready.pop(key, None)
        self._pushing.pop(key, None)

    # ------------------------------------------------------------ inwards

    def fetch(self, kind: FetchKind, fragment: int, version: int, sections: tuple[int, ...]) -> Future[U8]:
        """Begin to fetch what this rank carries."""
        shares = self.shares(fragment, sections)
        runs = shares.carried[self._link.rank]
        ranges = tuple(zip(runs.start.tolist(), runs.stop.tolist(), strict=True))
        for key in [key for key in self._fetching if key[0] == fragment and key[1] <= version]:
            self._fetching.pop(key).cancel()
        future = self._carrier.fetch(Wanted(kind, fragment, version, shares.size, ranges, shares.stripes))
        self._fetching[fragment, version] = future
        return future

    def fetched(self, fragment: int, version: int) -> U8:
        """The parts that this rank carries, once they are here."""
        try:
            return self._fetching.pop((fragment, version)).result(FETCH_PATIENCE_S)
        except (AtollError, KeyError, TimeoutError) as error:
            raise NotFetchedError(str(error)) from error

    def unpacked(self, fragment: int, sections: tuple[int, ...], carried: U8) -> U8:
        """This rank's blocks of what all ranks carry. All ranks together."""
        shares = self.shares(fragment, sections)
        return self._moved(shares.inward, carried, shares.made[self._link.rank].count)
