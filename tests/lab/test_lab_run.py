"""Runs of the lab: every method trains, the same spec gives the same numbers, and what happens to learners shows."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from atoll import kernels
from atoll.errors import ConfigError, LabError
from atoll.instruments.lab.replica import Replica
from atoll.instruments.lab.run import Workshop, run
from atoll.instruments.lab.spec import LabResult, LabSpec

BEGINNING = math.log(256)
"""Loss of a model that knows nothing."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Text that can be learned: words in random order."""
    dice = np.random.default_rng(1)
    words = ["the ", "sea ", "ring ", "island ", "lagoon ", "drift\n"]
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text("".join(dice.choice(words, 20_000)))
    return str(file)


@pytest.fixture(scope="module")
def workshop() -> Workshop:
    return Workshop("cpu")


def go(text: str, workshop: Workshop, **changes: Any) -> LabResult:
    values = {"model": "nano", "corpus": text, "batch": 8, "seq": 32, "tokens": 16_000, "evals": 2, "eval_windows": 16}
    return run(LabSpec(**{**values, "learners": 2, **changes}), keep=workshop)


@pytest.mark.parametrize("method", ["decoupled", "streaming", "diloco", "dp", "single"])
def test_every_method_trains(text: str, workshop: Workshop, method: str) -> None:
    result = go(text, workshop, method=method)
    assert result.loss < 0.7 * BEGINNING
    assert len(result.curve) == 2 and result.curve[-1] == (result.tokens, result.loss)
    assert abs(result.tokens - 16_000) <= 2 * 8 * 32
    assert result.to_dict()["key"] == result.spec.key


def test_the_same_spec_gives_the_same_numbers(text: str, workshop: Workshop) -> None:
    world = {"jitter": 0.3, "fault": [{"kind": "kill", "target": "learner-1", "at": "40%"}]}
    first, again = (go(text, workshop, learners=4, world=world) for _ in range(2))
    other = go(text, Workshop("cpu"), learners=4, world=world)
    assert first.curve == again.curve == other.curve
    assert first.facts["steps"] == again.facts["steps"]
    assert go(text, workshop, learners=4, world=world, seed=1).curve != first.curve


def test_a_learner_that_is_forty_steps_away_loses_nothing(text: str, workshop: Workshop) -> None:
    """With the default settings: its contributions are five versions old when they arrive."""
    world = {"step_ms": 1000, "learner": [{"who": 1, "latency_ms": 6000}]}
    facts = go(text, workshop, batch=2, seq=8, tokens=2400, eval_windows=2, evals=1, world=world).facts
    lost = {name: tokens for name, tokens in facts.items() if name.startswith("tokens_") and name != "tokens_merged"}
    assert facts["tokens_merged"] >= 2400 and not any(lost.values()), lost


def test_a_run_tells_what_it_sent_and_when(text: str, workshop: Workshop) -> None:
    """Sparse up, four bits down: each direction's links carry what their codec has."""
    facts = go(text, workshop, sync={"codec_up": "topk:3%"}).facts
    assert 0.3 < facts["bits_up"] < 0.5 and facts["bits_down"] == 4.125
    assert 6 < facts["period"] < 12 and facts["decisions"] == 0
    fetched = 2 * facts["parameters"] * (4 + facts["rounds"] * 4.125 / 8)
    assert 0.9 < facts["bytes_down"] / fetched < 1.1, "the beginning in fp32, and every update, by each of two"
    assert facts["bytes_up"] < 0.5 * facts["bytes_down"]
    assert facts["times_s"] == sorted(facts["times_s"]) and len(facts["times_s"]) == 2
    local = go(text, workshop, method="dp")
    assert local.facts["times_s"][-1] == local.virtual_s == round(local.tokens / 256)


def test_decisions_of_the_controller_are_facts(text: str, workshop: Workshop) -> None:
    """Uplinks that carry int4 in 2.8 s, where a period has 1.6."""
    world = {"step_ms": 200, "up_mbit": 0.1}
    facts = go(text, workshop, sync={"adaptive": "network"}, world=world, tokens=32_000).facts
    assert facts["decisions"] >= 2 and "codec_up int4 -> " in facts["decided"][0]
    assert facts["decided_last"]["learner-0 codec_up"] != "int4" and facts["bits_up"] < 4.0


def test_a_run_does_not_depend_on_the_optimizer_of_the_run_before(text: str) -> None:
    """Each optimizer has a learning rate of its own, which is the task's."""
    workshop = Workshop("cpu")
    for optimizer in ("adamw", "muon"):
        alone = go(text, Workshop("cpu"), method="dp", optimizer=optimizer)
        assert go(text, workshop, method="dp", optimizer=optimizer).curve == alone.curve


