"""The simulator's numbers are those of production: the same settings give the same bits over real gRPC and in virtual
time, version by version, at the syncer and inside the learners."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster import WAIT_S, SyncerProcess, SyncerThread
from shards import sharded_syncer
from test_relay import RelayProcess
from torch import nn

from atoll.core.config import SyncConfig
from atoll.core.layout import Layout, build_layout
from atoll.instruments.check import Checker, Checkers
from atoll.instruments.check.facts import Committed
from atoll.instruments.sim.arrays import ArrayLearner, inner_step, target_of
from atoll.instruments.sim.run import world_of
from atoll.instruments.sim.scenario import LearnerSpec, Scenario
from atoll.instruments.sim.world import tensors_for
from atoll.learner import Learner

STEPS = 12
STEP_NS = 5_000_000_000
"""Long enough that everybody has joined before anybody's first step is over, as in the real run below."""
GLANCE_NS = 100_000_000
TOKENS = (5, 16, 3)
"""Of a step, by learner: different weights."""

Versions = dict[int, tuple[int, int]]
"""fragment -> version, checksum of Theta."""


def settings(learners: int, **changes: object) -> SyncConfig:
    return SyncConfig(
        **{
            "sync_every": 4,
            "fragments": 2,
            "overlap": 0,
            "quorum": "all",
            "learners_expected": learners,
            "grace_cap_steps": 0.0,
            "merge": "rda",
            "codec_up": "fp32",
            "codec_down": "fp32",
            **changes,
        }  # type: ignore[arg-type]
    )


class Recorder(Checker):
    """Keeps what was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[tuple[int, int], int] = {}

    def on_committed(self, fact: Committed) -> None:
        self.versions[fact.fragment, fact.version] = fact.checksum


# ---------------------------------------------------------------- in virtual time


class Simulated:
    def __init__(
        self, config: SyncConfig, learners: int, *, steps: int = STEPS, inline: bool = True, **fabric: int
    ) -> None:
        specs = tuple(LearnerSpec(step_ns=STEP_NS, tokens=TOKENS[index]) for index in range(learners))
        self.recorder = Recorder()
        world = world_of(
            Scenario(0, config, specs, inline=inline, **fabric),  # type: ignore[arg-type]
            checkers=Checkers([self.recorder]),
        )
        world.begin()
        for _ in range(2 * (steps + 1) * STEP_NS // GLANCE_NS):
            hosts = world.learners.values()
            if all(host.machine.steps == steps and not host.machine.must_wait for host in hosts):
                break
            world.clock.run(world.now_ns + GLANCE_NS)
        assert [host.machine.steps for host in world.learners.values()] == [steps] * learners
        assert world.syncer is not None
        self.final: Versions = {t.index: (t.version, t.checksum) for t in world.syncer.machine.book.tracks}
        self.parameters = [_flat(host.payloads, world.syncer.machine.layout) for host in world.learners.values()]
        world.close()


def _flat(payloads: object, layout: Layout | None) -> list[bytes]:
    """A simulated learner's own parameters, tensor by tensor."""
    assert isinstance(payloads, ArrayLearner) and layout is not None
    tensors = [np.zeros(spec.shape, np.float32) for spec in layout.tensors]
    for fragment in layout.fragments:
        for piece in fragment.slices:
            held = payloads.model.theta[fragment.index][piece.offset : piece.offset + piece.size]
            tensors[piece.tensor][piece.start : piece.stop] = held
    return [tensor.tobytes() for tensor in tensors]


# ---------------------------------------------------------------- on the wire


class Model(nn.Module):
    """The simulator's model, with its names and shapes; the parameters start at zero."""

    def __init__(self, fragments: int) -> None:
        super().__init__()
        self.specs = tensors_for(fragments)
        for spec in self.specs:
            self.register_parameter(spec.name, nn.Parameter(torch.zeros(spec.shape)))


