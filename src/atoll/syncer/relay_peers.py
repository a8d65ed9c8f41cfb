"""Relays that are linked to whoever has arrays to merge into (a syncer, a shard) or merges for a site of sites (another
relay), and having them send what they hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from atoll.codec import Partial
from atoll.core import ContributionId, Refusal
from atoll.errors import AtollError, PayloadError, RefusedError, UnreachableError
from atoll.syncer import relay_calls as calls
from atoll.syncer.shard_calls import id_of
from atoll.syncer.state import InspectedPayload, ModelState
from atoll.wire import Bytes, ShardPeer

log = logging.getLogger(__name__)

T = TypeVar("T")
Told = tuple[dict[str, Any], Bytes]
"""What a relay has answered."""
RELAYS_MAX = 256
"""Links to relays at a time: sites of one run. What more would bring is passed on."""
NAME_CHARS_MAX = 64
FAILURES_MAX = 3
"""Each may hold rounds up for a quorum timeout. A relay that cannot, or will not, is not asked for ever."""
FAILED_TOO_OFTEN = (
    "relays did not send what they had offered, so that nothing is merged at sites any more; contributions are passed "
    "on one by one until the syncer is started again. Look at the relays, or give them --no-merge"
)


@dataclass(frozen=True, slots=True)
class AtRelay:
    """Stands for a contribution whose bytes are at a relay."""

    peer: ShardPeer
    norm: float
    """As the relay said, and the guards have judged it."""


Held = InspectedPayload | AtRelay
"""A contribution: its bytes, or where they are."""
Lost = tuple[ContributionId, ...]


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a merge is made of: single contributions with their weights, and what relays have made one of."""

    held: Sequence[InspectedPayload]
    weights: Sequence[float]
    groups: Sequence[Partial] = ()


