"""The merge with HeLoCo's correction, without error feedback and with momentum that starts anew."""

from __future__ import annotations

import itertools

import codec_reference as reference
import numpy as np
import pytest
from codec_fragment import MEAN, RDA, Fragment, deltas_of
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import kernels
from atoll.codec import BLOCK, get_codec
from atoll.codec.heloco import correct
from atoll.core.config import CODECS
from atoll.errors import ConfigError, PayloadError

ZERO = 1e-30


def corrected_gradient(fragment: Fragment, deltas: list[np.ndarray], weights: list[float]) -> np.ndarray:
    """Every contribution corrected, tensor by tensor, then merged: in float64, from what the payloads decode to."""
    codec = get_codec(fragment.up)
    turned = []
    for delta in deltas:
        v = -codec.decode(codec.encode(delta), delta.size).astype(np.float64)
        m = fragment.momentum.astype(np.float64)
        parts = [
            reference.heloco(v[a * BLOCK : b * BLOCK], m[a * BLOCK : b * BLOCK])
            for a, b in itertools.pairwise(fragment.slices or [])
        ]
        turned.append(-np.concatenate(parts))
    return reference.merged_gradient(turned, weights, np.array(fragment.slices), np.array(fragment.modes))


def with_angles(fragment: Fragment, count: int, seed: int, size: float = 0.01) -> list[np.ndarray]:
    """Contributions at all angles to the momentum, another one in every slice, none near the edges between cases."""
    rng, momentum = np.random.default_rng(seed), fragment.momentum.astype(np.float64)
    deltas = []
    for _ in range(count):
        delta = np.zeros_like(momentum)
        for a, b in itertools.pairwise(fragment.slices or []):
            m = momentum[a * BLOCK : b * BLOCK]
            across = rng.standard_normal(m.size)
            across -= across @ m / (m @ m + 1e-300) * m
            cosine = rng.choice([-0.95, -0.4, -0.05, 0.05, 0.12, 0.35, 0.9])
            along = m / (np.linalg.norm(m) + 1e-300) * cosine
            v = along + across / (np.linalg.norm(across) + 1e-300) * np.sqrt(1 - cosine**2)
            delta[a * BLOCK : b * BLOCK] = -v * size * rng.uniform(0.1, 10.0) * np.sqrt(max(m.size, 1))
        deltas.append(delta.astype(np.float32))
    return deltas


@pytest.mark.parametrize("up", ["fp32", "bf16", "int8", "int4", "int2"])
@pytest.mark.parametrize("seed", range(3))
def test_heloco_is_correct_then_merge(up: str, seed: int) -> None:
    fragment = Fragment(9, up, "fp32", slices=[0, 2, 2, 5, 6, 8, 9], modes=[RDA, RDA, MEAN, RDA, MEAN, RDA], seed=seed)
    deltas, weights = with_angles(fragment, 6, seed), [1.0, 2.0, 0.5, 3.0, 0.0, 1.0]
    expected, momentum = corrected_gradient(fragment, deltas, weights), fragment.momentum.copy()
    plain = Fragment(9, up, "fp32", slices=fragment.slices, modes=fragment.modes, seed=seed).merge(deltas, weights)
    result = fragment.merge(deltas, weights, correction="heloco")
    size = float(np.abs(expected).max())
    np.testing.assert_allclose(result.sample.values, expected, rtol=1e-4, atol=2e-6 * size)
    np.testing.assert_allclose(result.gradient_norm, np.linalg.norm(expected), rtol=1e-5)
    assert not np.allclose(result.sample.values, plain.sample.values, rtol=1e-2, atol=1e-3 * size)
    velocity = np.float32(0.5) * momentum + result.sample.values  # of the momentum as it was before
    assert np.array_equal(fragment.momentum, velocity)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 6),
    size=st.sampled_from([0.0, 1e-42, 1e-20, 1e-3, 1.0, 1e12, 1e24]),
    momentum=st.sampled_from([0.0, 1e-38, 1e-25, 1e-3, 1e20]),
    mode=st.sampled_from([RDA, MEAN]),
)
def test_heloco_is_finite_and_never_lengthens_for_any_sizes(
    seed: int, count: int, size: float, momentum: float, mode: str
) -> None:
    fragment = Fragment(2, "fp32", "fp32", modes=[mode], seed=seed)
    fragment.momentum *= np.float32(momentum)
    deltas = with_angles(fragment, count, seed, size)
    result = fragment.merge(deltas, correction="heloco")
    assert result.finite and np.all(np.isfinite(result.sample.values))
    longest = max(np.linalg.norm(delta.astype(np.float64)) for delta in deltas)
    assert np.linalg.norm(result.sample.values.astype(np.float64)) <= longest * 1.00001 + 1e-37
    if momentum == 0.0:
        assert fragment.bits() == merged_without(2, deltas, mode, seed).bits()


