"""What the bytes are in this world: real small arrays (`arrays`), or names that stand for them (`references`).

Both hosts work with either through these two interfaces. With arrays the numbers are checked as well; with references
a run costs what its machines cost, which is how large ones are simulated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from atoll.core import Contribute, Fetch, FetchedPayload, HostArrays, OutgoingPayload, PreparedVersion

Payload = Any
Stored = Any


@dataclass(frozen=True, slots=True)
class Made:
    """What a merge made."""

    finite: bool
    checksum: int = 0
    theta_finite: bool = True
    gradient_norm: float = 0.0


class SyncerPayloads(Protocol):
    """The syncer's parameters."""

    def put_seed(self, fragment: int, payload: Payload) -> bool: ...
    def commit_seed(self) -> tuple[int, ...]: ...
    def inspect(self, fragment: int, payload: Payload, codec: str) -> tuple[bool, float]: ...
    def compare(
        self, fragment: int, payloads: Sequence[Payload], learners: Sequence[str], voices: Collection[str]
    ) -> Mapping[str, float]: ...
    def merge(
        self, fragment: int, version: int, payloads: Sequence[Payload], weights: Sequence[float], codec_down: str
    ) -> Made: ...
    def durable(self, fragment: int) -> Stored: ...
    def restore(self, stored: dict[int, tuple[int, int, Stored]]) -> None: ...
    def inspect_whole(self, fragment: int, payload: Payload) -> tuple[bool, float]:
        """Whether it is finite, and how far from what is here."""

    def heal(self, fragment: int, version: int, checksum: int, payload: Payload) -> None: ...
    def version(self, fragment: int) -> tuple[int, int]: ...
    def update(self, fragment: int, version: int) -> Payload | None: ...
    def theta(self, fragment: int) -> Payload: ...
    def update_bytes(self, fragment: int, version: int) -> int: ...
    def whole_bytes(self, fragment: int) -> int: ...


class LearnerPayloads(HostArrays, Protocol):
    """One learner's parameters, and what it keeps of the run's."""

    def step(self) -> None: ...
    def start_sending(self, effect: Contribute) -> object: ...
    def encode(self, fragment: int, seq: int, poison: str) -> OutgoingPayload | None:
        """None if it is not finite, which a learner notices itself."""

    def prepare_whole(self, fragment: int, came: FetchedPayload) -> PreparedVersion: ...
    def prepare_update(self, wanted: Fetch, payload: Payload) -> PreparedVersion:
        """PayloadError if it does not follow what is here or the bits are not the syncer's."""

    def seed(self, fragment: int) -> Payload: ...
    def forged(self, fragment: int) -> OutgoingPayload:
        """Parameters that no syncer ever had, with a checksum that fits them."""

    def held(self, fragment: int, version: int) -> tuple[Payload, int] | None: ...
