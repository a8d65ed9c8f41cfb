"""Sums over contributions in parts: what keeps its bits in any grouping, and what is equal up to rounding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import codec_reference as reference
import numpy as np
import pytest
from codec_fragment import HALF_RDA, MEAN, RDA, Fragment, deltas_of
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import kernels
from atoll.codec import BLOCK, Partial, combine, finish, get_codec, reduce
from atoll.codec.outer.nesterov import NESTEROV
from atoll.codec.partial import corrected
from atoll.core.config import CODECS, OUTERS
from atoll.errors import PayloadError

SLICES = np.array([0, 2, 2, 5, 6, 9], np.int64)
MERGES = [RDA, MEAN, HALF_RDA, MEAN, HALF_RDA]
each_codec = pytest.mark.parametrize("up", CODECS.names())


@dataclass
class Sent:
    """Contributions, as they came in."""

    deltas: list[np.ndarray]
    weights: list[float]
    codec: str = "fp32"

    def reduced(self, lo: int, hi: int) -> Partial:
        codec = get_codec(self.codec)
        payloads = [codec.encode(delta) for delta in self.deltas[lo:hi]]
        norms = [codec.inspect(payload, payload_size(SLICES), SLICES)[1] for payload in payloads]
        return reduce(payloads, self.codec, self.weights[lo:hi], norms, SLICES)

    def decoded(self) -> list[np.ndarray]:
        codec = get_codec(self.codec)
        return [codec.decode(codec.encode(delta), delta.size) for delta in self.deltas]


def payload_size(slices: np.ndarray) -> int:
    return int(slices[-1]) * BLOCK


def sent(count: int, seed: int, codec: str = "fp32", size: float = 0.01) -> Sent:
    """Contributions of unequal lengths and weights; one is zero in some slice, and some cancel in another."""
    dice = np.random.default_rng(seed)
    deltas = [delta * np.float32(dice.uniform(0.1, 3.0)) for delta in deltas_of(9, count, seed, size)]
    deltas[0][5 * BLOCK : 6 * BLOCK] = 0.0
    if count == 2:
        deltas[1][: 2 * BLOCK] = -deltas[0][: 2 * BLOCK]
    weights = [1.0] * count if count == 2 else dice.uniform(0.1, 5.0, count).tolist()
    return Sent(deltas, weights, codec)


def cuts(count: int, groups: Sequence[int]) -> list[tuple[int, int]]:
    edges = sorted({0, count, *(group % count for group in groups)})
    return list(itertools.pairwise(edges))


@each_codec
@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 7), seed=st.integers(0, 1000), groups=st.lists(st.integers(0, 6), max_size=4))
def test_any_grouping_in_learner_order_has_the_same_bits(up: str, count: int, seed: int, groups: list[int]) -> None:
    all_sent = sent(count, seed, up)
    whole = finish(all_sent.reduced(0, count), MERGES)
    grouped = finish(combine([all_sent.reduced(lo, hi) for lo, hi in cuts(count, groups)]), MERGES)
    assert grouped.norm == whole.norm and np.array_equal(grouped.coefficients, whole.coefficients)
    assert grouped.values().tobytes() == whole.values().tobytes()


@each_codec
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_reduce_and_finish_give_the_bits_of_the_fused_merge(up: str, share: float) -> None:
    all_sent = sent(4, 5, up)
    fragment = Fragment(9, up, "int4", slices=SLICES.tolist(), modes=MERGES)
    result = fragment.merge(all_sent.deltas, all_sent.weights, share=share)
    apart = finish(all_sent.reduced(0, 4), MERGES, share)
    assert apart.norm == result.gradient_norm
    assert apart.values().tobytes() == result.sample.values.tobytes()


def close(found: np.ndarray, expected: np.ndarray, deltas: list[np.ndarray]) -> None:
    """Within rounding of the contributions' norm in each slice."""
    for lo, hi in itertools.pairwise(SLICES * BLOCK):
        error = np.linalg.norm(found[lo:hi].astype(np.float64) - expected[lo:hi])
        assert error <= 3e-6 * max(np.linalg.norm(delta[lo:hi].astype(np.float64)) for delta in deltas)


@settings(deadline=None, max_examples=80)
@given(
    count=st.integers(1, 8),
    seed=st.integers(0, 1000),
    groups=st.lists(st.integers(0, 7), max_size=4),
    above=st.lists(st.integers(0, 7), max_size=2),
    codec=st.sampled_from(["fp32", "int4", "bf16"]),
    size=st.sampled_from([1e-15, 1e-3, 1e10]),
)
def test_a_tree_of_added_up_groups_is_exact_up_to_rounding(
    count: int, seed: int, groups: list[int], above: list[int], codec: str, size: float
) -> None:
    """InnerSlots, and relays of relays, each of which sends one sum."""
    all_sent = sent(count, seed, codec, size)
    leaves = [all_sent.reduced(lo, hi).added_up() for lo, hi in cuts(count, groups)]
    trunks = [combine(leaves[lo:hi]).added_up() for lo, hi in cuts(len(leaves), above)]
    merged = finish(combine(trunks), MERGES)
    expected = reference.merged_gradient(all_sent.decoded(), all_sent.weights, SLICES, MERGES)
    close(merged.values(), expected, all_sent.decoded())
    assert merged.norm == pytest.approx(float(np.linalg.norm(expected)), rel=1e-5)


