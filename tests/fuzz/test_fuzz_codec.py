"""No payload and no inner state, whatever its bytes, crashes a kernel, poisons a merge or breaks an optimizer."""

from __future__ import annotations

import numpy as np
import pytest
from fuzz_corpus import targets_of
from fuzz_engine import Target, run, soak_cases, soak_seed
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atoll.codec import get_codec
from atoll.core.config import CODECS

TARGETS = targets_of("codec")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.name}-{target.cases}")
def test_bytes_are_refused_or_harmless(target: Target) -> None:
    assert run(target, 0, target.cases) <= target.cases  # raises at the first case that is neither


@pytest.mark.soak
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_soak(target: Target) -> None:
    run(target, soak_seed(), soak_cases())


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(CODECS.names()),
    values=hnp.arrays(
        np.float32, st.integers(0, 600), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    ),
)
def test_whatever_can_be_encoded_is_called_finite_and_decodes_to_finite_values(name: str, values: np.ndarray) -> None:
    codec = get_codec(name)
    with np.errstate(all="ignore"):
        payload = codec.encode(values)
    finite, norms = codec.inspect(payload, values.size, np.array([0, -(-values.size // 256)], np.int64))
    assert finite and np.isfinite(norms).all()
    assert np.isfinite(codec.decode(payload, values.size)).all()
