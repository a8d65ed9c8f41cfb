"""The run in which a learner is examined: one model, one learner, versions that are made by plain arithmetic.

It is the syncer's book-keeping without its rounds: what was published, what a learner's contributions amount to, and
what a version must look like to the bit.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.codec import get_codec
from atoll.core import Layout, SyncConfig, TensorSpec, build_layout
from atoll.errors import LayoutError
from atoll.wire import raw

pb = raw.pb

F32 = NDArray[np.float32]
STEP_AT_START = 100
"""Where the run's clock is when the learner joins: it must count on from there."""
OUTER_STEP = 0.5
"""Of a contribution, in the version that is made of it."""


@dataclass(slots=True)
class TakenPush:
    """A contribution that came in."""

    header: Any
    payload: bytes
    verdict: str = ""
    """How it was answered: accepted, a refusal's code, or nothing yet."""
    merged_version: int = -1

    @property
    def key(self) -> tuple[int, int]:
        return self.header.fragment, self.header.seq


def checksum_of(data: bytes | memoryview | F32) -> int:
    return int(xxhash.xxh3_64_intdigest(data if not isinstance(data, np.ndarray) else data.tobytes()))


@dataclass(slots=True)
class PlayedRun:
    config: SyncConfig
    name: str = "conform"
    epoch: int = 1
    generation: int = 1
    secret: str = ""
    layout: Layout | None = None
    theta: list[F32] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    checksums: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of every version that was published, by fragment and version."""
    updates: dict[tuple[int, int], bytes] = field(default_factory=dict)
    taken: dict[tuple[int, int], TakenPush] = field(default_factory=dict)
    rounds: int = 0

    def lay_out(self, tensors: tuple[TensorSpec, ...]) -> Layout:
        """As many fragments as were asked for, or one if the model is too small to be cut."""
        try:
            self.layout = build_layout(tensors, self.config.fragments)
        except LayoutError:
            self.layout = build_layout(tensors, 1)
        self.theta = [np.zeros(0, np.float32) for _ in self.layout.fragments]
        self.versions = [-1] * len(self.layout.fragments)
        return self.layout

    @property
    def fragments(self) -> int:
        return len(self.versions)

    def size(self, fragment: int) -> int:
        assert self.layout is not None
        return self.layout.fragments[fragment].size

    # ------------------------------------------------------------ what is said

    def welcome(self, protocol: int, *, seed: bool) -> Any:
        assert self.layout is not None
        self.secret = secrets.token_hex(8) if protocol >= 3 else ""
        settings = raw.settings_in({**self.config.to_dict(), "fragments": self.fragments}, protocol)
        return pb.Welcome(
            run=self.name,
            epoch=self.epoch,
            generation=self.generation,
            config_json=json.dumps(settings),
            fingerprint=self.layout.fingerprint,
            seed=seed,
            protocol=protocol if protocol > 1 else 0,
            rank_plus_one=1 if protocol > 1 else 0,
            secret=self.secret,
        )

    def start(self, step: int) -> Any:
        states = [
            pb.FragmentState(version=version, checksum=self.checksums[fragment, version])
            for fragment, version in enumerate(self.versions)
        ]
        return pb.Start(step=step, fragments=states, due_steps=[step + self.config.sync_every] * self.fragments)

    # ------------------------------------------------------------ versions

    def seed(self, fragment: int, payload: bytes) -> None:
        self.theta[fragment] = np.frombuffer(payload, np.float32).copy()
        self._commit(fragment, 0)

    def merge(self, taken: TakenPush) -> Any:
        """A version that holds this contribution; returns what is published, without the update."""
        fragment = int(taken.header.fragment)
        delta = np.zeros(self.size(fragment), np.float32)
        get_codec(self.config.codec_up).decode_add(taken.payload, delta)
        update = get_codec(self.config.codec_down).encode_delta(OUTER_STEP * delta, None, None, feedback=False)[0]
        get_codec(self.config.codec_down).decode_add(update, self.theta[fragment])
        taken.merged_version = self.versions[fragment] + 1
        self._commit(fragment, taken.merged_version)
        self.updates[fragment, taken.merged_version] = update.tobytes()
        return pb.Published(
            fragment=fragment,
            version=taken.merged_version,
            round=max(1, taken.header.round),
            checksum=self.checksums[fragment, taken.merged_version],
            merged_seq=taken.header.seq,
            contributors=1,
            clock_step=STEP_AT_START,
            due_step=STEP_AT_START + self.config.sync_every,
        )

    def _commit(self, fragment: int, version: int) -> None:
        self.versions[fragment] = version
        self.checksums[fragment, version] = checksum_of(self.theta[fragment])

    # ------------------------------------------------------------ books

    def merged_tokens(self, fragment: int, version: int) -> int:
        """Tokens in this version."""
        return sum(
            int(taken.header.tokens)
            for (place, _), taken in self.taken.items()
            if place == fragment and 0 <= taken.merged_version <= version
        )

    def accepted_tokens(self, fragment: int) -> int:
        """Tokens that were handed over, merged or not."""
        return sum(
            int(taken.header.tokens)
            for (place, _), taken in self.taken.items()
            if place == fragment and taken.verdict == "accepted"
        )
