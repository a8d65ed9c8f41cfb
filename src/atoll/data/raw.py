"""Leased chunk numbers for loops that read for themselves."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.data.cutting import Part
from atoll.data.dry_wait import FIRST_LEASE_S, WHEN_DRY, DryWait
from atoll.data.lease_client import AHEAD_S, LeaseClient
from atoll.data.seam import LearnerLike
from atoll.errors import ConfigError


class Chunk:
    """One chunk to train on, from its sample `start` on."""

    def __init__(self, client: LeaseClient, key: int, number: int, start: int) -> None:
        self.number = number
        self.start = start
        self._client = client
        self._key = key
        self._position = start

    @property
    def repeated(self) -> bool:
        """True if the leases had run out and this one is only gone over again."""
        return self._key < 0

    @property
    def revoked(self) -> bool:
        """True if it went to another learner meanwhile, or something new is there in place of a repeat: go on to the
        next."""
        return self._client.unwanted(self._key)

    def reached(self, position: int) -> None:
        """Tell, before `learner.step`, that this step covers the samples before `position`. A learner that leaves then
        hands back exactly the rest; without it, the whole chunk."""
        self._position = max(self._position, position)
        self._client.read(Part(self._key, self._position, 0, False))

    def _over(self) -> None:
        self._client.read(Part(self._key, self._position, 0, True))

    def __repr__(self) -> str:
        return f"Chunk(number={self.number}, start={self.start})"


class Chunks:
    """Iterator over chunks. Asking for the next one says that the one before was read to its end: it is done with the
    next `learner.step`, or when the loop or the learner ends."""

    def __init__(self, client: LeaseClient, dry_wait: DryWait) -> None:
        self._client = client
        self._dry_wait = dry_wait
        self._current: Chunk | None = None
        self._ended = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._current is not None:
            self._current._over()
            self._current = None
        while not self._ended and not self._client.over:
            ticket = self._client.take()
            if ticket is not None:
                self._dry_wait.fed()
                self._current = Chunk(self._client, *ticket)
                return self._current
            if not self._dry_wait.idle():
                break
        self._ended = True
        self._client.stepped()
        self._client.finish()
        raise StopIteration


def chunks(
    learner: LearnerLike,
    *,
    chunks: int = 0,
    stream: str = "train",
    ahead_s: float = AHEAD_S,
    when_dry: str = "repeat",
    first_lease_s: float = FIRST_LEASE_S,
) -> Chunks:
    """The numbers themselves, for a loop that reads on its own. `chunks` 0: no end.

    for chunk in atoll.data.chunks(learner, chunks=1000):
        for batch in my_reader(chunk.number, skip=chunk.start):
            ...; optimizer.step(); learner.step(tokens=...)
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 0:
        raise ConfigError(f"chunks must be a whole number, 0 for no end; not {chunks!r}")
    if when_dry not in WHEN_DRY:
        raise ConfigError(f"when_dry must be one of {', '.join(WHEN_DRY)}; not {when_dry!r}")
    client = LeaseClient(learner, stream=stream, chunks=chunks, ahead_s=ahead_s, trust=True)
    return Chunks(client, DryWait(learner, client, when_dry, first_lease_s))
