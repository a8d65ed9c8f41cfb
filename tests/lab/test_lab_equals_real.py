"""A fault-free lab run is the real cluster's run: the same model, data and settings over real gRPC give the same
parameters, at the syncer and in every learner."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cluster import WAIT_S, SyncerThread
from torch import nn

from atoll.core.config import SyncConfig
from atoll.instruments.lab.payloads import LabLearner
from atoll.instruments.lab.replica import Replica
from atoll.instruments.lab.run import ClusterRun, Workshop
from atoll.instruments.lab.spec import LabSpec
from atoll.learner import Learner
from atoll.zoo.corpus import Batches, Corpus
from atoll.zoo.gpt import build_model, next_byte_loss
from atoll.zoo.optim import GRADIENT_NORM_MAX, lr_at, make_optimizer, set_lr
from atoll.zoo.presets import own_lr

STEPS = 8
SEQ = 16
SYNC = {"sync_every": 4, "fragments": 2, "overlap": 0, "quorum": "all", "grace_cap_steps": 0.0}


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_bytes(np.random.default_rng(7).integers(32, 127, 60_000).astype(np.uint8).tobytes())
    return str(file)


def spec_for(corpus: str, learners: int, optimizer: str, **changes: object) -> LabSpec:
    return LabSpec(
        method="decoupled",
        model="nano",
        corpus=corpus,
        learners=learners,
        batch=2 * learners,
        seq=SEQ,
        tokens=2 * learners * SEQ * STEPS * 10,
        schedule_by="steps",
        seed=3,
        optimizer=optimizer,
        eval_windows=8,
        sync={**SYNC, "learners_expected": learners, **changes},
        world={"step_ms": 5000},
    )


def in_the_lab(spec: LabSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """(published parameters by fragment, every learner's parameters) after STEPS steps of everybody. The device works
    ahead: it would compute the step that has only begun, so that one is left out."""
    launch = Replica.launch
    monkeypatch.setattr(Replica, "launch", lambda self, lr: launch(self, lr) if self.position < STEPS else None)
    cluster = ClusterRun(spec, Workshop("cpu"), None)
    world = cluster.world
    world.begin()
    for _ in range(2000):
        hosts = list(world.learners.values())
        if all(host.machine.steps == STEPS and not host.machine.must_wait for host in hosts):
            break
        world.clock.run(world.now_ns + 100_000_000)
    assert [host.machine.steps for host in world.learners.values()] == [STEPS] * spec.learners
    syncer = world.lab_syncer()
    assert syncer is not None
    learners = [flat(host.payloads.replica.model) for host in world.learners.values() if host.payloads]  # type: ignore[union-attr]
    assert all(isinstance(host.payloads, LabLearner) for host in world.learners.values())
    return [arrays.theta.copy() for arrays in syncer.state.fragments], learners


def flat(model: nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


class RealLearner:
    """The three lines, around the loop that a user would write."""

    def __init__(self, address: str, index: int, spec: LabSpec, corpus: Corpus) -> None:
        self.spec = spec
        self.model = build_model(spec.model, spec.seed)
        self.optimizer = make_optimizer(self.model, spec.optimizer, 1.0)
        self.batches = Batches(corpus.shard(index, 1), batch=2, seq=SEQ, seed=spec.seed)
        self.peak = own_lr(spec.model, spec.optimizer)
        self.learner = Learner(self.model, address=address, learner_id=f"learner-{index}")

    def train(self, step: int) -> None:
        inputs, targets = next(self.batches)
        set_lr(self.optimizer, lr_at(step, self.spec.steps, peak=self.peak, schedule=self.spec.schedule))
        self.optimizer.zero_grad(set_to_none=True)
        next_byte_loss(self.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)
        self.optimizer.step()
        self.learner.step(tokens=inputs.numel())


def on_the_wire(spec: LabSpec, config: SyncConfig) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    from atoll.zoo.corpus import load_corpus

    corpus = load_corpus(spec.corpus)
    syncer = SyncerThread(config)
    learners: list[RealLearner] = []
    errors: list[BaseException] = []
    try:
        for index in range(spec.learners):
            learners.append(RealLearner(syncer.address, index, spec, corpus))
            learners[-1].learner.start()
        barrier = threading.Barrier(spec.learners, timeout=WAIT_S)

        def work(each: RealLearner) -> None:
            try:
                for step in range(STEPS):
                    each.train(step)
                    barrier.wait()
            except BaseException as error:
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=work, args=(each,)) for each in learners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not errors, errors
        theta = syncer.ask(lambda shell: [arrays.theta.copy() for arrays in shell.state.fragments])
        return theta, [flat(each.model) for each in learners]
    finally:
        for each in learners:
            each.learner.close(flush=False)
        syncer.stop()


@pytest.mark.parametrize(
    ("learners", "optimizer", "changes"),
    [(2, "adamw", {"codec_up": "fp32", "codec_down": "fp32"}), (3, "muon", {})],
    ids=["fp32", "int4"],
)
def test_the_lab_gives_the_real_clusters_parameters(
    corpus_file: str, learners: int, optimizer: str, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_for(corpus_file, learners, optimizer, **changes)
    theta, parameters = in_the_lab(spec, monkeypatch)
    config = SyncConfig.from_dict({**spec.config().to_dict(), "tokens_budget": 0})
    real_theta, real_parameters = on_the_wire(spec, config)
    for mine, other in zip(theta, real_theta, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    for one, real_one in zip(parameters, real_parameters, strict=True):
        for mine, other in zip(one, real_one, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    start = flat(build_model(spec.model, spec.seed))
    moved = [np.abs(a - b).max() for a, b in zip(parameters[0], start, strict=True)]
    assert max(moved) > 1e-3, "nothing was trained, so nothing was compared"
    different = [np.abs(a - b).max() for a, b in zip(parameters[0], parameters[1], strict=True)]
    assert max(different) > 1e-6, "learners read the same data"
