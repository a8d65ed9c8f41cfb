"""The syncer's side of relays that merge: who holds which contribution, and having them merged when a round closes.

The machine sees single learners: an offer goes through the same intake as a push, and only its bytes are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from atoll.core import SECOND_NS, ContributionId, Refusal, SyncerDriver
from atoll.core import effects as fx
from atoll.errors import RefusedError
from atoll.syncer import relay_calls as calls
from atoll.syncer.relay_peers import AtRelay, Gathered, Held, Lost, RelayPeers
from atoll.syncer.shard_calls import id_values
from atoll.syncer.state import InspectedPayload, ModelState
from atoll.wire import Bytes, ShardPeer

NOT_A_SHARD = "this is a syncer, not a shard; give a shard's address"


class RelayLinks:
    """Everything happens on the event loop of the platform."""

    def __init__(self, driver: SyncerDriver, model: Callable[[], ModelState | None]) -> None:
        self._driver = driver
        self._model = model
        self.peers = RelayPeers()
        self._at: dict[ContributionId, ShardPeer] = {}
        self._by_way_of: dict[str, ShardPeer] = {}
        """The relay that last offered something of a learner."""
        self.came: Callable[[str, int], None] = lambda learner, size: None
        """Told of each offer: whose, and how large."""
        self.refused: Callable[[str, Mapping[str, Any]], RefusedError] = lambda method, values: RefusedError(
            Refusal.NOT_ALLOWED, NOT_A_SHARD
        )
        """What others are told who attach here: coordinators and primaries with a wrong address."""

    # ------------------------------------------------------------ what relays say

    def answering(self, peer: ShardPeer) -> Callable[[str, dict[str, Any], Bytes], Any]:
        async def answer(method: str, values: dict[str, Any], _data: Bytes) -> tuple[dict[str, Any], bytes]:
            match method:
                case calls.RELAY:
                    self.peers.take_in(peer, values)
                    return {}, b""
                case _ if peer not in self.peers:
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

    def _offer(self, peer: ShardPeer, values: dict[str, Any]) -> dict[str, Any]:
        header, finite, norm = calls.offer_of(values)
        self.came(header.learner, header.size)
        self._by_way_of[header.learner] = peer
        identity = ContributionId(header.learner, header.generation, header.fragment, header.seq)
        reply = self._driver.complete_push(header, AtRelay(peer, norm), finite=finite, norm=norm)
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
            for peer in self.peers.living
        ]

    def forget(self, identity: ContributionId) -> None:
        peer = self._at.pop(identity, None)
        if peer is not None:
            peer.tell(calls.FORGET, {"id": id_values(identity)})

    # ------------------------------------------------------------ merges

    @property
    def within_s(self) -> float:
        """As soon as a round must have its quorum a relay must send what it holds: nobody waits longer for less."""
        return self._driver.machine.config.quorum_timeout_ns / SECOND_NS

    async def gather(self, merge: fx.Merge, held: Sequence[Held]) -> Gathered | Lost:
        state = self._model()
        assert state is not None
        return await self.peers.gather(state, calls.wanted_for(merge, self.within_s), held)

    async def whole(self, identity: ContributionId, at: AtRelay) -> InspectedPayload | None:
        """One contribution as it came, for a learner that leaves; None if it is lost."""
        state = self._model()
        assert state is not None
        return await self.peers.whole(state, identity, at, self.within_s)
