"""The states of all ranks of one learner as one run of bytes, for a joiner: a head with their sizes, then each of them.

A state of one process alone stays what it is: a safetensors blob, as releases before this one know it.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.learner.inner.blob import pack, unpack
from atoll.learner.inner.captured import Blob, Captured, InnerAbout, damaged, reading
from atoll.learner.inner.taking import StateTaker
from atoll.learner.inner_state import BUNDLE, bundle_head

RANKS_MAX = 65_536


def unbundle(blob: Blob) -> list[Captured]:
    """The state of each rank; of one process: its own."""
    view = (blob.data if isinstance(blob, np.ndarray) else memoryview(blob)).cast("B")
    if view[: len(BUNDLE)] != BUNDLE:
        return [unpack(blob)]
    with reading():
        (count,) = struct.unpack_from("<Q", view, len(BUNDLE))
        if not 0 < count <= RANKS_MAX:
            raise damaged(f"{count} ranks")
        sizes = struct.unpack_from(f"<{count}Q", view, len(BUNDLE) + 8)
        at = len(bundle_head(sizes))
        if at + sum(sizes) != len(view):
            raise damaged(f"{len(view)} bytes where {at + sum(sizes)} were announced")
    found = []
    for size in sizes:
        found.append(unpack(view[at : at + size]))
        at += size
    return found


def optimizer_only(saved: dict[str, Any], about: InnerAbout) -> Captured:
    """The optimizer's branch of a state, by itself."""
    taker = StateTaker({})
    structure = {"optimizer": taker.node(saved, "optimizer"), "extras": {}, "rng": None}
    return Captured(taker.tensors, structure, about)


def packed_optimizer(saved: dict[str, Any], about: InnerAbout) -> NDArray[np.uint8]:
    return pack(optimizer_only(saved, about))
