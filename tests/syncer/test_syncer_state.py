"""The syncer's arrays under the settings of the outer step: feedback, momentum restarts, schedule, correction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll.codec import get_codec
from atoll.core.config import SyncConfig
from atoll.core.layout import build_layout
from atoll.core.messages import TensorSpec
from atoll.syncer.state import InspectedPayload, ModelState

TENSORS = (TensorSpec("w", (10, 100), "float32", "rda"), TensorSpec("e", (700,), "float32", "mean"))

WEIGHTS = (0.25, 0.75)


def started(**changes: Any) -> ModelState:
    config = SyncConfig(fragments=1, **changes)
    state = ModelState(build_layout(TENSORS, 1), config)
    size = state.layout.fragments[0].size
    state.put_seed(0, np.random.default_rng(0).standard_normal(size).astype(np.float32).view(np.uint8))
    state.commit_seed()
    return state


def contributions(state: ModelState, seed: int, count: int = 2) -> list[InspectedPayload]:
    rng, size = np.random.default_rng(seed), state.layout.fragments[0].size
    codec = get_codec(state.config.codec_up)
    common = rng.standard_normal(size)
    payloads = [codec.encode((0.01 * (common + rng.standard_normal(size))).astype(np.float32)) for _ in range(count)]
    return [state.inspect(0, payload)[1] for payload in payloads]


def run(state: ModelState, merges: int, weights: tuple[float, ...] = WEIGHTS) -> list[np.ndarray]:
    """The momentum after each merge."""
    momentum = []
    for seed in range(merges):
        assert state.merge(0, contributions(state, seed, len(weights)), weights).finite
        momentum.append(state.fragments[0].outer["momentum"].copy())
    return momentum


def bits(state: ModelState) -> bytes:
    return b"".join(array.tobytes() for array in state.durable(0).values())


@pytest.mark.parametrize("correction", ["none", "heloco"])
def test_momentum_starts_anew_every_so_many_versions(correction: str) -> None:
    state = started(codec_up="fp32", codec_down="fp32", momentum_restart=3, correction=correction)
    momentum = run(state, 8)
    for version in range(2, 9):
        state = started(codec_up="fp32", codec_down="fp32")
        state.merge(0, contributions(state, version - 1), WEIGHTS)
        fresh = state.fragments[0].outer["momentum"]  # of a merge that has nothing before it
        assert np.array_equal(momentum[version - 1], fresh) == (version in (4, 7)), version


def test_restarts_follow_from_the_version_alone() -> None:
    """A syncer that comes back in the middle does what the one before it would have done."""
    through = started(momentum_restart=4, correction="heloco", feedback_down=False)
    run(through, 9)
    first = started(momentum_restart=4, correction="heloco", feedback_down=False)
    for seed in range(9):
        arrays = first.fragments[0]
        named = {name: array.copy() for name, array in first.durable(0).items()}
        back = ModelState(first.layout, first.config)
        back.restore({0: (arrays.version, arrays.checksum, named)})
        assert back.merge(0, contributions(back, seed), WEIGHTS).finite
        first = back
    assert bits(first) == bits(through)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "int2"])
def test_without_feedback_there_is_no_residual_in_memory_or_on_disk(codec: str) -> None:
    state = started(codec_down=codec, feedback_down=False)
    run(state, 2)
    assert state.fragments[0].residual is None and state.durable(0).keys() == {"theta", "momentum"}
    assert started(codec_down=codec).durable(0).keys() == {"theta", "momentum", "residual"}
    back = ModelState(state.layout, state.config)
    back.restore({0: (2, 0, {**state.durable(0), "residual": np.ones_like(state.fragments[0].theta)})})
    assert back.fragments[0].residual is None  # what a run with feedback left is dropped


def test_feedback_brings_updates_closer_to_the_steps_that_were_meant() -> None:
    """The sum of what was published against that of a downlink that loses nothing."""
    thetas = {}
    for name, changes in {
        "exact": {"codec_down": "fp32"},
        "fed": {"codec_down": "int2"},
        "unfed": {"codec_down": "int2", "feedback_down": False},
    }.items():
        state = started(codec_up="fp32", outer_momentum=0.0, **changes)
        run(state, 30)
        thetas[name] = state.fragments[0].theta
    behind = {name: float(np.linalg.norm(theta - thetas["exact"])) for name, theta in thetas.items()}
    assert 0.0 < behind["fed"] < 0.5 * behind["unfed"]


@pytest.mark.parametrize("settings", [{}, {"partial": "full", "outer_schedule": "cosine", "tokens_budget": 100}])
def test_the_sum_of_the_weights_is_how_much_of_the_gradient_counts(settings: dict[str, Any]) -> None:
    exact = {"codec_up": "fp32", "codec_down": "fp32", "outer_lr": 0.7}
    shared, smaller = started(**exact, **settings), started(**{**exact, "outer_lr": 0.7 * 0.375}, partial="full")
    run(shared, 3, (0.125, 0.25))
    run(smaller, 3, (1.0, 2.0))
    for one, other in zip(shared.fragments, smaller.fragments, strict=True):
        np.testing.assert_allclose(one.theta, other.theta, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(one.outer["momentum"], 0.375 * other.outer["momentum"], rtol=1e-5, atol=1e-7)


def test_everybody_there_is_a_whole_step_to_the_bit() -> None:
    scaled, full = started(), started(partial="full")
    run(scaled, 3, (0.1, 0.2, 0.7))  # add up to 0.9999999999999999
    run(full, 3, (0.1, 0.2, 0.7))
    assert bits(scaled) == bits(full)


def test_with_whole_steps_only_the_ratio_of_the_weights_matters() -> None:
    one, other = started(partial="full"), started(partial="full")
    run(one, 2, (1.0, 2.0))
    run(other, 2, (0.25, 0.5))
    assert bits(one) == bits(other)


def test_the_correction_reaches_the_merge() -> None:
    plain, corrected = started(), started(correction="heloco")
    first = run(plain, 1), run(corrected, 1)
    assert first[0][0].tobytes() == first[1][0].tobytes()  # there is no momentum yet to go by
    run(plain, 3)
    run(corrected, 3)
    assert bits(plain) != bits(corrected)


@pytest.mark.parametrize("codec", ["int4", "int2"])
def test_padding_stays_zero(codec: str) -> None:
    state = started(codec_up=codec, codec_down=codec)
    layout, size = state.layout, state.layout.fragments[0].size
    mask = np.zeros(size, bool)
    for piece in layout.fragments[0].slices:
        mask[piece.offset : piece.offset + piece.size] = True
    assert not mask.all()
    state.fragments[0].theta[~mask] = 0.0
    for seed in range(5):
        delta = np.random.default_rng(seed).standard_normal(size).astype(np.float32) * mask
        held = [state.inspect(0, get_codec(codec).encode(delta))[1]]
        assert state.merge(0, held, (1.0,)).finite
    assert not state.fragments[0].theta[~mask].any()


def test_whoever_looks_on_sees_all_fragments_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed is committed on a worker thread while the status of a shard is asked for."""
    state = ModelState(build_layout(TENSORS, 2), SyncConfig(fragments=2))
    for fragment in state.layout.fragments:
        state.put_seed(fragment.index, np.zeros(fragment.size, np.float32).view(np.uint8))
    seen: list[int] = []
    slices = state._slices
    monkeypatch.setattr(state, "_slices", _Watched(slices, lambda: seen.append(len(state.fragments))))
    state.commit_seed()
    assert seen == [0, 0] and len(state.fragments) == 2


class _Watched(list[Any]):
    def __init__(self, items: list[Any], look: Any) -> None:
        super().__init__(items)
        self._look = look

    def __getitem__(self, index: Any) -> Any:
        self._look()
        return super().__getitem__(index)