def test_guests_get_a_peers_optimizer_whatever_ran_before(text: str) -> None:
    workshop = Workshop("cpu")
    world = {"extra": [{"learners": 1, "from": "40%", "until": "90%"}]}
    assert go(text, workshop, world=world).curve == go(text, workshop, world=world).curve


def test_the_schedule_ends_with_the_run(text: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers end a run sooner; the learning rate must have come down by then."""
    rates: dict[str, list[float]] = {"tokens": [], "steps": []}
    launch = Replica.launch
    world = {"extra": [{"learners": 6, "from": "20%"}]}
    for by, seen in rates.items():
        monkeypatch.setattr(Replica, "launch", lambda self, lr, seen=seen: (seen.append(lr), launch(self, lr))[1])
        go(text, workshop, world=world, schedule_by=by)
    assert min(rates["tokens"]) < 0.2 * max(rates["tokens"])
    assert min(rates["steps"][len(rates["steps"]) // 2 :]) > 0.3 * max(rates["steps"])


def test_frozen_parameters_are_those_of_the_seed_when_the_published_model_is_evaluated(workshop: Workshop) -> None:
    common = {"task": "lab_own_task:make_frozen", "batch": 8, "seq": 1, "tokens": 4000, "optimizer": "sgd", "evals": 1}
    for seed in (0, 1):
        plain = run(LabSpec(method="dp", learners=1, seed=seed, **common), keep=workshop)
        one = run(LabSpec(learners=1, seed=seed, **common), keep=workshop)
        assert one.loss < 2.0 * plain.loss + 0.1


def test_models_with_buffers_are_refused(workshop: Workshop) -> None:
    with pytest.raises(ConfigError, match="the model has buffers"):
        run(LabSpec(task="lab_own_task:make_buffered", batch=8, seq=1, tokens=2000, learners=2), keep=workshop)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "mps"])
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        Workshop(device)


def test_one_learner_that_is_taken_at_its_word_is_plain_training(text: str, workshop: Workshop) -> None:
    """Outer lr 1 without momentum and without rounding: the published model is the learner's own."""
    sync = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec_up": "fp32", "codec_down": "fp32", "merge": "mean"}
    tokens = 8 * 32 * 96
    plain = go(text, workshop, method="dp", learners=1, tokens=tokens)
    one = go(text, workshop, learners=1, tokens=tokens, sync=sync)
    assert one.tokens - tokens <= 2 * 8 * 32
    assert one.loss == pytest.approx(plain.loss, rel=2e-2)
    other = go(text, workshop, learners=1, tokens=tokens, sync={**sync, "outer_lr": 0.1})
    assert abs(other.loss - plain.loss) > 5 * abs(one.loss - plain.loss)


@pytest.mark.parametrize("learners, fragments", [(4, 0), (8, 16)])
def test_nothing_of_a_quiet_run_is_lost(text: str, workshop: Workshop, learners: int, fragments: int) -> None:
    """With many fragments the first contributions are of a few steps in the warm-up, and far smaller than the next."""
    result = go(text, workshop, learners=learners, sync={"fragments": fragments})
    facts = result.facts
    assert facts["tokens_merged"] == result.tokens and facts["tokens_pending"] == 0
    assert {name for name in facts if name.startswith("tokens_")} == {"tokens_merged", "tokens_pending"}
    assert sum(facts["steps"].values()) * (8 // learners) * 32 == result.tokens


def test_a_slow_learner_takes_fewer_steps_and_still_counts(text: str, workshop: Workshop) -> None:
    result = go(text, workshop, learners=4, world={"learner": [{"who": 3, "step_ms": 4000}]})
    steps = result.facts["steps"]
    assert 3.5 < steps["learner-0"] / steps["learner-3"] < 4.5
    assert result.facts["tokens_merged"] == result.tokens


def test_killed_learners_come_back_and_lose_only_their_own(text: str, workshop: Workshop) -> None:
    faults = [{"kind": "kill", "target": f"learner-{i}", "at": f"{30 + 20 * i}%"} for i in range(2)]
    result = go(text, workshop, learners=4, tokens=30_000, world={"fault": faults})
    quiet = go(text, workshop, learners=4, tokens=30_000)
    facts = result.facts
    assert facts["faults"] == 2
    assert facts["tokens_merged"] < result.tokens
    lost = result.tokens - facts["tokens_merged"]
    assert lost <= 2 * 26 * 2 * 32, "more than one period of each of the two is gone"
    assert facts["steps"]["learner-0"] < facts["steps"]["learner-2"]
    assert result.loss < 1.1 * quiet.loss


def test_a_syncer_that_dies_takes_no_facts_along(text: str, workshop: Workshop) -> None:
    """What was merged before counts, and where nobody has a model to hand out the curve waits."""
    quiet = go(text, workshop, evals=30).facts
    faults = [{"kind": "kill", "target": "syncer", "at": f"{share}%"} for share in (30, 60, 90)]
    result = go(text, workshop, evals=30, world={"fault": faults})
    facts = result.facts
    assert facts["faults"] == 3 and facts["tokens_merged"] == result.tokens
    assert facts["rounds"] > 2 and facts["contributions_merged"] >= 2 * (facts["rounds"] - 3)
    assert quiet["contributions_merged"] == 2 * quiet["rounds"] and 0.0 < facts["rho"] < 1.0
    assert all(math.isfinite(loss) for _, loss in result.curve) and result.curve[-1][0] == result.tokens


def test_extra_learners_share_the_work(text: str, workshop: Workshop) -> None:
    alone = go(text, workshop, tokens=30_000)
    world = {"extra": [{"learners": 2, "from": "25%", "until": "60%"}]}
    helped = go(text, workshop, tokens=30_000, world=world)
    assert len(helped.facts["steps"]) == 4
    assert helped.virtual_s < 0.95 * alone.virtual_s


def test_muon_and_tasks_of_ones_own(text: str, workshop: Workshop) -> None:
    assert go(text, workshop, optimizer="muon").loss < 0.7 * BEGINNING
    own = LabSpec(task="lab_own_task:make", learners=2, batch=8, seq=1, tokens=2000, optimizer="sgd", evals=4)
    result = run(own, keep=workshop)
    assert result.loss < 0.05
    assert result.curve[0][1] > result.loss


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learners": 0}, "learners must be"),
        ({"learners": 3, "batch": 8}, "does not split"),
        ({"tokens": 10}, "less than one step"),
        ({"method": "magic"}, "method must be one of"),
        ({"lr": -1.0}, "lr must be"),
        ({"lr": math.nan}, "lr must be"),
        ({"sync": {"quorum": "5"}, "learners": 2}, "quorum 5 is above"),
        ({"sync": {"nonsense": 1}}, "unknown setting 'nonsense'"),
        ({"method": "dp", "sync": {"sync_every": 4}}, "nothing is synchronised"),
    ],
)
def test_specs_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LabSpec(**changes)


