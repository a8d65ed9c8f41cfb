"""A learner that a chaos plan has poisoned: what it sends, and that nothing is wrong without the file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from vaults import made

from atoll.codec import get_codec
from atoll.core.config import CODECS
from atoll.instruments.chaos.poison import HUGE, Poison
from atoll.learner import F32

ROUNDED = dict.fromkeys(CODECS.names(), 0.05) | {"int2": 0.1, "topk": 0.65}
"""How much of a norm or a direction the rounding of a codec may cost: two bits lose 12% of the squares of normal
values, and so 6% of their norm; the largest 2% of the values have 14% of the squares."""


def sent(tmp_path: Path, codec: str, variant: str) -> tuple[np.ndarray, F32]:
    vault, sending, delta = made(codec)
    if variant:
        (tmp_path / "poison").write_text(variant + "\n")
    payload = Poison(tmp_path / "poison").encode(vault, sending)
    assert sending.payload is payload
    assert np.array_equal((sending.snapshot.values() - sending.origin), sending.snapshot.values() - sending.origin)
    return payload, delta


def inspect(codec: str, payload: np.ndarray, size: int) -> tuple[bool, float]:
    finite, norms = get_codec(codec).inspect(payload, size, np.array([0, -(-size // 256)]))
    return finite, float(np.sqrt((norms**2).sum()))


@pytest.mark.parametrize("codec", CODECS.names())
def test_a_nan_is_in_the_bytes_for_the_syncer_to_find(tmp_path: Path, codec: str) -> None:
    payload, delta = sent(tmp_path, codec, "nan")
    finite, _ = inspect(codec, payload, delta.size)
    assert not finite


@pytest.mark.parametrize("codec", CODECS.names())
def test_a_huge_contribution_is_a_thousand_times_as_large(tmp_path: Path, codec: str) -> None:
    payload, delta = sent(tmp_path, codec, "huge")
    finite, norm = inspect(codec, payload, delta.size)
    assert finite
    assert norm == pytest.approx(HUGE * float(np.linalg.norm(delta)), rel=ROUNDED[codec])


@pytest.mark.parametrize("codec", CODECS.names())
def test_a_flipped_contribution_points_the_other_way(tmp_path: Path, codec: str) -> None:
    payload, delta = sent(tmp_path, codec, "flip")
    decoded = get_codec(codec).decode(payload, delta.size)
    cosine = float(decoded @ delta / np.linalg.norm(decoded) / np.linalg.norm(delta))
    assert cosine < ROUNDED[codec] - 1.0
    assert float(np.linalg.norm(decoded)) == pytest.approx(float(np.linalg.norm(delta)), rel=ROUNDED[codec])


@pytest.mark.parametrize(("variant", "factor"), [("flip8", -8.0), ("long", 8.0)])
def test_a_liar_may_be_as_long_as_the_guard_lets_pass(tmp_path: Path, variant: str, factor: float) -> None:
    payload, delta = sent(tmp_path, "fp32", variant)
    assert get_codec("fp32").decode(payload, delta.size) == pytest.approx(factor * delta, abs=1e-5)


def test_noise_is_as_long_as_what_it_replaces_and_the_same_again(tmp_path: Path) -> None:
    payload, delta = sent(tmp_path, "fp32", "noise")
    decoded = get_codec("fp32").decode(payload, delta.size)
    assert np.linalg.norm(decoded) == pytest.approx(np.linalg.norm(delta), rel=1e-4)
    assert abs(float(decoded @ delta)) < 0.2 * float(delta @ delta)
    assert np.array_equal(payload, sent(tmp_path, "fp32", "noise")[0])


@pytest.mark.parametrize("text", ["", "cyanide"])
def test_without_a_known_variant_nothing_is_changed(tmp_path: Path, text: str) -> None:
    payload, _ = sent(tmp_path, "int4", text)
    vault, sending, _ = made("int4")
    assert np.array_equal(payload, vault.encode(sending))


LEARNS = """
import os
from atoll.instruments.chaos.poison import Poison
from atoll.learner import fault_hooks
from atoll.learner.environment import find_place
from atoll.learner.vault import Vault
find_place(address="127.0.0.1:1", learner="a", token=None, tls_ca=None, run_folder=None)
assert (fault_hooks._encode is Vault.encode) != ("ATOLL_PRELOAD" in os.environ)
"""


@pytest.mark.parametrize("more", [{}, {"ATOLL_PRELOAD": "atoll.instruments.chaos.inside"}])
def test_only_a_process_that_loads_it_first_is_poisoned(tmp_path: Path, more: dict[str, str]) -> None:
    env = {**os.environ, "ATOLL_POISON_FILE": str(tmp_path / "poison"), **more}
    subprocess.run([sys.executable, "-c", LEARNS], env=env, check=True, timeout=60)
