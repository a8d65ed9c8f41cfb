"""A contribution of a learner, ready to be encoded."""

from __future__ import annotations

import numpy as np

from atoll.core.config import SyncConfig
from atoll.core.layout import build_layout
from atoll.core.messages import PushHeader, PushKind, TensorSpec
from atoll.learner import F32, HeldContribution, Vault

SIZE = 600


class Snapshot:
    def __init__(self, values: F32) -> None:
        self._values = values

    def values(self) -> F32:
        return self._values


def made(codec: str) -> tuple[Vault, HeldContribution, F32]:
    layout = build_layout((TensorSpec("weight", (SIZE,), "float32"),), 1)
    vault = Vault(layout, SyncConfig(codec_up=codec))
    size = layout.fragments[0].size
    dice = np.random.default_rng(0)
    base = dice.normal(size=size).astype(np.float32)
    delta = dice.normal(size=size).astype(np.float32)
    header = PushHeader(
        kind=PushKind.CONTRIBUTION,
        learner="learner-0",
        generation=1,
        fragment=0,
        round=1,
        attempt=0,
        seq=0,
        base_version=0,
        steps=1,
        tokens=1,
        codec=codec,
        size=0,
        checksum=0,
    )
    return vault, HeldContribution(header, Snapshot(base + delta), base, feedback=False), delta
