"""The merge against the plain reference: gradient, outer step, downlink, and what must never change."""

from __future__ import annotations

import math
from typing import Any

import codec_reference as reference
import numpy as np
import pytest
from codec_fragment import HALF_RDA, MEAN, RDA, Fragment, deltas_of
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import kernels
from atoll.codec import BLOCK, GradientSample, OuterRates, OuterTarget, get_codec, merge_fragment, reduce
from atoll.core.config import CODECS
from atoll.errors import PayloadError


def check_against_reference(fragment: Fragment, deltas: list[np.ndarray], weights: list[float]) -> None:
    theta, momentum, residual = fragment.theta.copy(), fragment.momentum.copy(), fragment.residual
    residual = np.zeros_like(theta) if residual is None else residual.copy()
    result = fragment.merge(deltas, weights)
    assert result.finite
    up, down = get_codec(fragment.up), get_codec(fragment.down)
    decoded = [up.decode(up.encode(delta), delta.size) for delta in deltas]
    slices, modes = np.array(fragment.slices), np.array(fragment.modes)
    gradient = reference.merged_gradient(decoded, weights, slices, modes)
    size = max(float(np.abs(gradient).max(initial=0.0)), 1e-30)

    np.testing.assert_allclose(result.gradient_norm, np.linalg.norm(gradient), rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(result.sample.values, gradient, rtol=1e-4, atol=2e-6 * size)
    # From the merged gradient on, every operation is one fp32 operation per element, so the bits can be compared.
    g, lr, mu = result.sample.values, np.float32(0.7), np.float32(0.5)
    velocity = mu * momentum + g
    x = -lr * (g + mu * velocity) + residual
    payload, sent = reference.encode(fragment.down, x)
    assert result.update.tobytes() == payload
    assert np.array_equal(fragment.momentum, velocity)
    assert np.array_equal(fragment.theta, theta + sent)
    if fragment.residual is not None:
        kept = np.float32(0.95 if fragment.down.startswith("topk") else 1.0)
        assert np.array_equal(fragment.residual, (x - sent) * kept)
    # What a learner gets from the same update.
    down.decode_add(result.update, theta)
    assert theta.tobytes() == fragment.theta.tobytes()


@pytest.mark.parametrize("down", CODECS.names())
@pytest.mark.parametrize("up", CODECS.names())
def test_merge_is_that_of_the_reference_for_every_pair_of_codecs(up: str, down: str) -> None:
    fragment = Fragment(7, up, down, slices=[0, 2, 2, 4, 6, 7], modes=[RDA, RDA, MEAN, HALF_RDA, RDA])
    check_against_reference(fragment, deltas_of(7, 5, seed=1), [1.0, 2.0, 0.5, 3.0, 0.0])


@settings(deadline=None, max_examples=60)
@given(
    blocks=st.integers(0, 6),
    count=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    size=st.sampled_from([0.0, 1e-42, 1e-20, 1e-3, 1.0, 1e12, 1e24]),
    mode=st.sampled_from([RDA, MEAN, HALF_RDA]),
    up=st.sampled_from(CODECS.names()),
    down=st.sampled_from(CODECS.names()),
)
def test_merge_is_that_of_the_reference_for_any_size(
    blocks: int, count: int, seed: int, size: float, mode: str, up: str, down: str
) -> None:
    fragment = Fragment(blocks, up, down, modes=[mode], seed=seed)
    weights = list(np.random.default_rng(seed).uniform(0.1, 5.0, count))
    deltas = deltas_of(blocks, count, seed, size)
    if size == 1e-42:  # below NORM_ZERO a slice counts as zero; it must only do no harm
        assert fragment.merge(deltas, weights).finite
    else:
        check_against_reference(fragment, deltas, weights)


@pytest.mark.parametrize("down", CODECS.names())
def test_theta_is_bit_identical_on_syncer_and_learner_over_many_rounds(down: str) -> None:
    fragment = Fragment(9, "int4", down, slices=[0, 4, 9], modes=[RDA, MEAN])
    learner, sample = fragment.theta.copy(), None
    for version in range(20):
        result = fragment.merge(deltas_of(9, 3, seed=version), previous=sample)
        sample = result.sample
        get_codec(down).decode_add(result.update.tobytes(), learner)
        assert learner.tobytes() == fragment.theta.tobytes()


@pytest.mark.parametrize("blocks", [12, 4096 + 2100])
def test_bits_do_not_depend_on_the_number_of_threads(blocks: int) -> None:
    before, seen = kernels.threads(), []
    cuts = [0, 1, 5, blocks // 2, blocks]
    try:
        for count in (1, 2, 3):
            kernels.set_threads(count)
            fragment = Fragment(blocks, slices=cuts, modes=[RDA, MEAN, RDA, MEAN])
            first = fragment.merge(deltas_of(blocks, 3, seed=1))
            second = fragment.merge(deltas_of(blocks, 3, seed=2), previous=first.sample)
            seen.append((fragment.bits(), second.update.tobytes(), second.gradient_norm, second.rho))
    finally:
        kernels.set_threads(before)
    assert seen[0] == seen[1] == seen[2]


def test_the_same_contributions_give_the_same_bits_again() -> None:
    """The caller sorts by learner id, so arrival order cannot matter; merging twice must give the same bits."""
    results = []
    for _ in range(2):
        fragment = Fragment(11)
        update = fragment.merge(deltas_of(11, 6, seed=3), [1, 2, 3, 4, 5, 6]).update
        results.append((update.tobytes(), fragment.bits()))
    assert results[0] == results[1]


@pytest.mark.parametrize("mode", [RDA, MEAN, HALF_RDA])
def test_one_contribution_is_its_own_merge(mode: str) -> None:
    fragment = Fragment(4, "fp32", "fp32", modes=[mode])
    delta = deltas_of(4, 1, seed=2)
    result = fragment.merge(delta)
    np.testing.assert_allclose(result.sample.values, -delta[0], rtol=1e-6)
    np.testing.assert_allclose(result.gradient_norm, np.linalg.norm(delta[0].astype(np.float64)), rtol=1e-6)


def test_half_rda_is_as_long_as_the_geometric_mean_of_rda_and_mean() -> None:
    deltas = deltas_of(5, 6, seed=4)
    deltas = [delta / np.linalg.norm(delta) for delta in deltas]  # with equal lengths the directions are the same too
    results = [Fragment(5, "fp32", "fp32", modes=[mode]).merge(deltas) for mode in (RDA, HALF_RDA, MEAN)]
    rda, half, mean = (result.gradient_norm for result in results)
    assert mean < 0.9 * half < 0.9 * 0.9 * rda
    np.testing.assert_allclose(half, math.sqrt(rda * mean), rtol=1e-6)
    np.testing.assert_allclose(results[1].sample.values / half, results[0].sample.values / rda, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("mode", [RDA, MEAN, HALF_RDA])
def test_who_did_not_touch_a_slice_disagrees_with_nobody(mode: str) -> None:
    """A learner may leave a tensor as it is for a period (an expert that got no tokens). However it is merged, one of
    eight that did not moves the others' average by its own weight."""
    (moved,) = deltas_of(4, 1, seed=5)
    for others in (1, 7):
        result = Fragment(4, "fp32", "fp32", modes=[mode]).merge([moved] + [np.zeros_like(moved)] * others)
        np.testing.assert_allclose(result.gradient_norm, np.linalg.norm(moved) / (1 + others), rtol=1e-5)


def test_all_zero_contributions_only_move_the_momentum() -> None:
    fragment = Fragment(3)
    momentum = fragment.momentum.copy()
    result = fragment.merge([np.zeros(3 * BLOCK, np.float32)] * 4)
    assert result.finite and result.gradient_norm == 0.0 and not result.sample.values.any()
    assert np.array_equal(fragment.momentum, np.float32(0.5) * momentum)


def test_a_zero_contribution_has_no_direction_but_counts_in_the_radius() -> None:
    fragment = Fragment(3, "fp32", "fp32")
    delta = deltas_of(3, 1, seed=4)[0]
    result = fragment.merge([delta, np.zeros_like(delta)])
    np.testing.assert_allclose(result.sample.values, -delta / 2, rtol=1e-5)


@pytest.mark.parametrize("up", CODECS.names())
def test_opposite_vectors_fall_back_to_the_mean(up: str) -> None:
    """Their unit vectors cancel. The plain mean of v and -3v is -v."""
    delta = (np.random.default_rng(5).integers(-7, 8, 3 * BLOCK) / 8).astype(np.float32)
    delta[::BLOCK] = 1.0  # eighths with one largest value per block are exact in most codecs
    if up == "int2":  # odd levels, which it finds
        delta = np.random.default_rng(5).choice(np.array([-3.0, -1.0, 1.0, 3.0], np.float32), 3 * BLOCK) / 8
    if up == "topk":  # five values of a block, with its levels
        delta = np.zeros(3 * BLOCK, np.float32)
        delta.reshape(3, BLOCK)[:, :5] = np.array([2.0, -3.0, 2.0, 3.0, -2.0], np.float32) / 8
    fragment = Fragment(3, up, "fp32")
    result = fragment.merge([delta, -3 * delta])
    rounding = 1e-2 if up == "topk" else 1e-5  # its scales are bfloat16
    np.testing.assert_allclose(result.sample.values, delta, rtol=rounding)
    np.testing.assert_allclose(result.gradient_norm, np.linalg.norm(delta), rtol=rounding)
    exact = Fragment(3, up, "fp32").merge([delta, -delta])
    assert exact.finite and exact.gradient_norm < 1e-5


def test_rho_is_the_cosine_of_successive_gradients() -> None:
    fragment = Fragment(5, "fp32", "fp32")
    a, b = deltas_of(5, 2, seed=6)
    first = fragment.merge([a])
    assert math.isnan(first.rho)
    second = fragment.merge([b], previous=first.sample)
    expected = float(a.astype(np.float64) @ b) / (np.linalg.norm(a) * np.linalg.norm(b))
    assert second.rho == pytest.approx(expected, rel=1e-4)
    assert fragment.merge([-b], previous=second.sample).rho == pytest.approx(-1.0)
    assert math.isnan(fragment.merge([np.zeros_like(b)], previous=second.sample).rho)


def test_large_fragments_sample_every_sixteenth_block() -> None:
    blocks = 4096 + 33  # just above one million elements
    fragment = Fragment(blocks)
    result = fragment.merge(deltas_of(blocks, 1, seed=7))
    assert result.sample.values.size == -(-blocks // 16) * BLOCK
    again = fragment.merge(deltas_of(blocks, 1, seed=7), previous=result.sample)
    assert again.rho == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e31])
def test_a_merge_that_is_not_finite_touches_nothing(bad: float) -> None:
    fragment = Fragment(4)
    before = fragment.bits()
    result = fragment.merge(deltas_of(4, 2, seed=8), norms=[np.array([1.0]), np.array([bad])])
    assert not result.finite
    assert fragment.bits() == before


def test_a_hostile_payload_with_an_innocent_norm_touches_nothing() -> None:
    fragment = Fragment(4, "fp32", "fp32")
    before = fragment.bits()
    codec = get_codec("fp32")
    payload = codec.encode(deltas_of(4, 1, seed=9)[0])
    payload[:4].view(np.float32)[0] = np.nan
    result = merge_fragment(
        reduce([payload], "fp32", [1.0], [np.array([1.0])], np.array([0, 4])),
        [RDA],
        OuterTarget(fragment.theta, {"momentum": fragment.momentum}, None),
        codec_down="fp32",
        rates=OuterRates(0.7, 0.5),
        previous=None,
    )
    assert not result.finite and fragment.bits() == before


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"theta": np.zeros(1000, np.float32), "momentum": np.zeros(1000, np.float32)}, "multiple of 256"),
        ({"payloads": [], "weights": [], "norms": []}, "one each"),
        ({"weights": [1.0, 1.0]}, "one each"),
        ({"weights": [0.0]}, "not all zero"),
        ({"weights": [math.nan]}, "finite"),
        ({"norms": [np.array([1.0, 2.0])]}, "norms have shape"),
        ({"residual": None}, "needs a residual"),
        ({"merges": [RDA, RDA]}, "2 merge methods for 1 slices"),
        ({"slice_blocks": np.array([0, 3])}, "264 bytes, expected 396"),
        ({"slice_blocks": np.array([1, 2])}, "slice_blocks"),
        (dict.fromkeys(["theta", "momentum", "residual"], np.zeros(256, np.float32)), "have 512 elements each"),
        ({"payloads": [bytes(17)]}, "17 bytes, expected 264"),
        ({"previous": GradientSample(np.zeros(5, np.float32), 0.0)}, "previous gradient sample has 5"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, object], what: str) -> None:
    n = 2 * BLOCK
    arguments: dict[str, Any] = {
        "payloads": [get_codec("int4").encode(np.ones(n, np.float32))],
        "weights": [1.0],
        "norms": [np.array([math.sqrt(n)])],
        "theta": np.zeros(n, np.float32),
        "momentum": np.zeros(n, np.float32),
        "residual": np.zeros(n, np.float32),
        "slice_blocks": np.array([0, 2]),
        "merges": [RDA],
        "previous": None,
    }
    given = arguments | change
    with pytest.raises(PayloadError, match=what):
        merge_fragment(
            reduce(given["payloads"], "int4", given["weights"], given["norms"], given["slice_blocks"]),
            given["merges"],
            OuterTarget(given["theta"], {"momentum": given["momentum"]}, given["residual"]),
            codec_down="int4",
            rates=OuterRates(0.7, 0.5),
            previous=given["previous"],
        )
