"""Every codec against the plain reference, and the promises of the payload contract."""

from __future__ import annotations

import itertools
import subprocess
import sys

import codec_reference as reference
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll import kernels
from atoll.codec import BLOCK, get_codec
from atoll.core.config import CODECS
from atoll.errors import ConfigError, PayloadError

LENGTHS = [0, 1, 2, 127, 128, 129, 255, 256, 257, 511, 512, 1000, 2049]
SIZES = [0.0, 1e-45, 1e-41, 1e-38, 2e-37, 1e-20, 1e-3, 1.0, 1e10, 1e38, 3.4e38]

arrays = st.builds(
    lambda n, size, seed, sparse: make(n, size, seed, sparse),
    st.sampled_from(LENGTHS),
    st.sampled_from(SIZES),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
NAMES = (*CODECS.names(), "topk:10%", "topk:3%:int4")
each_codec = pytest.mark.parametrize("name", NAMES)


def make(n: int, size: float, seed: int, sparse: bool = False) -> np.ndarray:
    """n values of magnitude up to `size`; sparse ones have blocks of zeros and outliers."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, n)
    if sparse:
        x *= rng.random(n) ** 8 * (rng.random(n) < 0.3)
    return (x * size).astype(np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@each_codec
@settings(deadline=None, max_examples=60)
@given(x=arrays)
@example(x=np.array([3.4028235e38] * 256 + [-3.4028235e38], np.float32))
@example(x=np.array([1.0, -1.0, 0.5, -0.0], np.float32))
@example(x=np.full(300, -1e-40, np.float32))
def test_payload_and_decode_are_those_of_the_reference(name: str, x: np.ndarray) -> None:
    codec = get_codec(name)
    payload = codec.encode(x)
    expected, decoded = reference.encode(name, x)
    assert payload.tobytes() == expected
    assert payload.size == codec.size_max(x.size)
    out = codec.decode(payload, x.size)
    assert np.array_equal(out, decoded)
    assert np.all(np.isfinite(out))


@each_codec
@settings(deadline=None, max_examples=60)
@given(x=arrays)
def test_error_is_within_the_bound_of_the_codec(name: str, x: np.ndarray) -> None:
    codec = get_codec(name)
    error = np.abs(codec.decode(codec.encode(x), x.size).astype(np.float64) - x)
    if name == "fp32":
        assert not error.any()
    elif name == "bf16":
        # Half a step of 8 bits; a whole one at the very top, where rounding up would be infinite.
        assert np.all(error <= np.abs(x) * 2.0**-8 + 1e-40)
    elif name == "int2" or name.startswith("topk"):
        # The fitted scale is never worse than sending nothing, block by block, and no value is missed by more than the
        # largest of its block.
        for start in range(0, x.size, BLOCK):
            part = x[start : start + BLOCK].astype(np.float64)
            assert (error[start : start + BLOCK] ** 2).sum() <= (part**2).sum() * 1.00001
            assert error[start : start + BLOCK].max() <= np.abs(part).max() * 1.00001
    else:
        steps = float(reference.STEPS["int4" if name == "lowrank" else name])
        for start in range(0, x.size, BLOCK):
            top = float(np.abs(x[start : start + BLOCK]).max())
            # Half a step, except a whole one at the end of the grid opposite to the largest value.
            bound = top / steps * 1.001 if top / steps >= np.finfo(np.float32).tiny else top
            assert error[start : start + BLOCK].max() <= bound


@each_codec
@settings(deadline=None, max_examples=40)
@given(snapshot=arrays, seed=st.integers(0, 1000), with_residual=st.booleans())
def test_encode_delta_is_subtract_add_encode_subtract(
    name: str, snapshot: np.ndarray, seed: int, with_residual: bool
) -> None:
    codec = get_codec(name)
    snapshot = np.clip(snapshot, -1e38, 1e38)
    base = make(snapshot.size, 1.0, seed)
    residual = make(snapshot.size, 1e-3, seed + 1) if with_residual else None
    kept = None if residual is None else residual.copy()
    payload, rest = codec.encode_delta(snapshot, base, residual)
    x = snapshot - base
    if residual is not None and name != "fp32":
        x = x + residual
    expected, decoded = reference.encode(name, x)
    assert payload.tobytes() == expected
    if name == "fp32":
        assert rest is None
    else:
        share = np.float32(0.95 if name.startswith("topk") else 1.0)
        assert rest is not None and np.array_equal(rest, (x - decoded) * share)
    if residual is not None and kept is not None:
        assert same_bits(residual, kept), "the residual may be replaced only after the merge"


@each_codec
@settings(deadline=None, max_examples=40)
@given(x=arrays, seed=st.integers(0, 1000))
def test_decode_add_is_decode_then_add(name: str, x: np.ndarray, seed: int) -> None:
    codec = get_codec(name)
    x = np.clip(x, -1e38, 1e38)
    target = make(x.size, 1.0, seed)
    payload = codec.encode(x)
    expected = target + codec.decode(payload, x.size)
    codec.decode_add(payload, target)
    assert same_bits(target, expected)


@each_codec
@settings(deadline=None, max_examples=40)
@given(x=arrays, cuts=st.lists(st.integers(0, 9), max_size=4))
def test_inspect_gives_the_norm_of_each_slice(name: str, x: np.ndarray, cuts: list[int]) -> None:
    codec = get_codec(name)
    blocks = -(-x.size // BLOCK)
    slices = np.array([0, *sorted(min(cut, blocks) for cut in cuts), blocks], np.int64)
    payload = codec.encode(x)
    finite, norms = codec.inspect(payload, x.size, slices)
    decoded = codec.decode(payload, x.size).astype(np.float64)
    assert finite
    expected = [np.linalg.norm(decoded[a * BLOCK : b * BLOCK]) for a, b in itertools.pairwise(slices)]
    np.testing.assert_allclose(norms, expected, rtol=1e-6)


@each_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 300, 599])
def test_values_that_are_not_finite_are_refused_by_both_sides(name: str, bad: float, where: int) -> None:
    codec = get_codec(name)
    x = make(600, 1.0, 0)
    good = codec.encode(x)
    x[where] = bad
    with pytest.raises(PayloadError, match="not finite"):
        codec.encode(x)
    with pytest.raises(PayloadError, match="not finite"):
        codec.encode_delta(x, np.zeros_like(x), None)
    # A hostile payload: non-finite elements, or a non-finite scale of the block.
    hostile = good.copy()
    if name in STORED:
        hostile.view(STORED[name])[where] = np.array(bad, np.float32).view(np.uint32) >> SHIFT[name]
    elif name.startswith("topk"):
        hostile[:6].view(np.uint16)[where // BLOCK] = np.array(bad, np.float32).view(np.uint32) >> 16
    else:
        hostile[:12].view(np.float32)[where // BLOCK] = bad
    assert codec.inspect(good, 600, np.array([0, 3]))[0]
    assert not codec.inspect(hostile, 600, np.array([0, 3]))[0]


STORED = {"fp32": np.uint32, "bf16": np.uint16}
SHIFT = {"fp32": 0, "bf16": 16}


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_a_finite_scale_that_would_decode_to_infinity_is_found(name: str) -> None:
    codec = get_codec(name)
    payload = codec.encode(make(512, 1.0, 0))
    payload[4:8].view(np.float32)[0] = 3e38
    assert not codec.inspect(payload, 512, np.array([0, 2]))[0]


def test_a_difference_that_overflows_is_not_finite() -> None:
    huge = np.full(300, 3e38, np.float32)
    with pytest.raises(PayloadError, match="not finite"):
        get_codec("int4").encode_delta(huge, -huge, None)


@each_codec
@pytest.mark.parametrize("change", [-1, 1, -20, 1000])
def test_truncated_and_oversized_payloads_are_refused_with_both_sizes(name: str, change: int) -> None:
    codec = get_codec(name)
    size = codec.size_max(700)
    wrong = bytes(size + change)
    for call in (
        lambda: codec.decode(wrong, 700),
        lambda: codec.decode_add(wrong, np.zeros(700, np.float32)),
        lambda: codec.inspect(wrong, 700, np.array([0, 3])),
    ):
        with pytest.raises(PayloadError, match=rf"{size + change} bytes, (expected|at most) {size} for 700 elements"):
            call()


@each_codec
def test_payloads_may_be_bytes_memoryviews_and_unaligned_read_only_views(name: str) -> None:
    codec = get_codec(name)
    x = make(777, 1.0, 3)
    payload = codec.encode(x)
    expected = codec.decode(payload, 777)
    raw = payload.tobytes()
    for offset in (0, 1, 2, 3, 5):
        view = memoryview(b"x" * offset + raw)[offset:]
        assert same_bits(codec.decode(view, 777), expected)
        assert same_bits(codec.decode(np.frombuffer(view, np.uint8), 777), expected)
    assert same_bits(codec.decode(raw, 777), expected)
    assert codec.decode(b"", 0).size == 0
    assert same_bits(codec.decode(bytearray(raw), 777), expected)
    assert same_bits(codec.decode(np.repeat(payload, 2)[::2], 777), expected)


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (np.zeros(4, np.float64), "flat float32"),
        (np.zeros((2, 2), np.float32), "flat float32"),
        (np.zeros(8, np.float32)[::2], "contiguous"),
        ([1.0, 2.0], "flat float32"),
    ],
)
def test_wrong_arrays_are_refused(array: np.ndarray, what: str) -> None:
    with pytest.raises(PayloadError, match=what):
        get_codec("int4").encode(array)


def test_wrong_lengths_and_read_only_targets_are_refused() -> None:
    codec, x = get_codec("int4"), np.zeros(300, np.float32)
    with pytest.raises(PayloadError, match="base has 299 elements, expected 300"):
        codec.encode_delta(x, x[:299], None)
    payload = codec.encode(x)
    x.flags.writeable = False
    with pytest.raises(PayloadError, match="read-only"):
        codec.decode_add(payload, x)
    with pytest.raises(PayloadError, match="slice_blocks"):
        codec.inspect(payload, 300, np.array([0, 3]))


def test_unknown_codec_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="fp32, bf16, int8, int4, int2"):
        get_codec("int3")


@pytest.mark.parametrize(("name", "behind"), [("bf16", 0.3), ("int8", 0.3), ("int4", 0.3), ("int2", 1.5)])
def test_error_feedback_delivers_the_true_sum(name: str, behind: float) -> None:
    """Sending the same delta again and again, what arrives in total stays within one rounding of what was sent."""
    codec = get_codec(name)
    delta, zero = make(1000, 1.0, 5, sparse=True), np.zeros(1000, np.float32)
    total, residual, rounds = np.zeros(1000, np.float64), None, 40
    for _ in range(rounds):
        payload, residual = codec.encode_delta(delta, zero, residual)
        total += codec.decode(payload, 1000)
    assert residual is not None
    # total + residual = rounds * delta, up to fp32 rounding of the residual itself.
    np.testing.assert_allclose(total + residual, rounds * delta.astype(np.float64), atol=1e-5)
    assert np.abs(total / rounds - delta).max() < behind / rounds


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "int2"])
def test_without_feedback_no_residual_is_added_or_kept(name: str) -> None:
    codec = get_codec(name)
    snapshot, base, residual = make(700, 1.0, 1), make(700, 0.5, 2), make(700, 0.1, 3)
    payload, rest = codec.encode_delta(snapshot, base, residual, feedback=False)
    assert rest is None
    assert payload.tobytes() == codec.encode(snapshot - base).tobytes()


@settings(deadline=None, max_examples=60)
@given(x=arrays, zeros=st.lists(st.integers(0, 2048), min_size=1, max_size=8))
def test_int2_keeps_zeros(x: np.ndarray, zeros: list[int]) -> None:
    """Padding, and rows of an embedding that no token touched, must not begin to wander."""
    x = x.copy()
    x[[z for z in zeros if z < x.size]] = 0.0
    out = get_codec("int2").decode(get_codec("int2").encode(x), x.size)
    assert not out[x == 0].any()


@pytest.mark.parametrize(
    ("draw", "share_lost"),
    [
        pytest.param(lambda rng, n: rng.standard_normal(n), 0.119, id="normal: the best uniform grid loses 0.1188"),
        pytest.param(lambda rng, n: rng.laplace(size=n), 0.197, id="Laplace: 0.1963"),
        pytest.param(lambda rng, n: rng.uniform(-1, 1, n), 0.066, id="uniform: 0.0625"),
    ],
)
def test_int2_fits_its_scale_to_the_values(draw: object, share_lost: float) -> None:
    """The error of the best grid of four equal steps, as the literature on quantisation has it, within a few percent,
    for any size of the values."""
    for size in (1e-25, 1.0, 1e25):
        x = (draw(np.random.default_rng(0), 400 * BLOCK) * size).astype(np.float32)  # type: ignore[operator]
        error = get_codec("int2").decode(get_codec("int2").encode(x), x.size).astype(np.float64) - x
        assert (error**2).sum() < share_lost * (x.astype(np.float64) ** 2).sum()


@each_codec
def test_bits_do_not_depend_on_the_number_of_threads(name: str) -> None:
    codec, before = get_codec(name), kernels.threads()
    n = 3 * 1024 * BLOCK + 77
    x, base, residual = make(n, 1e-2, 1), make(n, 1e-3, 2), make(n, 1e-4, 3)
    slices = np.array([0, 1, 1500, -(-n // BLOCK)])
    seen = []
    try:
        for count in (1, 2, 3):
            kernels.set_threads(count)
            payload, rest = codec.encode_delta(x, base, residual)
            target = base.copy()
            codec.decode_add(payload, target)
            norms = codec.inspect(payload, n, slices)[1]
            seen.append((payload.tobytes(), b"" if rest is None else rest.tobytes(), target.tobytes(), norms.tobytes()))
    finally:
        kernels.set_threads(before)
    assert seen[0] == seen[1] == seen[2]


def test_importing_the_room_does_not_import_numba() -> None:
    code = "import sys, atoll.codec, atoll.kernels; sys.exit('numba' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
