"""The low-rank codec: what it keeps of a matrix, which bytes are a payload, and that decoding is plain arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import kernels
from atoll.codec import BLOCK, fragment_codec, get_codec
from atoll.codec.fragments import Matrix
from atoll.core.config import SyncConfig
from atoll.core.layout import build_layout
from atoll.core.messages import PushHeader, PushKind, TensorSpec
from atoll.errors import ConfigError, PayloadError
from atoll.learner.vault import Vault

MATRIX = Matrix(BLOCK, 96, 80)
SIZE = BLOCK + 96 * 80 + BLOCK
CODEC = get_codec("lowrank:4").shaped((MATRIX,))  # type: ignore[attr-defined]
BLOCKS = np.array([0, 1, SIZE // BLOCK], np.int64)


def fragment(seed: int, rank: int = 96, size: float = 1.0) -> np.ndarray:
    """A vector, a matrix of this rank, and a vector."""
    dice = np.random.default_rng(seed)
    x = dice.standard_normal(SIZE)
    x[BLOCK : BLOCK + 96 * 80] = (dice.standard_normal((96, rank)) @ dice.standard_normal((rank, 80))).ravel()
    return (x * size).astype(np.float32)


def test_a_matrix_of_that_rank_is_kept_and_vectors_are_int4() -> None:
    x = fragment(0, rank=3)
    payload, rest = CODEC.encode_delta(x, None, None)
    assert payload.nbytes == CODEC.size_max(SIZE) < get_codec("int4").size_max(SIZE) / 3
    values = CODEC.decode(payload, SIZE)
    inside = slice(BLOCK, BLOCK + 96 * 80)
    assert np.linalg.norm((values - x)[inside]) < 0.02 * np.linalg.norm(x[inside])
    int4 = get_codec("int4")
    outside = np.concatenate([x[:BLOCK], x[-BLOCK:]])
    assert np.array_equal(
        np.concatenate([values[:BLOCK], values[-BLOCK:]]), int4.decode(int4.encode(outside), 2 * BLOCK)
    )
    assert np.array_equal(rest, x - values)


def test_of_any_matrix_it_finds_nearly_the_best_of_its_rank() -> None:
    x = fragment(1)
    matrix = x[BLOCK : BLOCK + 96 * 80].reshape(96, 80)
    kept = CODEC.decode(CODEC.encode(x), SIZE)[BLOCK : BLOCK + 96 * 80].reshape(96, 80)
    values = np.linalg.svd(matrix, compute_uv=False)
    best, found = (values[:4] ** 2).sum(), (matrix**2).sum() - ((matrix - kept) ** 2).sum()
    assert found > 0.6 * best


def test_decoding_is_products_and_sums_in_one_order_for_any_number_of_threads() -> None:
    dice = np.random.default_rng(2)
    left, right = (dice.standard_normal((4, n)).astype(np.float32) for n in (2000, 700))
    expected = np.zeros((2000, 700), np.float32)
    for k in range(4):
        expected += left[k][:, None] * right[k][None, :]
    before = kernels.threads()
    try:
        for threads in (1, 3):
            kernels.set_threads(threads)
            made = np.empty((2000, 700), np.float32)
            kernels.expand(made, left.ravel(), right.ravel(), 4)
            assert made.tobytes() == expected.tobytes()
    finally:
        kernels.set_threads(before)


def test_error_feedback_sends_in_time_what_the_rank_leaves_out() -> None:
    delta, residual, arrived = fragment(3), None, np.zeros(SIZE, np.float32)
    for _ in range(60):
        payload, residual = CODEC.encode_delta(delta, None, residual)
        CODEC.decode_add(payload, arrived)
    assert np.linalg.norm(arrived / 60 - delta) < 0.25 * np.linalg.norm(delta)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_bytes_are_refused_or_harmless(data: st.DataObject) -> None:
    size = CODEC.size_max(SIZE)
    dice = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    payload = dice.integers(0, 256, size + data.draw(st.sampled_from([0, 0, 0, -1, 7, -size])), np.uint8)
    with np.errstate(all="ignore"):
        try:
            finite, norms = CODEC.inspect(payload, SIZE, BLOCKS)
            values = CODEC.decode(payload, SIZE)
        except PayloadError:
            assert payload.size != size
            return
    assert payload.size == size and values.size == SIZE
    assert not finite or (np.isfinite(values).all() and np.isfinite(norms).all())


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-20, 1e36, 3e37])
def test_whatever_is_finite_can_be_sent(size: float) -> None:
    x = np.clip(fragment(4, size=1.0), -3, 3) * np.float32(size)
    finite, norms = CODEC.inspect(CODEC.encode(x), SIZE, BLOCKS)
    assert finite and np.isfinite(norms).all()
    with pytest.raises(PayloadError, match="not finite"):
        CODEC.encode_delta(np.where(np.arange(SIZE) == 5000, np.nan, x).astype(np.float32), None, None)


def test_shapes_come_from_the_layout_and_small_matrices_stay_int4() -> None:
    tensors = (
        TensorSpec("w", (64, 128), "float32"),
        TensorSpec("b", (64,), "float32"),
        TensorSpec("s", (4, 4), "float32"),
    )
    codec = fragment_codec("lowrank:2", build_layout(tensors, 1), 0)
    assert [(m.rows, m.columns) for m in codec.matrices] == [(64, 128)]  # type: ignore[attr-defined]
    assert fragment_codec("int4", build_layout(tensors, 1), 0) is get_codec("int4")


@pytest.mark.parametrize("name", ["lowrank:0", "lowrank:65", "lowrank:x", "lowrank:4:4", "lowrank:-1", "lowrank:9999"])
def test_ranks_that_make_no_sense_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is no low-rank codec"):
        SyncConfig(codec_up=name)


def test_with_the_last_factors_to_begin_with_more_is_found_of_what_stays() -> None:
    """Of a matrix that comes again with noise; whoever decodes knows nothing of it."""
    dice = np.random.default_rng(7)
    steady = fragment(4)
    found = {}
    for warm in (False, True):
        last, residual, arrived, total = None, None, np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
        for _ in range(24):
            x = steady + 0.3 * dice.standard_normal(SIZE).astype(np.float32)
            begun = CODEC.warmed(last) if warm and last is not None else CODEC
            last, residual = begun.encode_delta(x, None, residual)
            CODEC.decode_add(last, arrived)
            total += x
        found[warm] = float(np.linalg.norm(total - arrived))
    assert found[True] < 0.95 * found[False]


def test_a_start_of_zeros_is_none() -> None:
    nothing = CODEC.encode(np.zeros(SIZE, np.float32))
    x = fragment(5)
    assert CODEC.warmed(nothing).encode(x).tobytes() == CODEC.encode(x).tobytes()


@pytest.mark.parametrize("merged", [True, False])
def test_a_learner_begins_with_its_last_contribution_that_was_merged(merged: bool) -> None:
    layout = build_layout((TensorSpec("w", (96, 80), "float32"),), 1)
    config = SyncConfig(fragments=1, codec_up="lowrank:4")
    size = layout.fragments[0].size
    vault = Vault(layout, config)
    vault.current[0] = vault.published(0, 0, np.zeros(size, np.float32), 0)
    dice, payloads = np.random.default_rng(8), []
    x = dice.standard_normal(size).astype(np.float32)
    for seq in range(2):
        header = PushHeader(PushKind.CONTRIBUTION, "l", 1, 0, 1, 0, seq, 0, 1, 1, "lowrank:4", 0, 0)
        payloads.append(vault.encode(vault.start_sending(header, Copied(x), (), False)))
        vault.settle(0, seq, merged)
    codec = fragment_codec("lowrank:4", layout, 0)
    begun = codec.warmed(payloads[0]) if merged else codec  # type: ignore[attr-defined]
    assert payloads[1].tobytes() == begun.encode(x).tobytes()  # type: ignore[attr-defined]
    assert (payloads[1].tobytes() == payloads[0].tobytes()) != merged


class Copied:
    """A snapshot of these values."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def values(self) -> np.ndarray:
        return self._values