class RelayPeers:
    """Everything happens on one event loop."""

    def __init__(self) -> None:
        self.refusal: Callable[[], str] = lambda: ""
        """Why contributions may not be merged at a site; empty: they may."""
        self.failed_here: Callable[[str, str], None] = lambda name, why: None
        """Told of a relay that did not send what it had offered, and why."""
        self.bytes_up = 0
        """Payload bytes that came from relays."""
        self._names: dict[ShardPeer, str] = {}
        self._failures = 0
        """How often a relay that was there did not send what it had offered."""

    # ------------------------------------------------------------ links

    def take_in(self, peer: ShardPeer, values: dict[str, Any]) -> None:
        """Raises RefusedError if it is to pass everything on."""
        name = values.get("name")
        if values.get("version") != calls.RELAY_LINK_VERSION:
            raise RefusedError(Refusal.PROTOCOL, "relay and syncer differ in version; install the same on both sides")
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
            raise RefusedError(Refusal.BAD_REQUEST, f"a relay has a name of 1 to {NAME_CHARS_MAX} characters; give one")
        if refusal := self.refusal():
            raise RefusedError(Refusal.NOT_ALLOWED, refusal)
        if self._failures >= FAILURES_MAX:
            raise RefusedError(Refusal.NOT_ALLOWED, FAILED_TOO_OFTEN)
        if (before := self.find(name)) is not None:  # only the relay itself knows its name
            before.close("this relay has a newer link")
        self._names = {one: name for one, name in self._names.items() if not one.closed}
        if len(self._names) >= RELAYS_MAX:
            raise RefusedError(Refusal.BUSY, f"{RELAYS_MAX} relays are linked already; let this one pass on")
        self._names[peer] = name

    def __contains__(self, peer: ShardPeer) -> bool:
        return peer in self._names

    def find(self, name: str) -> ShardPeer | None:
        """The relay of this name, while its link is up."""
        return next((peer for peer, own in self._names.items() if own == name and not peer.closed), None)

    def name_of(self, peer: ShardPeer) -> str:
        return self._names.get(peer, "")

    @property
    def living(self) -> list[ShardPeer]:
        return [peer for peer in self._names if not peer.closed]

    def close(self, why: str) -> None:
        """What these relays hold is nobody's any more, and what they did is forgotten."""
        for peer in self.living:
            peer.close(why)
        self._names, self._failures = {}, 0

    def failed(self, name: str, why: str) -> None:
        """A relay that lies, or whose link is too thin, holds its rounds up each time. So that ends."""
        self._failures += 1
        if (peer := self.find(name)) is not None:
            peer.close(why)
        if self._failures == FAILURES_MAX:
            log.warning("%s (the last time: %s)", FAILED_TOO_OFTEN, why)
            for one in self.living:
                one.close(FAILED_TOO_OFTEN)

    def _fails(self, peer: ShardPeer, why: str) -> None:
        name = self.name_of(peer)
        self.failed(name, why)
        peer.close(why)
        self.failed_here(name, why)

    # ------------------------------------------------------------ merges

    async def gather(self, state: ModelState, wanted: calls.WantedSum, held: Sequence[Held]) -> Gathered | Lost:
        """Have every relay make one of what it holds; or the contributions that are lost with theirs. A weight of 0
        counts for nothing, and a relay need not send what has it."""
        direct: list[tuple[InspectedPayload, float]] = []
        groups: dict[ShardPeer, list[int]] = {}
        for index, (item, weight) in enumerate(zip(held, wanted.weights, strict=True)):
            if isinstance(item, AtRelay):
                groups.setdefault(item.peer, []).append(index)
            else:
                direct.append((item, weight))
        norms = [item.norm if isinstance(item, AtRelay) else 0.0 for item in held]
        asked = [
            self._group(state, wanted.only(indices), [norms[index] for index in indices], peer)
            for peer, indices in groups.items()
        ]
        found = await asyncio.gather(*asked)
        if lost := tuple(one for part in found if isinstance(part, tuple) for one in part):
            return lost
        parts = [part for part in found if isinstance(part, Partial)]
        if parts and not any(weight for _, weight in direct):
            direct = []
        return Gathered([item for item, _ in direct], [weight for _, weight in direct], parts)

    async def _group(
        self, state: ModelState, wanted: calls.WantedSum, norms: Sequence[float], peer: ShardPeer
    ) -> Partial | Lost | None:
        """One relay's part; None if nothing of it counts."""
        counted = [index for index, weight in enumerate(wanted.weights) if weight > 0.0]
        if not counted:
            return wanted.ids if peer.closed else None
        asked = wanted.only(counted)
        offered = calls.Offered(asked.fragment, asked.weights, [norms[index] for index in counted])
        found = await self._ask(peer, asked, lambda values, data: calls.group_of(values, data, state, offered))
        return wanted.ids if found is None else found

    async def whole(
        self, state: ModelState, identity: ContributionId, at: AtRelay, within_s: float
    ) -> InspectedPayload | None:
        """One contribution as it came, for a learner that leaves; None if it is lost."""
        wanted = calls.WantedSum(identity.fragment, 0, (identity,), (1.0,), within_s)
        offered = calls.Offered(identity.fragment, wanted.weights, [at.norm])
        found = await self._ask(at.peer, wanted, lambda values, data: calls.inspected(values, data, state, offered))
        return None if isinstance(found, tuple) else found

    async def _ask(
        self, peer: ShardPeer, wanted: calls.WantedSum, read: Callable[[dict[str, Any], Bytes], T]
    ) -> T | Lost | None:
        """What it sends, or what of it is lost; None: all of it. Nobody waits longer than `within_s` for less."""
        try:
            async with asyncio.timeout(wanted.within_s):
                values, data = await peer.call(calls.GATHER, wanted.values())
        except TimeoutError:
            late = f"the relay did not send what it holds within {wanted.within_s:g} s; give it --no-merge if it cannot"
            self._fails(peer, late)
            return None
        except RefusedError as error:
            self._fails(peer, f"the relay does not send what it has offered: {error.detail}")
            return None
        except UnreachableError:
            return None
        self.bytes_up += data.nbytes
        try:
            if "lost" not in values:
                return read(values, data)
            lost = tuple(id_of(one) for one in values["lost"])
            if not lost or not set(lost) <= set(wanted.ids):
                raise PayloadError("it names what it was not asked for as lost")
            return lost
        except (AtollError, KeyError, TypeError, ValueError) as error:
            self._fails(peer, f"what the relay sent cannot be merged: {error}")
            return None