class RealLearner:
    """A learner over real gRPC whose inner loop is the simulator's."""

    def __init__(self, address: str, index: int, fragments: int) -> None:
        self.model = Model(fragments)
        self.name, self.tokens = f"learner-{index}", TOKENS[index]
        modes = {spec.name: spec.merge for spec in self.model.specs}
        self.learner = Learner(self.model, address=address, learner_id=self.name, merge_modes=modes)
        layout = build_layout(self.model.specs, fragments)
        parameters = [parameter.detach().numpy() for parameter in self.model.parameters()]
        self.pieces = [
            (
                parameters[piece.tensor][piece.start : piece.stop],
                target_of(fragment.index, fragment.size, self.name)[piece.offset : piece.offset + piece.size],
            )
            for fragment in layout.fragments
            for piece in fragment.slices
        ]

    def train(self, step: int) -> None:
        for theta, target in self.pieces:
            inner_step(theta, target, step)
        self.learner.step(tokens=self.tokens)

    def parameters(self) -> list[bytes]:
        return [parameter.detach().numpy().tobytes() for parameter in self.model.parameters()]


class Real:
    """Everybody joins before anybody steps; after every step the syncer's versions are written down."""

    def __init__(self, config: SyncConfig, learners: int, *, steps: int = STEPS) -> None:
        self.syncer = SyncerThread(config)
        self.history: list[Versions] = []
        self.errors: list[BaseException] = []
        self.learners: list[RealLearner] = []
        try:
            for index in range(learners):
                self.learners.append(RealLearner(self.syncer.address, index, config.fragments))
                self.learners[-1].learner.start()
            self.barrier = threading.Barrier(learners, action=self._write_down, timeout=WAIT_S)
            threads = [threading.Thread(target=self._train, args=(each, steps)) for each in self.learners]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert not self.errors, self.errors
            self.parameters = [each.parameters() for each in self.learners]
        finally:
            for each in self.learners:
                each.learner.close(flush=False)
            self.syncer.stop()

    def _train(self, each: RealLearner, steps: int) -> None:
        try:
            for step in range(1, steps + 1):
                each.train(step)
                self.barrier.wait()
        except BaseException as error:
            self.errors.append(error)
            self.barrier.abort()

    def _write_down(self) -> None:
        tracks = self.syncer.ask(lambda shell: [(t.index, t.version, t.checksum) for t in shell.machine.book.tracks])
        self.history.append({index: (version, checksum) for index, version, checksum in tracks})


@pytest.mark.parametrize(
    ("learners", "changes"),
    [
        (2, {}),
        (3, {"codec_up": "int4", "codec_down": "int4"}),
        (2, {"codec_up": "int4", "codec_down": "int8", "adopt": "overwrite", "fragments": 3}),
        (3, {"codec_up": "bf16", "merge": "mean", "adopt": "mix:0.5", "fragments": 1, "weights": "tokens"}),
        (3, {"codec_up": "int4", "codec_down": "int4", "robust": "cosine"}),
        (3, {"codec_up": "int4", "codec_down": "int4", "robust": "trimmed", "merge": "mean"}),
    ],
    ids=["fp32", "int4", "overwrite", "mix", "robust", "trimmed"],
)
def test_a_simulated_run_is_the_real_run_bit_for_bit(learners: int, changes: dict[str, object]) -> None:
    config = settings(learners, **changes)
    real = Real(config, learners)
    simulated = Simulated(config, learners)
    assert len(real.history) == STEPS
    assert min(version for version, _ in real.history[-1].values()) >= STEPS // config.sync_every - 1
    for versions in real.history:
        for fragment, (version, checksum) in versions.items():
            assert simulated.recorder.versions[fragment, version] == checksum, (fragment, version)
    assert simulated.final == real.history[-1]
    assert simulated.parameters == real.parameters
    assert len({tuple(parameters) for parameters in real.parameters}) == learners, "everybody has learned the same"


def test_how_payloads_travel_changes_no_bit() -> None:
    config = settings(2, codec_up="int4", codec_down="int4")
    assert Simulated(config, 2).recorder.versions == Simulated(config, 2, inline=False).recorder.versions


