"""The relay's side of merging at a site: it holds contributions, offers them to the syncer, and sends one payload for
all of them when their round closes.

A link to the syncer carries this, and what is held goes by it: when it breaks the syncer counts the offers as lost, and
learners give that progress again. Without a link everything is passed on, one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core import ContributionId, PushHeader, PushKind, PushReply, Refusal
from atoll.errors import AtollError, RefusedError, RemoteProtocolError, UnreachableError
from atoll.syncer import relay_calls as calls
from atoll.syncer.shard_calls import header_values, id_of, reply_of
from atoll.syncer.state import InspectedPayload, ModelState
from atoll.wire import Bytes, ClientOptions, ShardConnection, ShardPeer

LINK_PAUSE_S = 1.0
LINK_PAUSE_S_MAX = 30.0
"""Between two attempts to have a link, growing while there is none (an older syncer, another relay): contributions are
passed on meanwhile, so nobody waits for it."""


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
    state: ModelState | None = None
    held: dict[ContributionId, tuple[InspectedPayload, str]] = field(default_factory=dict)
    """Contributions and the names of their codecs."""
    feedback: dict[int, Feedback] = field(default_factory=dict)


Connect = Callable[[ClientOptions, Any], ShardConnection]


class SiteMerges:
    def __init__(self, connect: Connect = ShardConnection) -> None:
        self._connect = connect
        self._link: UpstreamLink | None = None
        self._place: ClientOptions | None = None
        self._task: asyncio.Task[None] | None = None
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

    async def _keep_link(self, place: ClientOptions) -> None:
        """Until the syncer says that it needs single contributions."""
        pause_s = LINK_PAUSE_S
        while True:
            try:
                async with self._connect(place, self._answer) as connection:
                    await connection.peer.call(calls.RELAY, {"version": calls.RELAY_LINK_VERSION})
                    self._link, self.said, pause_s = UpstreamLink(connection.peer), "", LINK_PAUSE_S
                    assert connection.running is not None
                    await asyncio.shield(connection.running)
            except RefusedError as error:
                self.said = error.detail
                return
            except (UnreachableError, RemoteProtocolError):
                pass
            finally:
                self._link = None
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
        try:
            state = await self._model(link)
            finite, item = await asyncio.to_thread(state.inspect, header.fragment, payload, header.codec)
        except (AtollError, LookupError):
            return None
        identity = ContributionId(header.learner, header.generation, header.fragment, header.seq)
        taken = identity in link.held
        link.held.setdefault(identity, (item, header.codec))
        reply = await self._offer(link, header, finite, item)
        if not reply.accepted and not taken:
            link.held.pop(identity, None)
        return reply

    async def _offer(self, link: UpstreamLink, header: PushHeader, finite: bool, item: InspectedPayload) -> PushReply:
        norm = float(np.sqrt(np.square(item.norms).sum())) if finite else 0.0
        values = {"header": header_values(header), "finite": finite, "norm": norm}
        try:
            return reply_of((await link.peer.call(calls.OFFER, values))[0])
        except RefusedError as error:
            return PushReply(False, error.code, error.detail)
        except UnreachableError as error:
            return PushReply(False, Refusal.BUSY, f"the relay has lost the syncer ({error}); send it again")

    # ------------------------------------------------------------ from the syncer

    async def _answer(self, method: str, values: dict[str, Any], _data: Bytes) -> tuple[dict[str, Any], Any]:
        link = self._link
        if link is None:
            raise RefusedError(Refusal.BUSY, "this relay holds nothing for this syncer")
        match method:
            case calls.FORGET:
                link.held.pop(id_of(values["id"]), None)
                return {}, b""
            case calls.GATHER:
                return await self._gather(link, values)
        raise RefusedError(Refusal.BAD_REQUEST, f"this relay knows no {method!r}; update the older side")

    async def _gather(self, link: UpstreamLink, values: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        ids = [id_of(one) for one in values["ids"]]
        missing = [one for one in ids if one not in link.held]
        if missing or link.state is None:
            raise RefusedError(Refusal.RELAY_GONE, f"this relay does not hold {missing}; have them given again")
        found = [link.held[one] for one in ids]
        version, weights = int(values["version"]), [float(weight) for weight in values["weights"]]
        told, payload = await asyncio.to_thread(
            _make_one, link.state, int(values["fragment"]), version, found, weights, link.feedback
        )
        self.groups += len(ids) > 1
        self.bytes_up += payload.nbytes
        return told, payload


def _make_one(
    state: ModelState,
    fragment: int,
    version: int,
    found: list[tuple[InspectedPayload, str]],
    weights: list[float],
    feedback: dict[int, Feedback],
) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """One contribution as it came, or several as one, in the run's codec and with feedback of the relay's own."""
    part = state.reduce(fragment, [item for item, _ in found], weights)
    if len(found) == 1:
        item, name = found[0]
        return calls.group_values(part, name), item.payload
    kept, config, codec = feedback.setdefault(fragment, Feedback()), state.config, state.codec_up(fragment)
    merges = state.fragments[fragment].slice_merges
    part, kept.after = part.condensed(merges, codec, kept.at(version), feedback=config.feedback_up)
    return calls.group_values(part, config.codec_up), part.columns[0]
