"""Error feedback in a learner's vault, and a run that switches it off."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.codec import get_codec
from atoll.core.config import SyncConfig
from atoll.core.layout import build_layout
from atoll.core.messages import PushHeader, PushKind, TensorSpec
from atoll.learner.vault import AdoptKey, HeldContribution, Vault


class Copy:
    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def values(self) -> np.ndarray:
        return self._values


def send(vault: Vault, seq: int, values: np.ndarray, *, merged: bool = True) -> HeldContribution:
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


@pytest.mark.parametrize("rule", ["rebase", "overwrite"])
def test_the_values_of_an_adopt_go_where_they_can_be_sent_from(rule: str) -> None:
    layout = build_layout((TensorSpec("w", (8, 64), "float32", "rda"),), 1)
    vault, dice = Vault(layout, SyncConfig(fragments=1)), np.random.default_rng(0)
    old, new, trained = (dice.standard_normal(layout.fragments[0].size).astype(np.float32) for _ in range(3))
    vault.current[0] = before = vault.prepare_whole(0, 0, old.view(np.uint8))
    header = PushHeader(PushKind.CONTRIBUTION, "a", 1, 0, 0, 0, 0, 0, 1, 1, "int4", 0, 0)
    sending = vault.start_sending(header, Copy(trained), (), feedback=True)
    after = vault.prepare_whole(0, 1, new.view(np.uint8))
    key, out = AdoptKey(0, rule, (0,)), np.full(new.size, np.nan, np.float32)
    assert vault.adopt_values(key, before, after, [sending], out) is out
    assert np.array_equal(out, new - old - (trained - old) if rule == "rebase" else new)
    assert np.array_equal(vault.adopt_values(key, before, after, [sending]), out)
