"""How far contributions agree, and what becomes of one that puts its length into one tensor, against plain numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from codec_fragment import HALF_RDA, MEAN, RDA
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.codec import BLOCK, Partial, agreement, balanced, finish, get_codec, reduce
from atoll.codec.partial import corrected
from atoll.codec.robust import SHARE_FACTOR
from atoll.core.config import CODECS

SLICES = np.array([0, 1, 20, 24, 40], np.int64)
SIZE = 40 * BLOCK
MERGES = [RDA, MEAN, HALF_RDA, MEAN]


def ways(count: int, seed: int, common: float = 0.3) -> list[np.ndarray]:
    """Contributions of unequal lengths that have something in common."""
    dice = np.random.default_rng(seed)
    shared = dice.standard_normal(SIZE)
    lengths = dice.uniform(0.1, 3.0, count)
    return [((common * shared + dice.standard_normal(SIZE)) * way).astype(np.float32) for way in lengths]


def reduced(deltas: Sequence[np.ndarray], codec: str = "fp32", weights: Sequence[float] = ()) -> Partial:
    of = get_codec(codec)
    payloads = [of.encode(delta) for delta in deltas]
    norms = [of.inspect(payload, SIZE, SLICES)[1] for payload in payloads]
    return reduce(payloads, codec, weights or [1.0] * len(deltas), norms, SLICES)


def decoded(deltas: Sequence[np.ndarray], codec: str) -> list[np.ndarray]:
    of = get_codec(codec)
    return [of.decode(of.encode(delta), delta.size).astype(np.float64) for delta in deltas]


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("codec", CODECS.names())
@settings(deadline=None, max_examples=20)
@given(
    names=st.lists(st.sampled_from("abcde"), min_size=3, max_size=7),
    seed=st.integers(0, 1000),
    silent=st.sets(st.sampled_from("abcde"), max_size=2),
)
def test_a_cosine_is_with_the_directions_of_all_other_voices(
    codec: str, names: list[str], seed: int, silent: set[str]
) -> None:
    deltas = ways(len(names), seed)
    voices = set(names) - silent
    summed = {
        name: sum(v for v, of in zip(decoded(deltas, codec), names, strict=True) if of == name) for name in set(names)
    }
    found = agreement(reduced(deltas, codec), names, voices)
    assert list(found) == sorted(set(names))
    for name, cosine in found.items():
        others = [unit(summed[voice]) for voice in sorted(voices) if voice != name]
        if others:
            assert cosine == pytest.approx(float(unit(sum(others)) @ unit(summed[name])), abs=1e-5)
        else:
            assert np.isnan(cosine)


def test_who_has_not_moved_has_no_direction_and_no_voice() -> None:
    deltas = [*ways(3, 0), np.zeros(SIZE, np.float32)]
    found = agreement(reduced(deltas), list("abcd"), set("abcd"))
    assert np.isnan(found.pop("d"))
    assert found == pytest.approx(agreement(reduced(deltas[:3]), list("abc"), set("abc")))


def test_how_long_somebody_is_gives_nobody_a_louder_voice() -> None:
    deltas = ways(4, 1)
    before = agreement(reduced(deltas), list("abcd"), set("abcd"))
    deltas[3] *= np.float32(1000.0)
    assert agreement(reduced(deltas), list("abcd"), set("abcd")) == pytest.approx(before, abs=1e-5)


def test_one_that_puts_its_length_into_one_tensor_is_shortened_there() -> None:
    deltas = ways(4, 2)
    before = finish(reduced(deltas), MERGES)
    deltas[3][:BLOCK] *= np.float32(100.0)
    plain = reduced(deltas)
    found = balanced(plain)
    beside = plain.radii / np.median(plain.radii, axis=1)[:, None]
    assert found.radii[0, 3] == pytest.approx(SHARE_FACTOR * np.sort(beside[:, 3])[1] * np.median(plain.radii[0]))
    assert np.array_equal(found.radii[:, :3], plain.radii[:, :3]), "the honest stay as they are"
    assert np.array_equal(found.radii[1:], plain.radii[1:])
    assert finish(plain, MERGES).norm > 3.0 * before.norm
    assert finish(found, MERGES).norm < 1.2 * before.norm


@pytest.mark.parametrize("correction", [False, True])
def test_shortened_is_as_if_it_had_been_sent_so(correction: bool) -> None:
    """For every way to merge, and for the correction on top of it."""
    deltas = ways(4, 3)
    deltas[1][:BLOCK] *= np.float32(50.0)
    deltas[2][20 * BLOCK : 24 * BLOCK] *= np.float32(50.0)
    found = balanced(reduced(deltas))
    factors = found.radii / reduced(deltas).radii
    short = [
        delta * np.repeat(column, np.diff(SLICES) * BLOCK).astype(np.float32)
        for delta, column in zip(deltas, factors.T, strict=True)
    ]
    parts = [found, reduced(short)]
    if correction:
        momentum = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
        parts = [corrected(part, momentum) for part in parts]
    ours, plain = (finish(part, MERGES) for part in parts)
    assert ours.norm == pytest.approx(plain.norm, rel=1e-5)
    np.testing.assert_allclose(ours.values(), plain.values(), atol=1e-5 * float(np.abs(plain.values()).max()))


def test_contributions_that_are_alike_stay_as_they_are() -> None:
    part = reduced(ways(5, 4))
    assert balanced(part) is part
    pair = reduced([ways(1, 0)[0], np.zeros(SIZE, np.float32)])
    assert balanced(pair) is pair, "two cannot tell"


def test_a_tensor_that_only_two_have_used_stays_theirs() -> None:
    deltas = ways(5, 5)
    for delta in deltas[2:]:
        delta[:BLOCK] = 0.0
    part = reduced(deltas)
    assert balanced(part) is part
