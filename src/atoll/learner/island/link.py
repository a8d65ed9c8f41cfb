"""What the ranks of one learner say to each other, and over what: the seam between an island and its transport.

words      one small vector per step boundary, summed over all ranks, on its way while everybody trains
commands   from the rank that speaks to all others, in one order
exchange   flat arrays between pairs of ranks, inside of a command
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.errors import IslandError

I64 = NDArray[np.int64]
SPEAKER = 0
"""The rank that has the link to the syncer and the machine."""
COMMAND_WORDS = 64
"""Numbers in the head of a command."""
ISLAND_TIMEOUT_S = 600.0
"""A rank that evaluates or saves alone makes the others wait that long. NCCL's own patience is as long."""


def cannot_go_on(error: Exception, timeout_s: float) -> IslandError:
    """Whatever a transport says of a rank that is not there."""
    return IslandError(
        f"the ranks of this learner cannot go on together: one has ended, or has not come for {timeout_s:g} s "
        f"({' '.join(str(error).split())[:200]}); see the logs of the other ranks, call learner.step on every rank "
        "after every optimizer step, and start all ranks again (torchrun --max-restarts, atoll run)"
    )


class PendingWord(Protocol):
    def wait(self) -> I64:
        """The sum over all ranks. IslandError if a rank has not given its part in time."""


class RankLink(Protocol):
    """Every method raises IslandError where a rank is gone, or does not come within the deadline."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def compare(self, text: str) -> list[str]:
        """Every rank's short text, at all ranks."""

    def start(self, word: I64) -> PendingWord:
        """Training thread: give this rank's part of the next word. It is summed in the background."""

    def tell(self, head: I64) -> None:
        """Worker: the speaker's numbers to all others, in place."""

    def add_up(self, values: I64) -> None:
        """Worker: the sum over all ranks, in place."""

    def exchange(self, sends: Mapping[int, NDArray[Any]], receives: Mapping[int, NDArray[Any]]) -> None:
        """Worker: arrays to and from other ranks; what is received is written into the arrays given for it."""

    def exchange_now(self, sends: Mapping[int, NDArray[Any]], receives: Mapping[int, NDArray[Any]]) -> None:
        """Training thread, at the same place of every rank's script: the same, beside the workers."""
