"""The syncer's side of relays that merge: who holds which contribution, and having them merged when a round closes.

The machine sees single learners: an offer goes through the same intake as a push, and only its bytes are elsewhere.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atoll.codec import Partial
from atoll.core import SECOND_NS, ContributionId, PushKind, Refusal, SyncerDriver
from atoll.core import effects as fx
from atoll.errors import AtollError, RefusedError, UnreachableError
from atoll.syncer import relay_calls as calls
from atoll.syncer.shard_calls import header_of, id_values
from atoll.syncer.state import InspectedPayload, ModelState
from atoll.wire import Bytes, ShardPeer

NOT_A_SHARD = "this is a syncer, not a shard; give a shard's address"


@dataclass(frozen=True, slots=True)
class AtRelay:
    """Stands for a contribution whose bytes are at a relay."""

    peer: ShardPeer


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a merge is made of: single contributions with their weights, and what relays have made one of."""

    held: Sequence[InspectedPayload]
    weights: Sequence[float]
    groups: Sequence[Partial] = ()


class RelayLinks:
    """Everything happens on the event loop of the platform."""

    def __init__(self, driver: SyncerDriver, model: Callable[[], ModelState | None]) -> None:
        self._driver = driver
        self._model = model
        self._at: dict[ContributionId, ShardPeer] = {}
        self._linked: list[ShardPeer] = []
        """Relays that merge, while their links are up."""
        self._by_way_of: dict[str, ShardPeer] = {}
        """The relay that last offered something of a learner."""
        self.refusal: Callable[[], str] = lambda: ""
        """Why contributions may not be merged at a site; empty: they may."""
        self.came: Callable[[str, int], None] = lambda learner, size: None
        """Told of each offer: whose, and how large."""
        self.refused: Callable[[str, Mapping[str, Any]], RefusedError] = lambda method, values: RefusedError(
            Refusal.NOT_ALLOWED, NOT_A_SHARD
        )
        """What others are told who attach here: coordinators and primaries with a wrong address."""
        self.bytes_up = 0
        """Payload bytes that came from relays."""

    # ------------------------------------------------------------ what relays say

    def answering(self, peer: ShardPeer) -> Callable[[str, dict[str, Any], Bytes], Any]:
        async def answer(method: str, values: dict[str, Any], _data: Bytes) -> tuple[dict[str, Any], bytes]:
            match method:
                case calls.RELAY:
                    taken_in = self._take_in(values), b""
                    self._linked = [*(one for one in self._linked if not one.closed), peer]
                    return taken_in
                case calls.MODEL:
                    state = self._model()
                    if state is None:
                        raise RefusedError(Refusal.NOT_READY, "the run has no model yet; ask again")
                    return calls.model_values(state.layout, state.config), b""
                case calls.OFFER:
                    return self._offer(peer, values), b""
            raise self.refused(method, values)

        return answer

    def _take_in(self, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("version") != calls.RELAY_LINK_VERSION:
            raise RefusedError(Refusal.PROTOCOL, "relay and syncer differ in version; install the same on both sides")
        if refusal := self.refusal():
            raise RefusedError(Refusal.NOT_ALLOWED, refusal)
        return {}

    def _offer(self, peer: ShardPeer, values: dict[str, Any]) -> dict[str, Any]:
        header = header_of(values["header"])
        if header.kind is not PushKind.CONTRIBUTION:
            raise RefusedError(Refusal.BAD_REQUEST, f"a {header.kind} cannot wait at a relay; push it")
        self.came(header.learner, header.size)
        self._by_way_of[header.learner] = peer
        identity = ContributionId(header.learner, header.generation, header.fragment, header.seq)
        norm = float(values["norm"])
        finite = bool(values["finite"]) and math.isfinite(norm)
        reply = self._driver.complete_push(header, AtRelay(peer), finite=finite, norm=norm if finite else 0.0)
        if reply.accepted:
            self._at[identity] = peer
        return asdict(reply)

    def status(self) -> list[dict[str, object]]:
        """Relays that merge for their learners. One that only passes things on cannot be told from the learners."""
        return [
            {
                "from": peer.origin,
                "learners": sorted(learner for learner, way in self._by_way_of.items() if way is peer),
                "held": sum(way is peer for way in self._at.values()),
            }
            for peer in self._linked
            if not peer.closed
        ]

    def forget(self, identity: ContributionId) -> None:
        peer = self._at.pop(identity, None)
        if peer is not None:
            peer.tell(calls.FORGET, {"id": id_values(identity)})

    # ------------------------------------------------------------ merges

    async def gather(
        self, merge: fx.Merge, held: Sequence[InspectedPayload | AtRelay]
    ) -> Gathered | tuple[ContributionId, ...]:
        """Have every relay make one of what it holds; or the contributions that are lost with theirs. A weight of 0
        counts for nothing, and a relay need not send what has it."""
        direct: list[tuple[InspectedPayload, float]] = []
        groups: dict[ShardPeer, list[int]] = {}
        for index, (item, weight) in enumerate(zip(held, merge.weights, strict=True)):
            if isinstance(item, AtRelay):
                groups.setdefault(item.peer, []).append(index)
            else:
                direct.append((item, weight))
        asked = [self._group(merge, peer, indices) for peer, indices in groups.items()]
        found = await asyncio.gather(*asked)
        lost = [i for part, indices in zip(found, groups.values(), strict=True) if part is None for i in indices]
        if lost:
            return tuple(merge.contributions[index] for index in lost)
        parts = [part for part in found if isinstance(part, Partial)]
        if parts and not any(weight for _, weight in direct):
            direct = []
        return Gathered([item for item, _ in direct], [weight for _, weight in direct], parts)

    async def _group(self, merge: fx.Merge, peer: ShardPeer, indices: list[int]) -> Partial | str | None:
        """One relay's part; "" if none of it counts, None if it is lost."""
        counted = [index for index in indices if merge.weights[index] > 0.0]
        if not counted:
            return None if peer.closed else ""
        ids = [merge.contributions[index] for index in counted]
        weights = [merge.weights[index] for index in counted]
        state = self._model()
        assert state is not None
        told = await self._ask(peer, merge.fragment, merge.version, ids, weights)
        try:
            weight = math.fsum(weights)
            return calls.group_of(*told, state, merge.fragment, weight) if told is not None else None
        except (AtollError, KeyError, TypeError, ValueError) as error:
            peer.close(f"what the relay sent cannot be merged: {error}")
            return None

    async def _ask(
        self, peer: ShardPeer, fragment: int, version: int, ids: Sequence[ContributionId], weights: Sequence[float]
    ) -> tuple[dict[str, Any], Bytes] | None:
        """None if the relay does not give it as soon as a round must have its quorum: nobody waits longer for less."""
        timeout_s = self._driver.machine.config.quorum_timeout_ns / SECOND_NS
        values = {"fragment": fragment, "version": version, "ids": [id_values(i) for i in ids], "weights": weights}
        try:
            async with asyncio.timeout(timeout_s):
                answer = await peer.call(calls.GATHER, values)
        except TimeoutError:
            peer.close(f"the relay did not send what it holds within {timeout_s:g} s; give it --no-merge if it cannot")
            return None
        except (UnreachableError, RefusedError):
            return None
        self.bytes_up += answer[1].nbytes
        return answer

    async def whole(self, identity: ContributionId, at: AtRelay) -> InspectedPayload | None:
        """One contribution as it came, for a learner that leaves; None if it is lost."""
        state = self._model()
        assert state is not None
        told = await self._ask(at.peer, identity.fragment, 0, [identity], [1.0])
        try:
            return calls.inspected(*told, state, identity.fragment) if told is not None else None
        except (AtollError, KeyError):
            return None