def merged_without(blocks: int, deltas: list[np.ndarray], mode: str, seed: int) -> Fragment:
    fragment = Fragment(blocks, "fp32", "fp32", modes=[mode], seed=seed)
    fragment.momentum[:] = 0.0
    fragment.merge(deltas)
    return fragment


def test_heloco_in_numbers() -> None:
    """Two contributions against a momentum of 1 along x, by hand: one astray, one against; a third is in line."""
    v = np.array([[0.1, np.sqrt(0.99)], [-0.6, 0.8], [0.6, 0.8]])
    corrected = correct(np.ones((1, 3)), v[:, :1].T, np.ones(1), zero=ZERO)
    turned = corrected.own.T * v + corrected.pull.T * np.array([[1.0, 0.0]])
    confidence = 1 / (4 + 1e-8)
    mixed = (1 - 0.9 * confidence) * v[0] + 0.9 * confidence * np.array([1.0, 0.0])
    np.testing.assert_allclose(turned[0], mixed / np.linalg.norm(mixed))
    np.testing.assert_allclose(turned[1], [-0.6 + 0.5 * 0.6 * confidence * 0.6, 0.8])
    np.testing.assert_allclose(turned[2], v[2])
    np.testing.assert_allclose(corrected.norms[0], np.linalg.norm(turned, axis=1))


def test_a_contribution_against_the_momentum_loses_at_most_half_of_what_is_against_it() -> None:
    corrected = correct(np.array([[1e6]]), np.array([[-1e6]]), np.ones(1), zero=ZERO)
    assert corrected.own[0, 0] == 1.0
    np.testing.assert_allclose(corrected.pull, 0.5e6, rtol=1e-5)  # beta_max
    np.testing.assert_allclose(corrected.norms, 0.5e6, rtol=1e-5)


def test_an_unknown_correction_is_refused() -> None:
    with pytest.raises(ConfigError, match="correction must be one of none, heloco"):
        Fragment(2).merge(deltas_of(2, 1, seed=0), correction="helloco")


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e31])
def test_a_corrected_or_restarted_merge_that_is_not_finite_touches_nothing(bad: float) -> None:
    for changed in ({"correction": "heloco"}, {"restart": True}):
        fragment = Fragment(4)
        before = fragment.bits()
        result = fragment.merge(deltas_of(4, 2, seed=8), norms=[np.array([1.0]), np.array([bad])], **changed)
        assert not result.finite and fragment.bits() == before


@pytest.mark.parametrize("codec", ["int4", "int2"])
def test_bits_do_not_depend_on_the_number_of_threads(codec: str) -> None:
    blocks, before, seen = 4096 + 2100, kernels.threads(), []
    try:
        for count in (1, 2, 3):
            kernels.set_threads(count)
            fragment = Fragment(blocks, codec, codec, slices=[0, 1, 5, 3000, blocks], modes=[RDA, MEAN, RDA, MEAN])
            first = fragment.merge(deltas_of(blocks, 3, seed=1), correction="heloco")
            second = fragment.merge(deltas_of(blocks, 3, seed=2), previous=first.sample, correction="heloco")
            seen.append((fragment.bits(), second.update.tobytes(), second.gradient_norm, second.rho))
    finally:
        kernels.set_threads(before)
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("down", CODECS.names())
def test_without_feedback_an_update_loses_what_its_codec_loses(down: str) -> None:
    fragment = Fragment(7, "fp32", down)
    theta, momentum, fragment.residual = fragment.theta.copy(), fragment.momentum.copy(), None
    result = fragment.merge(deltas_of(7, 3, seed=1), feedback=False)
    velocity = np.float32(0.5) * momentum + result.sample.values
    payload, sent = reference.encode(down, -np.float32(0.7) * (result.sample.values + np.float32(0.5) * velocity))
    assert result.update.tobytes() == payload  # block after block: nothing of one reaches the next
    assert np.array_equal(fragment.theta, theta + sent)


def test_a_residual_must_fit_the_feedback() -> None:
    with pytest.raises(PayloadError, match="int4 without feedback keeps no residual"):
        Fragment(2).merge(deltas_of(2, 1, seed=0), feedback=False)


def test_a_restart_is_a_merge_from_zero_momentum() -> None:
    restarted, fresh = Fragment(5), Fragment(5)
    fresh.momentum[:] = 0.0
    deltas = deltas_of(5, 3, seed=3)
    restarted.merge(deltas, restart=True, correction="heloco")  # and there is nothing to correct against
    fresh.merge(deltas)
    assert restarted.bits() == fresh.bits()
