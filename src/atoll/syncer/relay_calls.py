"""What a relay that merges and its syncer say to each other. The link is `wire.shard_peer`, and the relay opens it: it
may sit behind NAT, as learners do. Where shards merge it has a link to each of them as well, by the same name, and they
ask for what goes into their merges. A relay that stands before another one says all of this to that one.

    relay -> syncer, or another relay
      relay     may contributions be merged at the site? refused where single ones are needed
      model     the run's tensors and settings
      offer     a learner's contribution is here and was looked at: its header, finite or not, its norm
    relay -> shard
      relay     as above: here is who may be asked for what it has offered to the syncer
    syncer, shard, or other relay -> relay
      gather    these contributions, with these weights, as one payload (one alone: as it came); or which of them are
                lost with a relay behind this one
    syncer, or other relay -> relay
      forget    a contribution is not needed any more (notice)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.codec import Partial, reduce
from atoll.core import ContributionId, Layout, PushHeader, PushKind, Refusal, SyncConfig, TensorSpec, build_layout
from atoll.core import effects as fx
from atoll.errors import PayloadError, RefusedError, RemoteProtocolError
from atoll.syncer.shard_calls import header_of, id_of, id_values
from atoll.syncer.state import InspectedPayload, ModelState
from atoll.wire import Bytes

RELAY, MODEL, OFFER = "relay", "model", "offer"
GATHER, FORGET = "gather", "forget"

LENGTH_ROUNDING = 1.001
"""Norms are sums of many squares, in fp32 where a machine's kernels take them so."""
ENCODED_SLACK = 2.0
"""What a relay encodes has the error of the one before in it."""
INNER_SHARE = 0.5
"""Of the time that a relay has: what it gives relays behind it. One of those that is frozen must not make its answer
late, too."""
RELAY_LINK_VERSION = 2
"""Of what is said here. Where the two differ the relay passes everything on."""


@dataclass(frozen=True, slots=True)
class WantedSum:
    """What is asked of a relay: these contributions as one, for this version (0: for the disk, one alone)."""

    fragment: int
    version: int
    ids: tuple[ContributionId, ...]
    weights: tuple[float, ...]
    within_s: float
    """How long it is waited for."""

    def for_inner(self) -> WantedSum:
        """The same, for relays behind the one that was asked."""
        return replace(self, within_s=INNER_SHARE * self.within_s)

    def only(self, indices: Sequence[int]) -> WantedSum:
        ids, weights = [self.ids[index] for index in indices], [self.weights[index] for index in indices]
        return replace(self, ids=tuple(ids), weights=tuple(weights))

    def values(self) -> dict[str, Any]:
        named = {"ids": [id_values(one) for one in self.ids], "weights": list(self.weights)}
        return {"fragment": self.fragment, "version": self.version, "within_s": self.within_s, **named}


def wanted_for(merge: fx.Merge, within_s: float) -> WantedSum:
    return WantedSum(merge.fragment, merge.version, merge.contributions, tuple(merge.weights), within_s)


def wanted_of(values: Mapping[str, Any]) -> WantedSum:
    ids, weights = tuple(map(id_of, values["ids"])), tuple(map(float, values["weights"]))
    return WantedSum(int(values["fragment"]), int(values["version"]), ids, weights, float(values["within_s"]))


