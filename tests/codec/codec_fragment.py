"""One fragment of a syncer, as the tests of the merge use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.codec import (
    BLOCK,
    GradientSample,
    MergeResult,
    OuterRates,
    OuterTarget,
    get_codec,
    merge_fragment,
    reduce,
)

RDA, MEAN, HALF_RDA = "rda", "mean", "half-rda"


@dataclass
class Fragment:
    """A fragment's state on the syncer, and how to merge into it."""

    blocks: int
    up: str = "int4"
    down: str = "int4"
    slices: list[int] | None = None
    modes: list[str] | None = None
    seed: int = 0
    theta: np.ndarray = field(init=False)
    momentum: np.ndarray = field(init=False)
    residual: np.ndarray | None = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        n = self.blocks * BLOCK
        self.theta = rng.standard_normal(n).astype(np.float32)
        self.momentum = (rng.standard_normal(n) * 0.01).astype(np.float32)
        self.residual = None if self.down == "fp32" else (rng.standard_normal(n) * 1e-4).astype(np.float32)
        self.slices = [0, self.blocks] if self.slices is None else self.slices
        self.modes = [RDA] * (len(self.slices) - 1) if self.modes is None else self.modes

    def merge(
        self,
        deltas: list[np.ndarray],
        weights: list[float] | None = None,
        previous: GradientSample | None = None,
        norms: list[np.ndarray] | None = None,
        **settings: Any,
    ) -> MergeResult:
        codec = get_codec(self.up)
        payloads = [codec.encode(delta) for delta in deltas]
        slices = np.array(self.slices, np.int64)
        if norms is None:
            norms = [codec.inspect(payload, self.theta.size, slices)[1] for payload in payloads]
        return merge_fragment(
            reduce(payloads, self.up, [1.0] * len(deltas) if weights is None else weights, norms, slices),
            self.modes or [],
            OuterTarget(self.theta, {"momentum": self.momentum}, self.residual),
            codec_down=self.down,
            rates=OuterRates(0.7, 0.5),
            previous=previous,
            **settings,
        )

    def bits(self) -> bytes:
        return b"".join(a.tobytes() for a in (self.theta, self.momentum, self.residual) if a is not None)


def deltas_of(blocks: int, count: int, seed: int, size: float = 0.01) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(blocks * BLOCK)
    return [((common + rng.standard_normal(blocks * BLOCK)) * size).astype(np.float32) for _ in range(count)]