# ---------------------------------------------------------------- shards and a relay


class RealFabric:
    """Learners over real gRPC, with real processes of a coordinator and its shards, or of a syncer and a relay."""

    def __init__(self, config: SyncConfig, addresses: Sequence[str]) -> None:
        self.errors: list[BaseException] = []
        learners = []
        try:
            for index, address in enumerate(addresses):
                learners.append(RealLearner(address, index, config.fragments))
                learners[-1].learner.start()
            self._barrier = threading.Barrier(len(learners), timeout=WAIT_S)
            threads = [threading.Thread(target=self._train, args=(each,)) for each in learners]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert not self.errors, self.errors
            self.parameters = [each.parameters() for each in learners]
        finally:
            for each in learners:
                each.learner.close(flush=False)

    def _train(self, each: RealLearner) -> None:
        try:
            for step in range(1, STEPS + 1):
                each.train(step)
                self._barrier.wait()
        except BaseException as error:
            self.errors.append(error)
            self._barrier.abort()


def _told(config: SyncConfig, learners: int) -> list[str]:
    """The same settings for `atoll syncer`."""
    told = {"fragments": config.fragments, "sync-every": config.sync_every, "overlap": 0, "quorum": "all"}
    told |= {"grace-cap": 0, "merge": config.merge, "codec-up": config.codec_up, "codec-down": config.codec_down}
    return [word for name, value in {**told, "learners": learners}.items() for word in (f"--{name}", str(value))]


def test_a_simulated_run_with_shards_is_the_real_one_and_the_one_without(tmp_path: Path) -> None:
    config = settings(2, codec_up="int4", codec_down="int4", fragments=3)
    simulated, alone = Simulated(config, 2, shards=2), Simulated(config, 2)
    assert simulated.recorder.versions == alone.recorder.versions and simulated.parameters == alone.parameters
    syncer, shards = sharded_syncer(tmp_path, 2, *_told(config, 2))
    try:
        real = RealFabric(config, [syncer.address] * 2)
    finally:
        for process in (syncer, *shards):
            process.kill()
    assert simulated.parameters == real.parameters


def test_a_simulated_run_with_a_relay_is_the_real_one_and_near_the_one_without(tmp_path: Path) -> None:
    config = settings(3)
    simulated, alone = Simulated(config, 3, relayed=2), Simulated(config, 3)
    assert simulated.recorder.versions.keys() == alone.recorder.versions.keys()
    assert 0.0 < _far(simulated.parameters, alone.parameters) < 1e-6
    syncer = SyncerProcess(tmp_path, *_told(config, 3))
    relay = RelayProcess(syncer.address, tmp_path / "relay.log")
    try:
        real = RealFabric(config, [relay.address, relay.address, syncer.address])
        assert relay.status()["merged_payloads"], relay.status()
    finally:
        relay.kill()
        syncer.kill()
    assert simulated.parameters == real.parameters


def _far(some: list[list[bytes]], others: list[list[bytes]]) -> float:
    """Relative to the second."""
    one, other = (
        np.concatenate([np.frombuffer(tensor, np.float32) for each in all_of for tensor in each]).astype(np.float64)
        for all_of in (some, others)
    )
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes the numbers changes the checksums, from the version on in which it first shows."""
    config = settings(2, codec_up="int4", codec_down="int4")
    versions = Simulated(config, 2).recorder.versions
    assert Simulated(settings(2, codec_up="int4", codec_down="int8"), 2).recorder.versions != versions
    assert Simulated(settings(2, codec_up="int4", codec_down="int4", outer_lr=0.71), 2).recorder.versions != versions
    assert Simulated(config, 2, steps=STEPS + 4).final != Simulated(config, 2).final
    monkeypatch.setattr("atoll.instruments.sim.arrays.LEARNING_RATE", np.float32(0.0501))
    changed = Simulated(config, 2).recorder.versions
    assert changed.keys() == versions.keys()
    for (fragment, version), checksum in changed.items():
        assert (checksum == versions[fragment, version]) == (version == 0)
