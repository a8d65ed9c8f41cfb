"""`Parameters` of one rank: it holds what its framework put there, and works on the blocks that it owns (`shares`).

Reading copies what is held, on the training thread. Bringing it into the form of owned blocks, and the way back, takes
an exchange between ranks: that happens in the background, inside of commands that all ranks carry out in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.core import Layout, TensorSlice
from atoll.learner.island.shares import Exchange, Holdings, Shares
from atoll.learner.parameters import F32, MakeValues, Parameters, Snapshot, into

Swap = Callable[[Mapping[int, NDArray[Any]], Mapping[int, NDArray[Any]]], None]
"""`RankLink.exchange`."""


class HeldParameters(Parameters[Any], Protocol):
    """What the framework has on this rank."""

    def rounded(self, theta: F32, pieces: Sequence[TensorSlice]) -> F32:
        """`as_kept` of an array in which these pieces lie."""

    def reshard(self) -> None:
        """Parameters were changed behind the framework's back: forget copies of them."""


class OwnedSnapshot:
    """A fragment's owned blocks as they were at a step boundary."""

    def __init__(self, values: F32) -> None:
        self._values = values

    def values(self) -> F32:
        return self._values


class RankParameters:
    def __init__(
        self, held: HeldParameters, holdings: Holdings, me: int, swap: Swap, swap_now: Swap, *, staged: bool = False
    ) -> None:
        """`swap` is for the worker, `swap_now` for the training thread. `staged`: ranks have different tensors."""
        self.staged = staged
        self.specs = held.specs
        self.held = held
        self._holdings = holdings
        self._me = me
        self._swap = swap
        self._swap_now = swap_now

    def lay_out(self, layout: Layout) -> None:
        self.layout = layout
        self.shares = Shares(layout, self._holdings, self._me)
        self.held.lay_out(self.shares.held_layout)
        self.owned = self.shares.owned_layout
        self._outward = cache(lambda fragment: self.shares.fragments[fragment].outward(self._me))
        self._inward = cache(lambda fragment: self.shares.fragments[fragment].inward(self._me))

    def blocks(self, fragment: int) -> list[NDArray[np.int64]]:
        """Which blocks each rank owns."""
        share = self.shares.fragments[fragment]
        return [share.blocks(rank) for rank in range(share.processes)]

    # ------------------------------------------------------------ outwards

    def read(self, fragment: int) -> Snapshot:
        """Training thread: a copy of what is held."""
        return self.held.read(fragment)

    def release(self, snapshot: Snapshot) -> None:
        self.held.release(snapshot)

    def collect(self, fragment: int, snapshot: Snapshot) -> F32:
        """The owned blocks of a copy, which is released. All ranks together."""
        exchange = self._outward(fragment)
        values = moved(exchange, snapshot.values(), self.owned.fragments[fragment].size, self._swap)
        self.held.release(snapshot)
        return values

    # ------------------------------------------------------------ inwards

    def spread(self, fragment: int, owned: F32) -> F32:
        """Owned blocks as they are held. All ranks together."""
        return moved(self._inward(fragment), owned, self._held_size(fragment), self._swap)

    def spread_now(self, fragment: int, owned: F32) -> F32:
        """The same on the training thread."""
        return moved(self._inward(fragment), owned, self._held_size(fragment), self._swap_now)

    def _held_size(self, fragment: int) -> int:
        return self.shares.held_layout.fragments[fragment].size

    def stage(self, fragment: int, make: MakeValues) -> Any:
        """All ranks together."""
        return self.held.stage(fragment, partial(into, self.spread(fragment, make(None))))

    def write(self, fragment: int, staged: Any) -> None:
        self.held.write(fragment, staged)

    def add(self, fragment: int, staged: Any) -> None:
        self.held.add(fragment, staged)

    def mix(self, fragment: int, staged: Any, alpha: float) -> None:
        self.held.mix(fragment, staged, alpha)

    def as_kept(self, fragment: int, theta: F32) -> F32:
        return self.held.rounded(theta, self.owned.fragments[fragment].slices)

    def save(self) -> Any:
        return self.held.save()

    def restore(self, saved: Any) -> None:
        self.held.restore(saved)


def moved(exchange: Exchange, source: NDArray[Any], size: int, swap: Swap) -> NDArray[Any]:
    """What this rank has after an exchange. All ranks together."""
    target = np.zeros(size, source.dtype)
    leaving, staying = exchange.here
    staying.put(target, leaving.take(source))
    sends = {rank: np.ascontiguousarray(pieces.take(source)) for rank, pieces in exchange.sends.items()}
    receives = {rank: np.empty(pieces.count, source.dtype) for rank, pieces in exchange.receives.items()}
    if sends or receives:
        swap(sends, receives)
    for rank, pieces in exchange.receives.items():
        pieces.put(target, receives[rank])
    return target