def offer_of(values: Mapping[str, Any]) -> tuple[PushHeader, bool, float]:
    """Whose contribution it is, whether it is finite, and its norm. Raises RefusedError if it is no offer."""
    try:
        header, norm = header_of(values["header"]), float(values["norm"])
    except (RemoteProtocolError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise RefusedError(Refusal.BAD_REQUEST, f"this is no offer: {error}") from None
    if header.kind is not PushKind.CONTRIBUTION:
        raise RefusedError(Refusal.BAD_REQUEST, f"a {header.kind} cannot wait at a relay; push it")
    finite = bool(values.get("finite")) and 0.0 <= norm < math.inf
    return header, finite, norm if finite else 0.0


def model_values(layout: Layout, config: SyncConfig) -> dict[str, Any]:
    tensors = [[t.name, list(t.shape), t.dtype, t.merge] for t in layout.tensors]
    return {"tensors": tensors, "config": config.to_dict()}


def model_of(values: Mapping[str, Any]) -> ModelState:
    """The run's model as a relay needs it: how fragments are cut and merged, and no parameter."""
    tensors = [TensorSpec(name, tuple(shape), dtype, merge) for name, shape, dtype, merge in values["tensors"]]
    config = SyncConfig.from_dict(values["config"])
    state = ModelState(build_layout(tensors, config.fragments), config, owned=())
    state.restore({})
    return state


def group_values(part: Partial, codec: str) -> dict[str, Any]:
    """All of a condensed part but its one column, which travels as bytes."""
    return {
        "codec": codec,
        "radii": part.radii[:, 0].tolist(),
        "directed": part.directed[:, 0].tolist(),
    }


@dataclass(frozen=True, slots=True)
class Offered:
    """What a relay has said of contributions that it holds, and the guards have let pass: what it sends for them can
    be no more than that. Weights and norms go together."""

    fragment: int
    weights: Sequence[float]
    norms: Sequence[float]

    @property
    def norm(self) -> float:
        """The most that their weighted mean can have."""
        total = math.fsum(self.weights)
        return math.fsum(weight / total * norm for weight, norm in zip(self.weights, self.norms, strict=True))


def group_of(values: Mapping[str, Any], data: Bytes, state: ModelState, offered: Offered) -> Partial:
    """The part again; what it weighs is not the relay's to say, nor that it is longer than what was offered.
    PayloadError if it is none."""
    blocks, weight = state.fragments[offered.fragment].slice_blocks, math.fsum(offered.weights)
    if len(offered.weights) == 1:
        one = inspected(values, data, state, offered)
        return reduce([one.payload], [one.codec], [weight], [one.norms], blocks)
    held = _usable(values, data, state, offered.fragment)
    radii, directed = (_lengths(values[name], blocks.size - 1, offered.fragment) for name in ("radii", "directed"))
    _check_length(radii, offered)
    part = reduce([held.payload], [held.codec], [weight], [radii], blocks)
    # The column is as long as the radii at most, and some more by what encoding had lost before: twice as much is not.
    room = np.divide(ENCODED_SLACK * radii, held.norms, out=np.ones_like(radii), where=held.norms > 0.0)[:, None]
    short = np.minimum(1.0, room)
    divisors = np.divide(part.divisors, short, out=np.full_like(short, np.inf), where=short > 0.0)
    directed = np.minimum(1.0, directed)[:, None]
    return replace(part, directed=directed, divisors=divisors, in_mean=part.in_mean * short)


def inspected(values: Mapping[str, Any], data: Bytes, state: ModelState, offered: Offered) -> InspectedPayload:
    """One contribution as it came. PayloadError if it is not the one that was offered."""
    held = _usable(values, data, state, offered.fragment)
    _check_length(held.norms, offered)
    return held


def _usable(values: Mapping[str, Any], data: Bytes, state: ModelState, fragment: int) -> InspectedPayload:
    finite, held = state.inspect(fragment, data, str(values["codec"]))
    if not finite:
        raise PayloadError(f"what a relay sent of fragment {fragment} holds NaN or Inf; restart that relay")
    return held


def _lengths(values: Any, count: int, fragment: int) -> NDArray[np.float64]:
    try:
        numbers = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        numbers = np.empty(0)
    if numbers.shape != (count,) or not np.isfinite(numbers).all() or (numbers < 0.0).any():
        raise PayloadError(f"a relay sent lengths of fragment {fragment} that are none; update the older side")
    return numbers


def _check_length(norms: NDArray[np.float64], offered: Offered) -> None:
    """The norm of a mean is at most the mean of the norms, and so is that of the radii."""
    length = float(np.linalg.norm(norms))
    if not length <= LENGTH_ROUNDING * offered.norm:
        raise PayloadError(
            f"what a relay sent of fragment {offered.fragment} is {length:.3g} long, and it had offered "
            f"{offered.norm:.3g}; look at that relay"
        )
