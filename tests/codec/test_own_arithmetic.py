"""A codec, a merge, an outer optimizer and a pacing of a user's own: one small file each, and a registration."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
from toy_codec import SPARSE
from toy_merge import HALF_MEAN
from toy_outer import ADAM
from toy_pacing import PATIENT
from toys import OWN, forgotten_after, install, register

from atoll.codec import get_codec, get_merge, get_outer
from atoll.core.config import SyncConfig
from atoll.core.layout import build_layout
from atoll.core.messages import TensorSpec
from atoll.core.pacing import PACING
from atoll.errors import ConfigError, PayloadError
from atoll.instruments.sim.drawing import draw
from atoll.instruments.sim.run import run_scenario
from atoll.plugins import load_entry_points
from atoll.syncer.state import ModelState

SEED = 2
"""A storm with arrays: kills of learners and of the syncer, bad links, bad values."""


registered = pytest.fixture(register)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("names", [("codec_up", "codec_down"), ("merge", "outer"), ("pacing",)], ids=" ".join)
def test_a_storm_with_it_breaks_no_invariant(names: tuple[str, ...]) -> None:
    drawn = draw(SEED)
    assert drawn.arrays and any(fault.target == "syncer" for fault in drawn.faults)
    own = {name: OWN[name] for name in names}
    report = run_scenario(replace(drawn, config=replace(drawn.config, correction="none", **own)))
    assert not report.violations and report.final != as_drawn()


@cache
def as_drawn() -> object:
    return run_scenario(draw(SEED)).final


@pytest.mark.usefixtures("registered")
def test_what_it_keeps_is_committed_and_comes_back() -> None:
    layout = build_layout((TensorSpec("w", (300,), "float32"),), 1)
    config = SyncConfig(fragments=1, partial="full", **OWN)
    states = [ModelState(layout, config) for _ in range(2)]
    states[0].put_seed(0, np.ones(512, np.float32).view(np.uint8))
    states[0].commit_seed()
    assert list(states[0].durable(0)) == ["theta", "first", "second", "residual"]
    step(states[0], 1)
    arrays = states[0].fragments[0]
    states[1].restore({0: (1, arrays.checksum, {n: a.copy() for n, a in states[0].durable(0).items()})})
    for state in states:
        step(state, 2)
    one, other = ({n: a.tobytes() for n, a in state.durable(0).items()} for state in states)
    assert one == other and arrays.version == 2


@pytest.mark.usefixtures("registered")
def test_another_optimizer_takes_over_what_it_can_use_and_begins_the_rest() -> None:
    layout = build_layout((TensorSpec("w", (300,), "float32"),), 1)
    before = ModelState(layout, SyncConfig(fragments=1))
    before.put_seed(0, np.ones(512, np.float32).view(np.uint8))
    before.commit_seed()
    after = ModelState(layout, SyncConfig(fragments=1, outer="toy-adam"))
    after.restore({0: (0, before.fragments[0].checksum, before.durable(0))})
    fresh = get_outer("toy-adam").init(512)
    assert after.fragments[0].outer.keys() == fresh.keys()
    assert all(np.array_equal(after.fragments[0].outer[name], array) for name, array in fresh.items())
    with pytest.raises(ConfigError, match="outer toy-adam keeps none"):
        ModelState(layout, SyncConfig(fragments=1, outer="toy-adam", correction="heloco"))


def step(state: ModelState, seed: int) -> None:
    delta = np.random.default_rng(seed).standard_normal(512).astype(np.float32)
    delta[300:] = 0.0
    payload, _ = get_codec(state.config.codec_up).encode_delta(delta, None, None)
    finite, held = state.inspect(0, payload)
    assert finite and state.merge(0, [held], [1.0]).finite


@pytest.mark.parametrize(
    "payload",
    [bytes(3), bytes(16), np.array([600, 0], "<u4").tobytes(), np.zeros(8 * 513, np.uint8).tobytes()],
    ids=["torn", "twice the same", "out of range", "too long"],
)
def test_bytes_that_are_no_payload_are_refused(payload: bytes) -> None:
    with pytest.raises(PayloadError, match="toy-sparse"):
        SPARSE.inspect(payload, 512, np.array([0, 2]))
    with pytest.raises(PayloadError, match="toy-sparse"):
        SPARSE.decode_add(payload, np.zeros(512, np.float32))


def test_values_that_are_not_finite_are_seen_by_both_sides() -> None:
    values = np.ones(512, np.float32)
    payload = SPARSE.encode_delta(values, None, None)[0].copy()
    payload[-4:].view(np.float32)[:] = np.nan
    assert SPARSE.inspect(payload, 512, np.array([0, 2]))[0] is False
    values[3] = np.inf
    with pytest.raises(PayloadError, match="not finite"):
        SPARSE.encode_delta(values, None, None)


def test_what_encoding_loses_is_in_the_residual() -> None:
    dice = np.random.default_rng(0)
    snapshot, base, residual = (dice.standard_normal(512).astype(np.float32) for _ in range(3))
    payload, rest = SPARSE.encode_delta(snapshot, base, residual)
    sent = np.zeros(512, np.float32)
    SPARSE.decode_add(payload, sent)
    assert rest is not None and np.array_equal(sent + rest, snapshot - base + residual)
    assert payload.size < SPARSE.size_max(512) and 0 < np.count_nonzero(sent) < 512
    assert SPARSE.encode_delta(snapshot, base, residual, feedback=False)[1] is None


def test_packages_offer_theirs_by_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten_after(monkeypatch)
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert {entry.name for entry in entry_points(group="atoll.codecs")} == {"toy-sparse"}
    load_entry_points.cache_clear()
    load_entry_points()
    config = SyncConfig(**OWN)
    assert get_codec(config.codec_up) is SPARSE and get_merge(config.merge) is HALF_MEAN
    assert get_outer(config.outer) is ADAM and PACING.get(config.pacing) is PATIENT
    load_entry_points.cache_clear()  # for whoever comes next


def test_a_name_that_is_not_registered_here_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="register it in every process of the run"):
        SyncConfig(codec_up="toy-sparse")