def test_tasks_that_are_not_there(workshop: Workshop) -> None:
    for task in ("nowhere:make", "lab_own_task:nothing", "lab_own_task"):
        with pytest.raises(ConfigError, match="cannot load the task"):
            run(LabSpec(task=task), keep=workshop)
    with pytest.raises(ConfigError, match="gave int, which has no lr, build"):
        run(LabSpec(task="lab_own_task:make_nothing"), keep=workshop)
    with pytest.raises(ConfigError, match=r"OSError: no such data .*lab_own_task.py, line \d+"):
        run(LabSpec(task="lab_own_task:make_trouble"), keep=workshop)
    with pytest.raises(ConfigError, match=r"held_out\(\) must give batches"):
        run(LabSpec(task="lab_own_task:make_nothing_held_out"), keep=workshop)


@pytest.mark.parametrize("method", ["decoupled", "dp"])
def test_what_a_model_draws_while_it_trains_follows_from_the_seed(workshop: Workshop, method: str) -> None:
    common: dict[str, Any] = {"batch": 8, "seq": 1, "tokens": 2000, "learners": 2, "optimizer": "sgd", "evals": 1}
    first, again, other = (
        run(LabSpec(task="lab_own_task:make_dropout", method=method, seed=seed, **common), keep=workshop).loss
        for seed in (1, 1, 2)
    )
    assert first == again and first != other


def test_a_link_that_carries_next_to_nothing_is_named(text: str, workshop: Workshop) -> None:
    thin = {"up_mbit": 0.001, "down_mbit": 0.001}
    with pytest.raises(LabError, match=r"links \(the slowest carries 0.001 Mbit/s.* bytes .* and at its faults"):
        go(text, workshop, world=thin)


def test_a_spec_is_data() -> None:
    spec = LabSpec(sync={"sync_every": 8}, world={"step_ms": 10})
    assert LabSpec.from_dict(spec.to_dict()) == spec
    assert LabSpec.from_dict(spec.to_dict()).key == spec.key != LabSpec(sync={"sync_every": 9}).key
    with pytest.raises(ConfigError, match="unknown setting"):
        LabSpec.from_dict({"speed": 3})
    with pytest.raises(ConfigError, match="must be a text"):
        LabSpec.from_dict({"model": 3})


def test_threads_change_no_number(text: str) -> None:
    world = {"jitter": 0.4, "latency_ms": 300, "fault": [{"kind": "kill", "target": "learner-1", "at": "40%"}]}
    changes = {"learners": 4, "sync": {"fragments": 4, "sync_every": 8}, "world": world}
    alone, helped = Workshop("cpu"), Workshop("cpu")
    with ThreadPoolExecutor(4, initializer=kernels.work_alone) as threads:
        helped.threads = threads
        assert go(text, alone, **changes).curve == go(text, helped, **changes).curve