@pytest.mark.parametrize("codec", ["int4", "bf16", "fp32"])
def test_single_contributions_and_groups_meet_in_one_merge(codec: str) -> None:
    all_sent = sent(6, 2, "int4")
    other = Sent(all_sent.deltas, all_sent.weights, codec)
    parts = [all_sent.reduced(0, 2), all_sent.reduced(2, 4).added_up(), other.reduced(4, 6)]
    merged = finish(combine(parts), MERGES)
    decoded = [*all_sent.decoded()[:4], *other.decoded()[4:]]
    close(merged.values(), reference.merged_gradient(decoded, all_sent.weights, SLICES, MERGES), decoded)


def test_contributions_in_different_codecs_are_merged_as_each_came() -> None:
    """A round of learners behind different links: nothing is rounded on the way to the sum but by each codec itself."""
    names = ["int4", "topk:3%", "fp32", "int2", "topk:10%:int4", "bf16", "int8"]
    all_sent = sent(len(names), 5)
    codecs = [get_codec(name) for name in names]
    payloads = [codec.encode(delta) for codec, delta in zip(codecs, all_sent.deltas, strict=True)]
    decoded = [c.decode(p, d.size) for c, p, d in zip(codecs, payloads, all_sent.deltas, strict=True)]
    norms = [c.inspect(p, payload_size(SLICES), SLICES)[1] for c, p in zip(codecs, payloads, strict=True)]
    merged = finish(reduce(payloads, codecs, all_sent.weights, norms, SLICES), MERGES)
    same = Sent(decoded, all_sent.weights, "fp32")
    expected = finish(same.reduced(0, len(names)), MERGES).coefficients
    np.testing.assert_allclose(merged.coefficients, expected, rtol=1e-6)
    close(merged.values(), reference.merged_gradient(decoded, all_sent.weights, SLICES, MERGES), decoded)


def test_the_same_tree_has_the_same_bits_for_any_number_of_threads() -> None:
    seen, before = [], kernels.threads()
    try:
        for threads in (1, 3):
            kernels.set_threads(threads)
            all_sent = sent(6, 3, "int4")
            parts = [all_sent.reduced(lo, lo + 2).added_up() for lo in (0, 2, 4)]
            seen.append(finish(combine(parts), MERGES).values().tobytes())
    finally:
        kernels.set_threads(before)
    assert seen[0] == seen[1]


def test_an_added_up_group_weighs_as_much_as_its_members() -> None:
    all_sent = sent(5, 4)
    group = all_sent.reduced(0, 5).added_up()
    assert group.weights.tolist() == [pytest.approx(sum(all_sent.weights))]
    assert len(group.columns) == 2 and group.directed[3, 0] < 1.0 == group.directed[0, 0]


def test_parts_that_do_not_belong_together_are_refused() -> None:
    part = sent(2, 0).reduced(0, 2)
    payload = get_codec("fp32").encode(np.ones(BLOCK, np.float32))
    other = reduce([payload], "fp32", [1.0], [np.array([16.0])], np.array([0, 1]))
    with pytest.raises(PayloadError, match="different fragments or layouts"):
        combine([part, other])
    with pytest.raises(PayloadError, match="some were added up"):
        corrected(part.added_up(), np.ones(9 * BLOCK, np.float32))


class PlainNesterov:
    """The built-in optimizer under another name: the compiled merge does not know it."""

    init, update = NESTEROV.init, NESTEROV.update


@each_codec
@pytest.mark.parametrize("down", ["fp32", "int4", "int2"])
@pytest.mark.parametrize(
    "how", [{}, {"correction": "heloco"}, {"restart": True}, {"share": 0.4}, {"feedback": False}], ids=str
)
def test_the_plain_way_gives_the_bits_of_the_fused_one(
    up: str, down: str, how: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OUTERS._entries, "plain", PlainNesterov())
    ways = {name: Fragment(9, up, down, slices=SLICES.tolist(), modes=MERGES) for name in ("nesterov", "plain")}
    results = {}
    for name, fragment in ways.items():
        fragment.residual = None if "feedback" in how else fragment.residual
        first = fragment.merge(sent(3, 1).deltas, outer=name, **how)
        results[name] = fragment.merge(sent(3, 2).deltas, previous=first.sample, outer=name, **how)
    one, other = results.values()
    assert one.update.tobytes() == other.update.tobytes() and one.gradient_norm == other.gradient_norm
    assert ways["nesterov"].bits() == ways["plain"].bits()
    assert one.sample.values.tobytes() == other.sample.values.tobytes()
    assert other.rho == pytest.approx(one.rho, rel=1e-9) and other.sample.norm == pytest.approx(one.sample.norm)


@pytest.mark.parametrize("seed", range(4))
def test_a_condensed_part_merges_as_its_members_do(seed: int) -> None:
    """One column in fp32 stands for a site's contributions, beside others' that came alone."""
    every = sent(5, seed)
    flat = finish(every.reduced(0, 5), MERGES).values()
    part, left = every.reduced(0, 3).condensed(MERGES, get_codec("fp32"), None)
    merged = finish(combine([every.reduced(3, 5), part]), MERGES).values()
    assert left is None and len(part.columns) == 1
    assert np.linalg.norm(merged - flat) < 1e-6 * np.linalg.norm(flat)


def test_what_a_codec_loses_of_a_condensed_part_is_in_the_next() -> None:
    """The same contributions again and again: the mean of what is sent comes to what was meant."""
    every = sent(3, 1)
    meant = finish(every.reduced(0, 3), [MEAN] * len(MERGES)).values()
    residual, total, far = None, np.zeros_like(meant), []
    for count in range(1, 9):
        part, residual = every.reduced(0, 3).condensed([MEAN] * len(MERGES), get_codec("int4"), residual)
        total += finish(part, [MEAN] * len(MERGES)).values()
        far.append(float(np.linalg.norm(total / count - meant) / np.linalg.norm(meant)))
    assert far[-1] < 0.3 * far[0]
