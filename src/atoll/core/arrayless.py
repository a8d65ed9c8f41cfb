"""A host for a LearnerDriver in a world without arrays: a version is its number, and a contribution is one byte that
never travels inline. Such a world begins here and adds a clock and a link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from atoll.core.effects import Adopt, Contribute, Fetch
from atoll.core.learner_host import (
    FetchedPayload,
    HostArrays,
    LearnerDriverHost,
    OutgoingPayload,
    Payload,
    PreparedVersion,
)

NOTHING_INSIDE = OutgoingPayload(payload=b"0", size=1, checksum=1)


def checksum_of(version: int) -> int:
    """Stands for a version's parameters; never 0, which means unknown."""
    return version + 1


class VersionNumber(NamedTuple):
    version: int
    checksum: int


class ArraylessHost(LearnerDriverHost, HostArrays):
    @property
    def arrays(self) -> HostArrays:
        return self

    # ------------------------------------------------------------ what is done at once

    def take(self, fragment: int) -> None:
        return

    def drop(self, fragment: int) -> None:
        return

    def adopt(self, effect: Adopt) -> int:
        return checksum_of(effect.version)

    def settle(self, fragment: int, seq: int, merged: bool) -> None:
        return

    def forget_residuals(self) -> None:
        return

    def forget_prepared(self, fragment: int) -> None:
        return

    def keep(self, fragment: int, made: Any) -> None:
        return

    # ------------------------------------------------------------ what takes time elsewhere

    @property
    def inline_bytes_max(self) -> int:
        return 0

    def contribute(self, effect: Contribute, done: Callable[[OutgoingPayload | str], None]) -> None:
        done(NOTHING_INSIDE)

    def prepare_whole(self, fragment: int, came: FetchedPayload, done: Callable[[PreparedVersion | str], None]) -> None:
        done(VersionNumber(came.version, checksum_of(came.version)))

    def prepare_update(self, wanted: Fetch, payload: Payload, done: Callable[[PreparedVersion | str], None]) -> None:
        done(VersionNumber(wanted.version, checksum_of(wanted.version)))

    def read_seed(self, fragment: int, done: Callable[[OutgoingPayload], None]) -> None:
        done(NOTHING_INSIDE)

    def read_held(self, fragment: int, version: int, done: Callable[[OutgoingPayload | None], None]) -> None:
        done(NOTHING_INSIDE)

    def copy_inner(self, done: Callable[[Sequence[OutgoingPayload]], None]) -> None:
        done([NOTHING_INSIDE])

    def inner_came(self, pieces: Sequence[Payload], peer: str, reason: str) -> None:
        return
