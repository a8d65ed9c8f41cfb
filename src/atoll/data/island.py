"""Ranks of one island read one learner's leases, and none of them reads what another reads.

Rank 0 leads. It has the leases, cuts every chunk into batches for the whole island, and writes on a board what is in
each. The other ranks read there. Of every batch each rank takes its own share:

    rank 0   cut --plan k--> board        read own share --hand--> go k --> board   loop
    others   board --plan k--> read own share                      board --go k-->  loop

The board is torch.distributed's key-value store: no collective is needed, so reading ahead cannot cross a training
step's own collectives. All ranks give the same settings, so that they read equally far ahead; a batch without samples
is on the board, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from atoll.errors import ConfigError, UnreachableError

T = TypeVar("T")
ISLAND_WAIT_S = 1800.0
"""How long a rank waits for rank 0's next word: as long as torch.distributed's own collectives do by default."""
SLICE_S = 1.0
"""Between two looks at whether the run is over meanwhile."""
PLANS_KEPT = 1024
"""Batches whose words stay on the board. Ranks step together, so none is further behind than it reads ahead."""
GO, SKIP, END = "go", "skip", "end"


class Store(Protocol):
    """What is used of torch.distributed.Store."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...

    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class IslandPlace:
    """One rank's place, and the store through which rank 0 speaks to the others."""

    rank: int = 0
    size: int = 1
    store: Store | None = None
    name: str = ""
    """Of the island: several, or one after the other, may share a store."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"island rank {self.rank} of {self.size}; ranks count from 0")
        if self.size > 1 and self.store is None:
            raise ConfigError(
                "an island of several ranks needs torch.distributed: call init_process_group before atoll.data, or "
                "give island=(rank, size, store)"
            )

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, batch: Sequence[T]) -> list[T]:
        """This rank's part of a batch of the whole island: every sample is in exactly one."""
        return list(batch[self.rank :: self.size])


def find_island(learner: Any, given: IslandPlace | tuple[Any, ...] | None) -> IslandPlace:
    """What was given, or what the learner says, or what torch.distributed says."""
    if isinstance(given, IslandPlace):
        return given
    name = str(getattr(learner, "island_name", ""))
    if given is not None:
        return replace(IslandPlace(*given), name=name)
    size = int(getattr(learner, "island_size", 0) or 0)
    if size == 1:
        return IslandPlace()
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return IslandPlace(size=size) if size > 1 else IslandPlace()
    rank, world = dist.get_rank(), dist.get_world_size()
    if size > 1:
        rank, world = int(learner.island_rank), size
    store = dist.distributed_c10d._get_default_store() if world > 1 else None
    return IslandPlace(rank, world, store, name)


class Board:
    """Words of rank 0 about one loop over one stream."""

    def __init__(self, island: IslandPlace, stream: str, over: Callable[[], bool] = lambda: False) -> None:
        assert island.store is not None
        self._store, self._place, self._over = island.store, f"atoll/data/{island.name}/{stream}", over
        self._loop = 0

    def begin(self) -> None:
        self._loop += 1

    def _key(self, kind: str, number: int) -> str:
        return f"{self._place}/{self._loop}/{kind}/{number}"

    def say(self, kind: str, number: int, words: Any) -> None:
        self._store.set(self._key(kind, number), json.dumps(words, separators=(",", ":")))
        if number >= PLANS_KEPT:
            self._store.delete_key(self._key(kind, number - PLANS_KEPT))

    def hear(self, kind: str, number: int) -> Any:
        """What rank 0 says; END when the run is over and it will say no more."""
        key, deadline_s = self._key(kind, number), time.monotonic() + ISLAND_WAIT_S
        while True:
            try:
                self._store.wait([key], timedelta(seconds=SLICE_S))
                return json.loads(self._store.get(key))
            except RuntimeError:  # torch's DistStoreError, when the time is up
                if self._over():
                    return END
                if time.monotonic() > deadline_s:
                    raise UnreachableError(
                        f"rank 0 of this island has said nothing for {ISLAND_WAIT_S:g} s about its data; look at its "
                        "log, and start the island again"
                    ) from None


class Shared:
    """Rank 0's end: every batch that is cut is written down, then whether the loop got it."""

    def __init__(self, island: IslandPlace, board: Board) -> None:
        self._island, self._board = island, board
        self._planned = self._decided = 0

    def begin(self) -> None:
        self._board.begin()
        self._planned = self._decided = 0

    def plan(self, batch: Sequence[Any]) -> list[Any]:
        """A batch of the island is cut; returns rank 0's share."""
        self._board.say("plan", self._planned, list(batch))
        self._planned += 1
        return self._island.share(batch)

    def decide(self, verdict: str) -> None:
        """What becomes of the next batch that has samples."""
        self._board.say("go", self._decided, verdict)
        self._decided += 1

    def no_more(self) -> None:
        self._board.say("plan", self._planned, END)


class Followed:
    """Any other rank's end: the same batches in the same order."""

    def __init__(self, island: IslandPlace, board: Board) -> None:
        self._island, self._board = island, board
        self._heard = 0

    def plans(self) -> Iterator[list[Any]]:
        """This rank's share of each batch, empty ones included."""
        self._board.begin()
        self._heard = 0
        number = 0
        while (plan := self._board.hear("plan", number)) != END:
            number += 1
            yield self._island.share([tuple(entry) if isinstance(entry, list) else entry for entry in plan])

    def verdict(self) -> str:
        verdict = str(self._board.hear("go", self._heard))
        self._heard += 1
        return verdict
