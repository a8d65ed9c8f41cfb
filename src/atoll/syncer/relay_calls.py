"""What a relay that merges and its syncer say to each other. The link is `wire.shard_peer`, and the relay opens it: it
may sit behind NAT, as learners do.

    relay -> syncer
      relay     may contributions be merged at the site? refused where single ones are needed
      model     the run's tensors and settings
      offer     a learner's contribution is here and was looked at: its header, finite or not, its norm
    syncer -> relay
      gather    these contributions, with these weights, as one payload (one alone: as it came)
      forget    a contribution is not needed any more (notice)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from atoll.codec import Partial, reduce
from atoll.core import Layout, SyncConfig, TensorSpec, build_layout
from atoll.errors import PayloadError
from atoll.syncer.state import InspectedPayload, ModelState
from atoll.wire import Bytes

RELAY, MODEL, OFFER = "relay", "model", "offer"
GATHER, FORGET = "gather", "forget"

RELAY_LINK_VERSION = 1
"""Of what is said here. Where the two differ the relay passes everything on."""


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


def group_of(values: Mapping[str, Any], data: Bytes, state: ModelState, fragment: int, weight: float) -> Partial:
    """The part again; what it weighs is not the relay's to say. PayloadError if it is none."""
    held, blocks = inspected(values, data, state, fragment), state.fragments[fragment].slice_blocks
    radii, directed = (np.asarray(values[name], np.float64) for name in ("radii", "directed"))
    for numbers in (radii, directed):
        if numbers.shape != (blocks.size - 1,) or not np.isfinite(numbers).all() or (numbers < 0.0).any():
            raise PayloadError(f"a relay sent lengths of fragment {fragment} that are none; update the older side")
    part = reduce([held.payload], [held.codec], [weight], [radii], blocks)
    return replace(part, directed=directed[:, None])


def inspected(values: Mapping[str, Any], data: Bytes, state: ModelState, fragment: int) -> InspectedPayload:
    finite, held = state.inspect(fragment, data, str(values["codec"]))
    if not finite:
        raise PayloadError(f"what a relay sent of fragment {fragment} holds NaN or Inf; restart that relay")
    return held
