"""The processes of one learner. Today that is one; where there are several ranks, they must stay one learner.

One process speaks: it has the link, the machine and the vault. At every step boundary its machine says which fragments
to copy and which versions to adopt, and all processes must do the same between the same two steps, or their parameters
drift apart. `RankCoordinator` carries that word from the one to the others. Which rows are a rank's own, and how values
travel between ranks, is the business of a `Parameters` whose tensors are cut over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from atoll.core import effects as fx

BoundaryOrder: TypeAlias = fx.TakeSnapshot | fx.Adopt
"""What is done to the parameters between two steps, and to nothing but the parameters."""


class RankCoordinator(Protocol):
    @property
    def speaks(self) -> bool:
        """True in the one process that speaks with the syncer."""

    def agree(self, orders: Sequence[BoundaryOrder]) -> Sequence[BoundaryOrder]:
        """Training thread of every process, at every step boundary: the orders of the process that speaks, which has
        carried them out already. The others give none, and carry out what they get."""


class OneProcess:
    """An island that is this process alone: there is nobody to tell."""

    speaks = True

    def agree(self, orders: Sequence[BoundaryOrder]) -> Sequence[BoundaryOrder]:
        return orders
