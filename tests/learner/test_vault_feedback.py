"""Error feedback in a learner's vault, and a run that switches it off."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.codec import get_codec
from atoll.core.config import SyncConfig
from atoll.core.layout import build_layout
from atoll.core.messages import PushHeader, PushKind, TensorSpec
from atoll.learner.vault import Sending, Vault


class Copy:
    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def values(self) -> np.ndarray:
        return self._values


def send(vault: Vault, seq: int, values: np.ndarray, *, merged: bool = True) -> Sending:
    codec = vault.config.codec_up
    header = PushHeader(PushKind.CONTRIBUTION, "a", 1, 0, seq, 0, seq, 0, 1, 1, codec, 0, 0)
    sending = vault.start_sending(header, Copy(values), (), feedback=True)
    vault.encode(sending)
    vault.settle(0, seq, merged)
    return sending


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "int2"])
@pytest.mark.parametrize("feedback", [True, False])
def test_a_residual_is_kept_and_added_only_with_feedback(codec: str, feedback: bool) -> None:
    layout = build_layout((TensorSpec("w", (8, 64), "float32", "rda"),), 1)
    vault = Vault(layout, SyncConfig(fragments=1, codec_up=codec, feedback_up=feedback))
    base = np.zeros(layout.fragments[0].size, np.float32)
    vault.current[0] = vault.prepare_whole(0, 0, base.view(np.uint8))
    values = np.random.default_rng(0).standard_normal(base.size).astype(np.float32)
    first, second = send(vault, 0, values), send(vault, 1, values)
    assert first.payload is not None and second.payload is not None
    plain = get_codec(codec).encode(values)
    assert first.payload.tobytes() == plain.tobytes()
    if feedback:
        assert vault.residuals[0] is second.residual is not None
        assert second.payload.tobytes() != plain.tobytes()
    else:
        assert vault.residuals == [None] and first.residual is None and second.residual is None
        assert second.payload.tobytes() == plain.tobytes()
