"""Copies of fragments on a device: the same bits as on the host, whoever computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.codec import get_codec
from atoll.core import SyncConfig
from atoll.errors import PayloadError
from atoll.learner.arithmetic import F32, HostArithmetic
from atoll.learner.torch_arithmetic import CHECK_EVERY, TorchArithmetic, fits
from atoll.learner.torch_codec import DEVICE_CODECS

BLOCKS = 9
N = 256 * BLOCKS

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
every_codec = pytest.mark.parametrize("codec", [*sorted(DEVICE_CODECS), "int2", "topk:3%", "topk:10%", "topk:3%:int4"])


def values(seed: int, size: float = 1.0) -> F32:
    """Blocks of very different size, one of zeros, one of subnormals, ties for the largest, negative zeros."""
    dice = np.random.default_rng(seed)
    x = dice.standard_normal(N).astype(np.float32)
    x *= np.float32(size) * (10.0 ** dice.integers(-6, 7, BLOCKS)).astype(np.float32).repeat(256)
    x[:256] = 0.0
    x[100:110] = -0.0
    x[256:512] = dice.standard_normal(256).astype(np.float32) * np.float32(1e-41)
    x[512:768] = np.float32(3.0) * np.where(dice.random(256) < 0.5, 1, -1).astype(np.float32)
    return x


def there(array: F32 | None, device: str) -> Any:
    return None if array is None else torch.from_numpy(array.copy()).to(device)


def same(ours: Any, theirs: F32 | None) -> bool:
    """To the bit, the sign of zero included."""
    return theirs is not None and ours.cpu().numpy().tobytes() == theirs.tobytes()


def pair(device: str) -> tuple[TorchArithmetic, HostArithmetic]:
    return TorchArithmetic(torch.device(device), [[]]), HostArithmetic()


@on_devices
@every_codec
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_contribution_has_the_bits_of_the_hosts(codec: str, device: str, with_residual: bool) -> None:
    ours, hosts = pair(device)
    after, before, residual = values(1), values(2), values(3, 0.1) if with_residual else None
    payload, left = ours.encoded(
        codec, there(after, device), there(before, device), there(residual, device), feedback=True
    )
    expected, expected_left = hosts.encoded(codec, after, before, residual, feedback=True)
    assert payload.tobytes() == expected.tobytes()
    assert (left is None and expected_left is None) or same(left, expected_left)


@on_devices
@every_codec
def test_an_update_leads_to_the_bits_of_the_hosts(codec: str, device: str) -> None:
    ours, hosts = pair(device)
    theta = values(4)
    payload = get_codec(codec).encode_delta(values(5), None, None)[0]
    shifted = np.empty(payload.size + 1, np.uint8)[1:]  # as a network buffer: it starts anywhere
    shifted[:] = payload
    made = ours.updated(there(theta, device), codec, shifted)
    assert same(made, hosts.updated(theta, codec, payload))
    with pytest.raises(PayloadError, match="expected"):
        ours.updated(there(theta, device), codec, payload[:-1])


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1024, max_size=1024))
def test_any_finite_block_is_encoded_as_the_host_encodes_it(bits: bytes) -> None:
    x = np.frombuffer(bits, np.float32).copy()
    x[~np.isfinite(x)] = 0.0
    for codec in ("int4", "int8", "bf16", "int2", "topk:3%", "topk:1%:int4"):
        payload, left = TorchArithmetic(torch.device("cpu"), [[]]).encoded(
            codec, there(x, "cpu"), torch.zeros(256), None, feedback=True
        )
        expected, expected_left = HostArithmetic().encoded(codec, x, np.zeros(256, np.float32), None, feedback=True)
        assert payload.tobytes() == expected.tobytes(), codec
        assert same(left, expected_left), codec


@on_devices
@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_never_encoded(codec: str, device: str, bad: float) -> None:
    x = values(6)
    x[700] = bad
    with pytest.raises(PayloadError, match="not finite"):
        pair(device)[0].encoded(codec, there(x, device), there(values(7), device), None, feedback=True)


@on_devices
@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_an_adopt_adds_has_the_bits_of_the_hosts(device: str, count: int) -> None:
    ours, hosts = pair(device)
    theta = values(16)
    new, old, moves = values(8), values(9), [(values(10), values(11)), (values(12), values(13))][:count]
    made = ours.rebased(
        there(new, device), there(old, device), [(there(a, device), there(b, device)) for a, b in moves]
    )
    assert same(made, hosts.rebased(new, old, moves))
    made = ours.moved(there(new, device), there(old, device), there(theta, device))
    assert same(made, hosts.moved(new, old, theta))


@on_devices
def test_the_base_of_bf16_parameters_is_rounded_and_theta_stays(device: str) -> None:
    arithmetic = TorchArithmetic(torch.device(device), [[(256, 512, torch.bfloat16)]])
    theta = values(14)
    held = there(theta, device)
    base = arithmetic.on_host(arithmetic.kept(0, held))
    rounded = torch.from_numpy(theta).to(torch.bfloat16).float().numpy()
    assert np.array_equal(base[256:768], rounded[256:768])
    assert np.array_equal(np.delete(base, slice(256, 768)), np.delete(theta, slice(256, 768)))
    assert same(held, theta)


@on_devices
def test_one_version_in_sixteen_is_compared_and_so_is_one_without_a_checksum(device: str) -> None:
    arithmetic, theta = pair(device)[0], values(15)
    true = xxhash.xxh3_64_intdigest(theta.data)
    assert arithmetic.checksum(there(theta, device), CHECK_EVERY, 123) == true
    assert arithmetic.checksum(there(theta, device), CHECK_EVERY + 1, 0) == true
    assert arithmetic.checksum(there(theta, device), CHECK_EVERY + 1, 123) == 123


def test_copies_stay_on_the_host_where_there_is_no_gpu() -> None:
    assert not fits(SyncConfig(), torch.device("cpu"), 1000)


@pytest.mark.parametrize("codec", ["topk:3%", "int2", "lowrank"])
def test_a_codec_that_the_device_does_not_compute_goes_over_the_host(codec: str) -> None:
    """The syncer may ask for any (`adaptive`), whatever the run began with."""
    device = torch.device("cpu")
    after, before, residual = values(1), values(2), values(3)
    ours = TorchArithmetic(device, [[]])
    payload, left = ours.encoded(
        codec, there(after, device), there(before, device), there(residual, device), feedback=True
    )
    expected, expected_left = HostArithmetic().encoded(codec, after, before, residual, feedback=True)
    assert payload.tobytes() == expected.tobytes()
    assert left is not None and expected_left is not None and same(left, expected_left)
