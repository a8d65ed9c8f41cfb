"""No arrays: a version is one number that is made from its predecessor and what was merged, so that two parties hold
the same number exactly if they hold the same history. A contribution is its size and its norm."""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from atoll.core import Adopt, Contribute, Fetch, FetchedPayload, OutgoingPayload, PushHeader, SyncConfig
from atoll.errors import PayloadError
from atoll.instruments.chaos import VALUES
from atoll.instruments.sim.payloads import Made

CONTRIBUTION_BYTES = 34_000
"""A fragment of 65,536 parameters as int4."""
WHOLE_BYTES = 262_144
FORGED = 0x5EED
"""The checksum of what was never made."""
FORGED_FAR = 1e30
"""How far that is from everything."""

Reference = tuple[float, ...]


def mixed(*numbers: float) -> int:
    """One number out of several, the same on every machine."""
    return zlib.crc32(repr(numbers).encode()) or 1


class ReferenceSyncer:
    """Payloads are tuples: (norm, sign) of a contribution, (checksum, version) of a version or an update."""

    def __init__(self, fragments: int, config: SyncConfig) -> None:
        self._config = config
        self._seeds: dict[int, int] = {}
        self._now: list[tuple[int, int]] = [(-1, 0)] * fragments
        self._rings: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(fragments)]

    def put_seed(self, fragment: int, payload: Reference) -> bool:
        self._seeds[fragment] = int(payload[0])
        return True

    def commit_seed(self) -> tuple[int, ...]:
        self._now = [(0, self._seeds[fragment]) for fragment in range(len(self._now))]
        return tuple(checksum for _, checksum in self._now)

    def inspect(self, fragment: int, payload: Reference, codec: str) -> tuple[bool, float]:
        return payload[0] == payload[0], payload[0]

    def compare(
        self, fragment: int, payloads: Sequence[Reference], learners: Sequence[str], voices: Collection[str]
    ) -> dict[str, float]:
        """The second number of a contribution is its direction on a line."""
        sides = dict(zip(learners, (payload[1] for payload in payloads), strict=True))
        total = sum(sides[voice] for voice in voices)
        others = {name: total - (side if name in voices else 0.0) for name, side in sides.items()}
        return {name: side * math.copysign(1.0, others[name]) if others[name] else 0.0 for name, side in sides.items()}

    def merge(
        self, fragment: int, version: int, payloads: Sequence[Reference], weights: Sequence[float], codec_down: str
    ) -> Made:
        before, checksum = self._now[fragment]
        assert version == before + 1, "the machine and the references disagree"
        made = mixed(checksum, version, len(payloads), sum(weights))
        self._now[fragment] = (version, made)
        ring = self._rings[fragment]
        ring[version] = made
        while len(ring) > self._config.ring_versions:
            ring.popitem(last=False)
        return Made(True, made)

    def durable(self, fragment: int) -> tuple[int, int]:
        return self._now[fragment]

    def restore(self, stored: dict[int, tuple[int, int, tuple[int, int]]]) -> None:
        self._now = [(-1, 0)] * len(self._now)
        for fragment, (version, checksum, _) in stored.items():
            self._now[fragment] = (version, checksum)

    def inspect_whole(self, fragment: int, payload: Reference) -> tuple[bool, float]:
        return True, FORGED_FAR if payload[0] == FORGED else 0.0

    def heal(self, fragment: int, version: int, checksum: int, payload: Reference) -> None:
        self._now[fragment] = (version, checksum)
        self._rings[fragment].clear()

    def version(self, fragment: int) -> tuple[int, int]:
        return self._now[fragment]

    def update(self, fragment: int, version: int) -> Reference | None:
        checksum = self._rings[fragment].get(version)
        return None if checksum is None else (checksum, version)

    def theta(self, fragment: int) -> Reference:
        version, checksum = self._now[fragment]
        return (checksum, version)

    def update_bytes(self, fragment: int, version: int) -> int:
        return CONTRIBUTION_BYTES

    def whole_bytes(self, fragment: int) -> int:
        return WHOLE_BYTES


class ReferenceVersion(NamedTuple):
    version: int
    checksum: int


class ReferenceLearner:
    def __init__(self, fragments: int, learner: str) -> None:
        self._learner = learner
        self._current: list[tuple[int, int]] = [(-1, 0)] * fragments
        self._prepared: list[dict[int, int]] = [{} for _ in range(fragments)]
        self._sending: dict[tuple[int, int], PushHeader] = {}

    def step(self) -> None:
        return

    def take(self, fragment: int) -> None:
        return

    def drop(self, fragment: int) -> None:
        return

    def start_sending(self, effect: Contribute) -> None:
        self._sending[effect.header.fragment, effect.header.seq] = effect.header

    def encode(self, fragment: int, seq: int, poison: str) -> OutgoingPayload | None:
        wrong = {"nan": math.nan, "huge": 1000.0, "flip8": -8.0, "long": 8.0, **VALUES}.get(poison, 1.0)
        norm = float(self._sending[fragment, seq].steps) * abs(wrong)
        return OutgoingPayload((norm, -1.0 if wrong < 0 or poison == "flip" else 1.0), CONTRIBUTION_BYTES, 1)

    def settle(self, fragment: int, seq: int, merged: bool) -> None:
        self._sending.pop((fragment, seq), None)

    def prepare_whole(self, fragment: int, came: FetchedPayload) -> ReferenceVersion:
        return ReferenceVersion(came.version, int(came.payload[0]))

    def prepare_update(self, wanted: Fetch, payload: Reference) -> ReferenceVersion:
        fragment, version = wanted.fragment, wanted.version
        newest = max(self._prepared[fragment], default=self._current[fragment][0])
        if newest != version - 1:
            raise PayloadError(f"version {version} of fragment {fragment} does not follow what is here")
        if wanted.checksum and payload[0] != wanted.checksum:
            raise PayloadError(f"version {version} of fragment {fragment} differs from the syncer's")
        return ReferenceVersion(version, int(payload[0]))

    def keep(self, fragment: int, made: ReferenceVersion) -> None:
        self._prepared[fragment][made.version] = made.checksum

    def forget_prepared(self, fragment: int) -> None:
        for index, prepared in enumerate(self._prepared):
            if fragment in (-1, index):
                prepared.clear()

    def forget_residuals(self) -> None:
        return

    def adopt(self, effect: Adopt) -> int:
        prepared = self._prepared[effect.fragment]
        version, checksum = self._current[effect.fragment]
        if effect.version in prepared:
            checksum = prepared[effect.version]
        else:
            assert effect.version == version, "the machine and the references disagree"
        self._current[effect.fragment] = (effect.version, checksum)
        for old in [v for v in prepared if v <= effect.version]:
            del prepared[old]
        return checksum

    def seed(self, fragment: int) -> Reference:
        version, checksum = self._current[fragment]
        return (checksum if version >= 0 else mixed(fragment), -1)

    def forged(self, fragment: int) -> OutgoingPayload:
        return OutgoingPayload((FORGED, 0), WHOLE_BYTES, FORGED)

    def held(self, fragment: int, version: int) -> tuple[Reference, int] | None:
        current, checksum = self._current[fragment]
        if current != version:
            checksum = self._prepared[fragment].get(version, 0)
        return ((checksum, version), checksum) if checksum else None
