"""The relay's side of merging at a site: it holds contributions, offers them to the syncer, and sends one payload for
all of them when their round closes: to the syncer, or to the shard that merges them.

A link to the syncer carries this, and what is held goes by it: when it breaks the syncer counts the offers as lost, and
learners give that progress again. Without a link everything is passed on, one by one. A relay may stand before this
one: what it offers is offered on, and what it makes of its learners' contributions goes into the one payload of here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.codec import combine
from atoll.core import ContributionId, PushHeader, PushKind, PushReply, Refusal
from atoll.errors import AtollError, RefusedError, RemoteProtocolError, UnreachableError
from atoll.syncer import relay_calls as calls
from atoll.syncer.relay_peers import AtRelay, Gathered, Held, RelayPeers
from atoll.syncer.relay_ways import LINK_PAUSE_S, LINK_PAUSE_S_MAX, Connect, ShardWays
from atoll.syncer.shard_calls import header_values, id_of, id_values, reply_of
from atoll.syncer.state import ModelState
from atoll.wire import Bytes, ClientOptions, ShardConnection, ShardPeer

NAME_BYTES = 16
NO_LINK = "this relay has no syncer to merge for at the moment; pass contributions on"


@dataclass(slots=True)
class Feedback:
    """What encoding has lost of one fragment. A merge that is done again begins from the same."""

    version: int = -1
    before: NDArray[np.float32] | None = None
    after: NDArray[np.float32] | None = None

    def at(self, version: int) -> NDArray[np.float32] | None:
        if version > self.version:  # the last one is in the parameters
            self.version, self.before = version, self.after
        return self.before


@dataclass(slots=True)
class UpstreamLink:
    """While it lasts."""

    peer: ShardPeer
    ways: ShardWays
    state: ModelState | None = None
    held: dict[ContributionId, Held] = field(default_factory=dict)
    feedback: dict[int, Feedback] = field(default_factory=dict)


class SiteMerges:
    def __init__(self, connect: Connect = ShardConnection) -> None:
        self._connect = connect
        self._link: UpstreamLink | None = None
        self._place: ClientOptions | None = None
        self._routes: tuple[Sequence[str], Sequence[int]] = ((), ())
        self._task: asyncio.Task[None] | None = None
        self._inner = RelayPeers()
        """Relays that stand before this one."""
        self.said = ""
        """Why nothing is merged here, if the syncer has said so."""
        self.bytes_up = 0
        self.groups = 0
        """Payloads that stand for several contributions."""

    @property
    def on(self) -> bool:
        return self._link is not None and not self._link.peer.closed

    @property
    def held(self) -> int:
        """Contributions that wait here for their round."""
        return len(self._link.held) if self._link is not None else 0

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ------------------------------------------------------------ the link

    async def meet(self, place: ClientOptions) -> None:
        """The syncer was found here: have a link to it, if it wants one."""
        if self._task is not None and not self._task.done() and place == self._place:
            return
        await self.close()
        self._place = place
        self._task = asyncio.create_task(self._keep_link(place))

    def route(self, shards: Sequence[str], shard_of: Sequence[int]) -> None:
        """The syncer has said who merges what (nothing: it does)."""
        self._routes = (shards, shard_of)
        if self._link is not None:
            self._link.ways.route(shards, shard_of)

    async def _keep_link(self, place: ClientOptions) -> None:
        """Until the syncer says that it needs single contributions."""
        pause_s = LINK_PAUSE_S
        while True:
            name = secrets.token_hex(NAME_BYTES)
            ways = ShardWays(self._connect, place, name, self._answer)
            try:
                async with self._connect(place, self._answer) as connection:
                    await connection.peer.call(calls.RELAY, {"version": calls.RELAY_LINK_VERSION, "name": name})
                    self._link, self.said, pause_s = UpstreamLink(connection.peer, ways), "", LINK_PAUSE_S
                    ways.route(*self._routes)
                    assert connection.running is not None
                    await asyncio.shield(connection.running)
            except RefusedError as error:
                self.said = error.detail
                if error.code not in (Refusal.BUSY, Refusal.NOT_READY):
                    return
            except (UnreachableError, RemoteProtocolError):
                pass
            finally:
                self._link = None
                self._inner.close("the relay has lost its syncer")
                await ways.close()
            await asyncio.sleep(pause_s)
            pause_s = min(LINK_PAUSE_S_MAX, 2.0 * pause_s)

    async def _model(self, link: UpstreamLink) -> ModelState:
        if link.state is None:
            link.state = calls.model_of((await link.peer.call(calls.MODEL, {}))[0])
        return link.state

    # ------------------------------------------------------------ from learners

    async def take(self, header: PushHeader, payload: Bytes) -> PushReply | None:
        """Hold a contribution and offer it; None if it is to be passed on. What is wrong with it the syncer says."""
        link = self._link
        if link is None or link.peer.closed or header.kind is not PushKind.CONTRIBUTION:
            return None
        if not link.ways.reaches(header.fragment):
            return None
        try:
            state = await self._model(link)
            finite, item = await asyncio.to_thread(state.inspect, header.fragment, payload, header.codec)
        except (AtollError, LookupError):
            return None
        norm = float(np.sqrt(np.square(item.norms).sum())) if finite else 0.0
        return await self._hold(link, header, item, {"finite": finite, "norm": norm})

    async def _hold(self, link: UpstreamLink, header: PushHeader, item: Held, seen: dict[str, Any]) -> PushReply:
        identity = ContributionId(header.learner, header.generation, header.fragment, header.seq)
        taken = identity in link.held
        link.held.setdefault(identity, item)
        reply = await self._offer(link, {"header": header_values(header), **seen})
        if not reply.accepted and not taken:
            link.held.pop(identity, None)
        return reply

    async def _offer(self, link: UpstreamLink, values: dict[str, Any]) -> PushReply:
        try:
            return reply_of((await link.peer.call(calls.OFFER, values))[0])
        except RefusedError as error:
            return PushReply(False, error.code, error.detail)
        except UnreachableError as error:
            return PushReply(False, Refusal.BUSY, f"the relay has lost the syncer ({error}); send it again")

    # ------------------------------------------------------------ from relays that stand before this one

    async def from_inner(self, peer: ShardPeer, method: str, values: dict[str, Any]) -> dict[str, Any]:
        link = self._link
        if link is None or link.peer.closed:
            raise RefusedError(Refusal.BUSY, self.said or NO_LINK)
        if method == calls.RELAY:
            self._inner.take_in(peer, values)
            return {}
        if peer not in self._inner:
            raise RefusedError(Refusal.NOT_ALLOWED, "this is a relay, not a shard; give a shard's address")
        if method == calls.MODEL:
            state = await self._model(link)
            return calls.model_values(state.layout, state.config)
        if method != calls.OFFER:
            raise RefusedError(Refusal.BAD_REQUEST, f"this relay knows no {method!r}; update the older side")
        header, finite, norm = calls.offer_of(values)
        if not link.ways.reaches(header.fragment):
            raise RefusedError(Refusal.BUSY, f"this relay has lost the shard of fragment {header.fragment}")
        await self._model(link)
        return asdict(await self._hold(link, header, AtRelay(peer, norm), {"finite": finite, "norm": norm}))

    # ------------------------------------------------------------ from the syncer and its shards

    async def _answer(self, method: str, values: dict[str, Any], _data: Bytes) -> tuple[dict[str, Any], Any]:
        link = self._link
        match method:
            case calls.FORGET:
                item = link.held.pop(id_of(values["id"]), None) if link is not None else None
                if isinstance(item, AtRelay):
                    item.peer.tell(calls.FORGET, values)
                return {}, b""
            case calls.GATHER:
                return await self._gather(link, values)
        raise RefusedError(Refusal.BAD_REQUEST, f"this relay knows no {method!r}; update the older side")

    async def _gather(self, link: UpstreamLink | None, values: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        wanted = calls.wanted_of(values)
        if link is None:  # a shard asks, and does not know yet that the syncer was lost, and all of this with it
            return _lost(wanted.ids), b""
        missing = [one for one in wanted.ids if one not in link.held]
        if missing or link.state is None:
            raise RefusedError(Refusal.RELAY_GONE, f"this relay does not hold {missing}; have them given again")
        found = await self._inner.gather(link.state, wanted.for_inner(), [link.held[one] for one in wanted.ids])
        if isinstance(found, tuple):
            return _lost(found), b""
        told, payload = await asyncio.to_thread(_make_one, link.state, wanted, found, link.feedback)
        self.groups += len(wanted.ids) > 1
        self.bytes_up += payload.nbytes
        return told, payload


def _lost(ids: Sequence[ContributionId]) -> dict[str, Any]:
    return {"lost": [id_values(one) for one in ids]}


def _make_one(
    state: ModelState, wanted: calls.WantedSum, found: Gathered, feedback: dict[int, Feedback]
) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """One contribution, or what one relay has made of several, as it came; else all of it as one, in the run's codec
    and with feedback of the relay's own."""
    fragment = wanted.fragment
    parts = [state.reduce(fragment, found.held, found.weights)] if found.held else []
    part = combine([*parts, *found.groups])
    if len(part.columns) == 1:
        return calls.group_values(part, part.codecs[0].name), part.columns[0]
    kept, config, codec = feedback.setdefault(fragment, Feedback()), state.config, state.codec_up(fragment)
    merges = state.fragments[fragment].slice_merges
    part, kept.after = part.condensed(merges, codec, kept.at(wanted.version), feedback=config.feedback_up)
    return calls.group_values(part, config.codec_up), part.columns[0]
