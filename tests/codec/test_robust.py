"""How far contributions agree, and what becomes of one that puts its length into one tensor, against plain numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from codec_fragment import HALF_RDA, MEAN, RDA
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.codec import BLOCK, Partial, agreement, balanced, finish, get_codec, reduce, trimmed
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


def by_value(vectors: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """The trimmed mean as one would write it down, value by value."""
    found = []
    for column in np.stack(vectors, axis=1):
        kept = list(zip(column, weights, strict=True))
        if np.count_nonzero(column) >= 3:
            kept.remove(max(kept, key=lambda one: one[0]))
            kept.remove(min(reversed(kept), key=lambda one: one[0]))
        found.append(sum(value * weight for value, weight in kept) / sum(weight for _, weight in kept))
    return np.array(found)


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4", "topk:10%"])
@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_mean_without_its_extremes_is_what_it_says(codec: str, count: int) -> None:
    deltas, weights = ways(count, seed=count), [1.0 + index / 7 for index in range(count)]
    deltas[0][30 * BLOCK : 31 * BLOCK] = 0.0
    partial = trimmed(reduced(deltas, codec, weights), MERGES)
    got, vectors = finish(partial, MERGES).values(), decoded(deltas, codec)
    for index, name in enumerate(MERGES):
        at = slice(SLICES[index] * BLOCK, SLICES[index + 1] * BLOCK)
        if name == MEAN:
            np.testing.assert_allclose(-got[at], by_value([v[at] for v in vectors], weights), rtol=2e-5, atol=1e-6)
        else:
            whole = finish(reduced(deltas, codec, weights), MERGES).values()
            np.testing.assert_allclose(got[at], whole[at], rtol=1e-5, atol=1e-6)


def test_a_flipped_embedding_moves_a_trimmed_mean_less() -> None:
    """The cosine of the whole fragment does not see it: all other tensors of the liar are true."""
    deltas = [unit(delta).astype(np.float32) for delta in ways(8, seed=3, common=3.0)]
    lied = [delta.copy() for delta in deltas]
    at = slice(SLICES[1] * BLOCK, SLICES[2] * BLOCK)
    lied[2][at] *= -1.0
    assert min(agreement(reduced(lied), "abcdefgh", "abcdefgh").values()) > 0.0

    def harm(partials: list[Partial]) -> float:
        honest, false = (finish(partial, MERGES).values()[at] for partial in partials)
        return float(np.linalg.norm(false - honest) / np.linalg.norm(honest))

    plain, less = (harm([reduced(deltas), reduced(lied)]), harm([trimmed(reduced(d), MERGES) for d in (deltas, lied)]))
    assert plain > 0.2 and less < 0.4 * plain, (plain, less)


def test_what_one_learner_alone_has_moved_stays_in_a_trimmed_mean() -> None:
    """A row of an embedding, for a word that only its text has."""
    deltas = ways(4, seed=5)
    row = slice(2 * BLOCK, 3 * BLOCK)
    for delta in deltas[1:]:
        delta[row] = 0.0
    got = finish(trimmed(reduced(deltas), MERGES), MERGES).values()
    np.testing.assert_allclose(-got[row], deltas[0][row] / 4, rtol=1e-5)


def test_two_contributions_have_no_extremes() -> None:
    partial = reduced(ways(2, seed=6))
    assert trimmed(partial, MERGES) is partial


def test_a_trimmed_mean_goes_no_further_than_a_mean_could() -> None:
    """The simulator found it (draw 8, seed 172): the heaviest was the shortest, and the extreme one at most places."""
    deltas = [
        unit(delta).astype(np.float32) * scale for delta, scale in zip(ways(3, seed=8), (0.01, 1, 1), strict=True)
    ]
    weights = [100.0, 1.0, 1.0]
    partial = reduced(deltas, weights=weights)
    got = finish(trimmed(partial, MERGES), MERGES).values()
    for index, name in enumerate(MERGES):
        if name == MEAN:
            at = slice(SLICES[index] * BLOCK, SLICES[index + 1] * BLOCK)
            mean = np.average([np.linalg.norm(delta[at]) for delta in deltas], weights=weights)
            assert np.linalg.norm(got[at]) <= mean * (1 + 1e-5)
