"""The syncer's side of relays that merge: who holds which contribution, and having them merged when a round closes.

The machine sees single learners: an offer goes through the same intake as a push, and only its bytes are elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from atoll.codec import Partial
from atoll.core import SECOND_NS, ContributionId, PushKind, Refusal, SyncerDriver
from atoll.core import effects as fx
from atoll.errors import AtollError, RefusedError, RemoteProtocolError, UnreachableError
from atoll.syncer import relay_calls as calls
from atoll.syncer.shard_calls import header_of, id_values
from atoll.syncer.state import InspectedPayload, ModelState
from atoll.wire import Bytes, ShardPeer

log = logging.getLogger(__name__)

T = TypeVar("T")
Told = tuple[dict[str, Any], Bytes]
"""What a relay has answered."""
RELAYS_MAX = 256
"""Links to relays at a time: sites of one run. What more would bring is passed on."""
FAILURES_MAX = 3
"""Each may hold rounds up for a quorum timeout. A relay that cannot, or will not, is not asked for ever."""
FAILED_TOO_OFTEN = (
    "relays did not send what they had offered, so that nothing is merged at sites any more; contributions are passed "
    "on one by one until the syncer is started again. Look at the relays, or give them --no-merge"
)
NOT_A_SHARD = "this is a syncer, not a shard; give a shard's address"


@dataclass(frozen=True, slots=True)
class AtRelay:
    """Stands for a contribution whose bytes are at a relay."""

    peer: ShardPeer
    norm: float
    """As the relay said, and the guards have judged it."""


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
        self._peers: list[ShardPeer] = []
        """Relays that merge, while their links are up."""
        self._failures = 0
        """How often a relay that was there did not send what it had offered."""

    # ------------------------------------------------------------ what relays say

    def answering(self, peer: ShardPeer) -> Callable[[str, dict[str, Any], Bytes], Any]:
        async def answer(method: str, values: dict[str, Any], _data: Bytes) -> tuple[dict[str, Any], bytes]:
            match method:
                case calls.RELAY:
                    return self._take_in(peer, values), b""
                case _ if peer not in self._peers:
                    raise self.refused(method, values)
                case calls.MODEL:
                    state = self._model()
                    if state is None:
                        raise RefusedError(Refusal.NOT_READY, "the run has no model yet; ask again")
                    return calls.model_values(state.layout, state.config), b""
                case calls.OFFER:
                    return self._offer(peer, values), b""
            raise self.refused(method, values)

        return answer

    def _take_in(self, peer: ShardPeer, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("version") != calls.RELAY_LINK_VERSION:
            raise RefusedError(Refusal.PROTOCOL, "relay and syncer differ in version; install the same on both sides")
        if refusal := self.refusal():
            raise RefusedError(Refusal.NOT_ALLOWED, refusal)
        if self._failures >= FAILURES_MAX:
            raise RefusedError(Refusal.NOT_ALLOWED, FAILED_TOO_OFTEN)
        self._peers = [one for one in self._peers if not one.closed]
        if len(self._peers) >= RELAYS_MAX:
            raise RefusedError(Refusal.BUSY, f"{RELAYS_MAX} relays are linked already; let this one pass on")
        self._peers.append(peer)
        return {}

    def _failed(self, peer: ShardPeer, why: str) -> None:
        """A relay that lies, or whose link is too thin, holds its rounds up each time. So that ends."""
        self._failures += 1
        peer.close(why)
        if self._failures == FAILURES_MAX:
            log.warning("%s (the last time: %s)", FAILED_TOO_OFTEN, why)
            for one in self._peers:
                one.close(FAILED_TOO_OFTEN)

    def _offer(self, peer: ShardPeer, values: dict[str, Any]) -> dict[str, Any]:
        try:
            header, norm = header_of(values["header"]), float(values["norm"])
        except (RemoteProtocolError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise RefusedError(Refusal.BAD_REQUEST, f"this is no offer: {error}") from None
        if header.kind is not PushKind.CONTRIBUTION:
            raise RefusedError(Refusal.BAD_REQUEST, f"a {header.kind} cannot wait at a relay; push it")
        self.came(header.learner, header.size)
        self._by_way_of[header.learner] = peer
        identity = ContributionId(header.learner, header.generation, header.fragment, header.seq)
        finite = bool(values.get("finite")) and 0.0 <= norm < math.inf
        reply = self._driver.complete_push(header, AtRelay(peer, norm), finite=finite, norm=norm if finite else 0.0)
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
            for peer in self._peers
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
        norms = [item.norm if isinstance(item, AtRelay) else 0.0 for item in held]
        asked = [self._group(merge, norms, peer, indices) for peer, indices in groups.items()]
        found = await asyncio.gather(*asked)
        lost = [i for part, indices in zip(found, groups.values(), strict=True) if part is None for i in indices]
        if lost:
            return tuple(merge.contributions[index] for index in lost)
        parts = [part for part in found if isinstance(part, Partial)]
        if parts and not any(weight for _, weight in direct):
            direct = []
        return Gathered([item for item, _ in direct], [weight for _, weight in direct], parts)

    async def _group(
        self, merge: fx.Merge, norms: Sequence[float], peer: ShardPeer, indices: list[int]
    ) -> Partial | str | None:
        """One relay's part; "" if none of it counts, None if it is lost."""
        counted = [index for index in indices if merge.weights[index] > 0.0]
        if not counted:
            return None if peer.closed else ""
        ids = [merge.contributions[index] for index in counted]
        offered = calls.Offered(
            merge.fragment, [merge.weights[index] for index in counted], [norms[index] for index in counted]
        )
        told = await self._ask(peer, merge.version, ids, offered)
        return self._read(calls.group_of, peer, told, offered)

    def _read(self, read: Callable[..., T], peer: ShardPeer, told: Told | None, offered: calls.Offered) -> T | None:
        state = self._model()
        assert state is not None
        try:
            return read(*told, state, offered) if told is not None else None
        except (AtollError, KeyError, TypeError, ValueError) as error:
            self._failed(peer, f"what the relay sent cannot be merged: {error}")
            return None

    async def _ask(
        self, peer: ShardPeer, version: int, ids: Sequence[ContributionId], offered: calls.Offered
    ) -> Told | None:
        """None if the relay does not give it as soon as a round must have its quorum: nobody waits longer for less."""
        timeout_s = self._driver.machine.config.quorum_timeout_ns / SECOND_NS
        place = {"fragment": offered.fragment, "version": version}
        values = {**place, "ids": [id_values(one) for one in ids], "weights": list(offered.weights)}
        try:
            async with asyncio.timeout(timeout_s):
                answer = await peer.call(calls.GATHER, values)
        except TimeoutError:
            late = f"the relay did not send what it holds within {timeout_s:g} s; give it --no-merge if it cannot"
            self._failed(peer, late)
            return None
        except RefusedError as error:
            self._failed(peer, f"the relay does not send what it has offered: {error.detail}")
            return None
        except UnreachableError:
            return None
        self.bytes_up += answer[1].nbytes
        return answer

    async def whole(self, identity: ContributionId, at: AtRelay) -> InspectedPayload | None:
        """One contribution as it came, for a learner that leaves; None if it is lost."""
        offered = calls.Offered(identity.fragment, [1.0], [at.norm])
        return self._read(calls.inspected, at.peer, await self._ask(at.peer, 0, [identity], offered), offered)
