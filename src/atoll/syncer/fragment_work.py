"""What is done with a fragment's arrays and their disk: the same in the syncer itself and in a shard. Whoever calls has
the fragment's turn."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.core import (
    NO_VERSION,
    WHOLE_CODEC,
    FetchHeader,
    FetchRequest,
    Refusal,
    StoreOutcome,
    VersionToStore,
)
from atoll.core import effects as fx
from atoll.errors import RefusedError
from atoll.syncer.relay_peers import Gathered
from atoll.syncer.state import InspectedPayload, ModelState
from atoll.syncer.state_writer import StateWriter

T = TypeVar("T")
THETA_COPIES_MAX = 8
"""Whole-fragment copies kept for joiners. Learners that join together fetch the same versions, so a few are enough;
each is 4 bytes per parameter of one fragment."""


class ArraysHost(Protocol):
    """Where arrays are: their disk, and threads to work on them."""

    state: ModelState | None
    copies: OrderedDict[int, tuple[int, int, memoryview]]
    """Whole fragments for joiners: version, checksum, bytes."""

    @property
    def keeper(self) -> StateWriter: ...
    async def on_a_worker(self, function: Callable[..., T], *arguments: Any) -> T: ...


async def compare_contributions(host: ArraysHost, compare: fx.Compare, held: Sequence[InspectedPayload]) -> fx.Compared:
    assert host.state is not None
    learners = [identity.learner for identity in compare.contributions]
    cosines = await host.on_a_worker(host.state.compare, compare.fragment, held, learners, compare.voices)
    return fx.Compared(compare.fragment, cosines)


async def merge_contributions(
    host: ArraysHost,
    merge: fx.Merge,
    held: Sequence[InspectedPayload],
    gathered: Gathered | None = None,
) -> fx.MergeFinished:
    """Merge into the arrays, and note and record the decision. `gathered`: relays have merged some of it."""
    state = host.state
    assert state is not None
    recorder, arrays = host.keeper.recorder, state.fragments[merge.fragment]
    await recorder.anchor(merge.fragment, arrays, "gap", merge.round - 1)
    writing = asyncio.ensure_future(recorder.payloads(merge, held))
    # The log makes a version again from single contributions; one that a relay has a part in goes into a slot.
    logging = asyncio.ensure_future(host.keeper.log_payloads(merge, held if gathered is None else None))
    started_ns = time.monotonic_ns()
    parts = gathered or Gathered(held, merge.weights)
    result = await host.on_a_worker(
        state.merge, merge.fragment, parts.held, parts.weights, parts.groups, merge.codec_down
    )
    merge_ns = time.monotonic_ns() - started_ns
    places = await writing
    await logging
    assert not result.finite or arrays.version == merge.version, "the machine and the arrays disagree"
    host.copies.pop(merge.fragment, None)
    if result.finite:
        host.keeper.note(merge, arrays.checksum)
        await recorder.decision(merge, arrays.checksum, places)
    return fx.MergeFinished(
        fragment=merge.fragment,
        finite=result.finite,
        checksum=arrays.checksum,
        merge_ns=merge_ns,
        update_bytes=int(result.update.nbytes),
        gradient_norm=result.gradient_norm,
        rho=result.rho,
    )


async def heal_fragment(host: ArraysHost, heal: fx.CommitHealed, payload: NDArray[np.uint8], rounds: int) -> None:
    """Take a learner's parameters of a version that was lost."""
    state = host.state
    assert state is not None
    arrays = state.fragments[heal.fragment]
    await anchor_fragment(host, heal.fragment, rounds)
    await host.on_a_worker(state.heal, heal.fragment, heal.version, heal.checksum, payload)
    host.copies.pop(heal.fragment, None)
    await host.keeper.recorder.restate(heal.fragment, arrays, "heal", rounds)


async def anchor_fragment(host: ArraysHost, fragment: int, rounds: int) -> None:
    """Record where a fragment begins in this process. One that is on no disk begins when a learner brings it."""
    assert host.state is not None
    arrays = host.state.fragments[fragment]
    if arrays.version != NO_VERSION:
        await host.keeper.recorder.anchor(fragment, arrays, "restart", rounds)


async def store_version(host: ArraysHost, item: VersionToStore) -> StoreOutcome:
    """Make a version durable."""
    assert host.state is not None
    if item.seed:
        await host.keeper.recorder.restate(item.fragment, host.state.fragments[item.fragment], "seed", 0)
    return await host.keeper.store(item, host.state.durable(item.fragment))


async def copy_theta(host: ArraysHost, fragment: int) -> tuple[int, int, memoryview]:
    """The parameters as they stand, for whoever fetches them; a few copies are kept."""
    assert host.state is not None
    arrays, copies = host.state.fragments[fragment], host.copies
    cached = copies.get(fragment)  # another joiner may have made it
    if cached is None or cached[0] != arrays.version:
        copy = await host.on_a_worker(arrays.theta.tobytes)
        cached = copies[fragment] = (arrays.version, arrays.checksum, memoryview(copy))
        while len(copies) > THETA_COPIES_MAX:
            copies.popitem(last=False)
    return cached


def theta_header(cached: tuple[int, int, memoryview], request: FetchRequest) -> tuple[FetchHeader, memoryview]:
    """The answer to a fetch of whole parameters, from a copy of them."""
    version, checksum, data = cached
    if version == NO_VERSION:  # a relay once kept such a copy, and every newcomer of its site got that for ever
        detail = f"fragment {request.fragment} is not here yet: a learner is bringing it back; ask again"
        raise RefusedError(Refusal.BUSY, detail)
    if request.version not in (NO_VERSION, version):
        detail = f"fragment {request.fragment} is at version {version} now, not {request.version}; fetch that"
        raise RefusedError(Refusal.UNKNOWN_VERSION, detail)
    return FetchHeader(version, WHOLE_CODEC, data.nbytes, checksum), data


def find_update(state: ModelState, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
    """The update that leads to this version, if it is still here."""
    update = state.fragments[request.fragment].ring.get(request.version)
    if update is None:
        detail = f"version {request.version} of fragment {request.fragment} left the ring; fetch it whole"
        raise RefusedError(Refusal.UNKNOWN_VERSION, detail)
    header = FetchHeader(request.version, update.codec, update.payload.nbytes, update.checksum)
    return header, update.payload.data
