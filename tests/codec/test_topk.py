"""The sparse codec: what its name says, which bytes are a payload, and that error feedback sends the rest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.codec import BLOCK, get_codec
from atoll.core.config import SyncConfig
from atoll.errors import ConfigError, PayloadError


@pytest.mark.parametrize(
    ("name", "bits"), [("topk", 0.281), ("topk:1%", 0.188), ("topk:3%", 0.375), ("topk:3%:int4", 0.4375)]
)
def test_bits_per_parameter(name: str, bits: float) -> None:
    assert 8 * get_codec(name).size_max(1 << 20) / (1 << 20) == pytest.approx(bits, abs=1e-3)


@pytest.mark.parametrize(
    "name", ["topk:", "topk:0%", "topk:26%", "topk:-2%", "topk:2", "topk:2%:int8", "topk:1e9%", "topk:nan%", "topk:2%:"]
)
def test_parameters_that_make_no_sense_are_refused_by_name(name: str) -> None:
    if name == "topk:":
        assert get_codec(name) is get_codec("topk")
        return
    with pytest.raises(ConfigError, match=f"'{name}' is no sparse codec: use topk:SHARE%"):
        SyncConfig(codec_up=name)


def test_a_misspelt_family_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'topk'"):
        SyncConfig(codec_up="topj:2%")


def test_the_largest_values_are_sent_and_nothing_else() -> None:
    x = np.random.default_rng(0).standard_normal(4 * BLOCK).astype(np.float32)
    codec = get_codec("topk:2%")
    sent = codec.decode(codec.encode(x), x.size).reshape(-1, BLOCK)
    for block, part in zip(x.reshape(-1, BLOCK), sent, strict=True):
        assert set(np.flatnonzero(part)) == set(np.argsort(-np.abs(block))[:5])
        chosen = part != 0
        assert np.abs(part[chosen] / block[chosen] - 1.0).max() < 0.35  # two magnitudes for five values


def test_what_is_zero_stays_zero() -> None:
    """Padding, and rows of an embedding that were not used."""
    x = np.zeros(3 * BLOCK, np.float32)
    x[[3, 300]] = 0.5, -2.0
    for name in ("topk:2%", "topk:2%:int4"):
        codec = get_codec(name)
        assert codec.decode(codec.encode(x), x.size).tolist() == x.tolist()


@settings(deadline=None, max_examples=50)
@given(kept=st.sampled_from(["2%", "10%"]), at=st.integers(0, 3), one=st.integers(0, 4), other=st.integers(0, 4))
def test_places_that_do_not_ascend_are_refused_everywhere(kept: str, at: int, one: int, other: int) -> None:
    codec = get_codec(f"topk:{kept}")
    payload = codec.encode(np.random.default_rng(at).standard_normal(4 * BLOCK).astype(np.float32))
    indices = payload[8:].reshape(4, -1)
    if one == other:
        indices[at, one] = indices[at, (one + 1) % 5]
    else:
        indices[at, [one, other]] = indices[at, [other, one]]
    for call in (
        lambda: codec.decode(payload, 4 * BLOCK),
        lambda: codec.decode_add(payload, np.zeros(4 * BLOCK, np.float32)),
        lambda: codec.inspect(payload, 4 * BLOCK, np.array([0, 4])),
        lambda: codec.accumulate([payload], np.ones((1, 1)), np.array([0, 4])),
    ):
        with pytest.raises(PayloadError, match="do not ascend"):
            call()


def test_error_feedback_sends_in_time_what_was_left_out() -> None:
    """The same delta again and again: what has arrived after some rounds points where it does."""
    codec, delta = get_codec("topk:3%"), np.random.default_rng(1).standard_normal(8 * BLOCK).astype(np.float32)
    residual, arrived, once = None, np.zeros_like(delta), 0.0
    for _ in range(60):
        payload, residual = codec.encode_delta(delta, None, residual)
        codec.decode_add(payload, arrived)
        cosine = float(arrived @ delta / np.linalg.norm(arrived) / np.linalg.norm(delta))
        once = once or cosine
    assert once < 0.5 and cosine > 0.85
