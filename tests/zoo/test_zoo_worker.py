"""The worker: real processes for dp and single, a stand-in learner for the decoupled loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.core.leases import LeaseBook
from atoll.data import DataSource
from atoll.errors import ConfigError
from atoll.observe.events import LearnerEvaluated
from atoll.zoo import Batches, WorkerConfig, WorkerSeat, build_model, eval_loss, load_corpus, load_saved, lr_at
from atoll.zoo.gpt import next_byte_loss
from atoll.zoo.stop import StopSignal
from atoll.zoo.train import Workbench, train_with_atoll

SMALL: dict[str, Any] = {
    "model": "nano",
    "learners": 2,
    "steps": 12,
    "batch": 2,
    "seq": 32,
    "threads": 1,
    "eval_every": 6,
    "eval_batches": 3,
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small corpus, so that a worker starts quickly."""
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(f"def function_{i}(x):\n    return x + {i}" for i in range(5_000)))
    return path


def start(config: WorkerConfig, run: Path, rank: int = 0, **extra: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "ATOLL_RANK": str(rank),
        "ATOLL_LEARNER": f"learner-{rank}",
        "ATOLL_RUN_FOLDER": str(run),
        "PYTHONWARNINGS": "ignore",
        **extra,
    }
    command = [sys.executable, "-m", "atoll.zoo.worker", config.to_json()]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(worker: subprocess.Popen[str], timeout_s: float = 60) -> tuple[int, str]:
    try:
        out, err = worker.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        worker.kill()
        raise
    return worker.returncode, out + err


def events(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    file = run / "events" / f"learner-learner-{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in found if event["kind"] == kind]


def test_single_end_to_end(tmp_path: Path, text: Path) -> None:
    config = WorkerConfig(method="single", corpus=str(text), seed=5, **SMALL)
    assert finish(start(config, tmp_path / "run")) == (0, "")
    found = events(tmp_path / "run")
    assert [e["kind"] for e in found[:2]] == ["learner_started", "learner_joined"]
    steps = of_kind(found, "learner_steps")
    assert sum(e["steps"] for e in steps) == 24 and steps[-1]["step"] == 24  # learners x steps
    assert sum(e["tokens"] for e in steps) == config.tokens_budget == 24 * 2 * 32
    assert all(e["stall_ns"] == 0 and e["compute_ns"] > 0 for e in steps)
    evaluated = of_kind(found, "learner_evaluated")
    assert [(e["step"], e["tokens_seen"]) for e in evaluated] == [(n, n * 64) for n in (6, 12, 18, 24)]
    assert evaluated[-1]["eval_loss"] < evaluated[0]["eval_loss"] < 5.5
    assert found[-1]["kind"] == "learner_finished" and found[-1]["reason"] == "done"
    # The saved model is the one that was evaluated last.
    model = load_saved(tmp_path / "run" / "model.safetensors", "nano")
    again = eval_loss(model, load_corpus(str(text)), batch=2, seq=32, batches_max=3)
    assert again == pytest.approx(evaluated[-1]["eval_loss"], rel=1e-5)


def test_dp_equals_one_process_with_the_whole_batch(tmp_path: Path, text: Path) -> None:
    config = WorkerConfig(method="dp", corpus=str(text), optimizer="sgd", lr=0.5, seed=3, **SMALL)
    workers = [start(config, tmp_path / "run", r) for r in range(2)]
    for worker in workers:
        code, output = finish(worker)
        assert code == 0, output

    corpus = load_corpus(str(text))
    both = [Batches(corpus.shard(r, 2), batch=2, seq=32, seed=3) for r in range(2)]
    model = build_model("nano", 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(12):
        optimizer.param_groups[0]["lr"] = lr_at(step, 12, peak=0.5)
        (x0, y0), (x1, y1) = (next(b) for b in both)
        optimizer.zero_grad()
        next_byte_loss(model, torch.cat((x0, x1)), torch.cat((y0, y1))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    saved = load_file(tmp_path / "run" / "model.safetensors")
    initial = dict(build_model("nano", 3).named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(saved[name], parameter.data, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(saved[name], initial[name], atol=1e-3)

    for rank in range(2):
        found = events(tmp_path / "run", rank)
        steps = of_kind(found, "learner_steps")
        assert sum(e["steps"] for e in steps) == 12 and sum(e["stall_ns"] for e in steps) > 0
        assert found[-1]["kind"] == "learner_finished" and found[-1]["tokens"] == 12 * 64
        assert of_kind(found, "learner_joined")[0]["wait_ns"] > 0
    evaluated = of_kind(events(tmp_path / "run", 0), "learner_evaluated")
    assert [e["tokens_seen"] for e in evaluated] == [6 * 128, 12 * 128]
    whole = eval_loss(model, corpus, batch=2, seq=32, batches_max=3)
    assert evaluated[-1]["eval_loss"] == pytest.approx(whole, rel=1e-4)
    assert not of_kind(events(tmp_path / "run", 1), "learner_evaluated")


def test_sigterm_ends_both_ranks_cleanly_and_keeps_the_model(tmp_path: Path, text: Path) -> None:
    config = WorkerConfig(method="dp", corpus=str(text), **{**SMALL, "steps": 1_000_000, "eval_every": 0})
    workers = [start(config, tmp_path / "run", r) for r in range(2)]
    try:
        deadline = time.monotonic() + 60
        while not all(of_kind(events(tmp_path / "run", r), "learner_steps") for r in range(2)):
            assert time.monotonic() < deadline and all(w.poll() is None for w in workers)
            time.sleep(0.1)
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
    finally:
        results = [finish(worker) for worker in workers]
    assert [code for code, _ in results] == [0, 0], results
    for rank in range(2):
        assert events(tmp_path / "run", rank)[-1]["reason"] == "terminated"
    assert load_saved(tmp_path / "run" / "model.safetensors", "nano")


def test_bad_settings_end_with_one_line(tmp_path: Path) -> None:
    config = WorkerConfig(method="single", corpus=str(tmp_path / "missing"), **SMALL)
    code, output = finish(start(config, tmp_path))
    assert code == 2 and output.startswith("error: no file or folder") and output.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "fedavg"}, "decoupled, diloco, dp, single"),
        ({"model": "huge"}, "nano, tiny"),
        ({"optimizer": "lion"}, "muon, adamw, sgd"),
        ({"schedule": "step"}, "cosine, wsd"),
        ({"device": "tpu"}, "cpu, cuda"),
        ({"steps": 0}, "steps must be"),
        ({"batch": True}, "batch must be"),
        ({"lr": -1.0}, "lr must be"),
        ({"lr": float("nan")}, "lr must be"),
        ({"eval_evry": 5}, "eval_every"),
    ],
)
def test_wrong_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkerConfig.from_json(json.dumps(change))


def test_config_travels_as_json() -> None:
    config = WorkerConfig(method="dp", lr=0.01, seed=9)
    assert WorkerConfig.from_json(config.to_json()) == config
    assert WorkerConfig().peak_lr > 0 and config.peak_lr == 0.01
    for text in ("{", "[]"):
        with pytest.raises(ConfigError, match="configuration"):
            WorkerConfig.from_json(text)


def test_seat_from_environment() -> None:
    usual = {"ATOLL_RANK": "2", "ATOLL_LEARNER": "x", "ATOLL_RUN_FOLDER": "/r"}
    assert WorkerSeat.from_environment(usual) == WorkerSeat(2, "x", Path("/r"))
    assert WorkerSeat.from_environment({**usual, "ATOLL_SLOW_FILE": "/s"}).slow_file == Path("/s")
    for broken in ({}, {**usual, "ATOLL_RANK": "two"}):
        with pytest.raises(ConfigError, match="atoll train"):
            WorkerSeat.from_environment(broken)


class StandInLearner:
    """The part of atoll.Learner that the loop uses, without a syncer: joins at step 5 and is done after eight steps."""

    handed_over = True

    def __init__(self, model: torch.nn.Module, optimizer: object) -> None:
        self.start_step = self.step_count = 5
        self.generation = 2
        self.tokens_seen_run = 0
        self.learner_id = "l0"
        self.book = LeaseBook()
        self.events = types.SimpleNamespace(emit=self.said.append)

    said: list[object] = []  # noqa: RUF012  (one list for the test to read)

    @property
    def done(self) -> bool:
        return self.step_count >= 13

    def __enter__(self) -> StandInLearner:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self, *, reason: str) -> None:
        self.said.append(reason)

    def attach_data(self, source: DataSource) -> None:
        self.source = source

    def poke_data(self, source: DataSource) -> None:
        source.leases(self.book.report("l0", self.generation, source.report()))

    def step(self, *, tokens: int, loss: torch.Tensor) -> None:
        assert torch.isfinite(loss)
        self.source.stepped()
        self.step_count += 1
        self.tokens_seen_run += tokens

    @contextmanager
    def global_params(self) -> Iterator[None]:
        yield


def test_decoupled_loop_runs_until_done(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.zoo.train.Learner", StandInLearner)
    monkeypatch.setattr(StandInLearner, "said", [])
    config = WorkerConfig(method="decoupled", corpus=str(text), **{**SMALL, "steps": 40})
    bench = Workbench.build(config, WorkerSeat(0, "l0", tmp_path))
    before = bench.model.embed.weight.detach().clone()
    stop = types.SimpleNamespace(arm=lambda: None, requested=lambda: False)
    train_with_atoll(bench, stop)  # type: ignore[arg-type]
    assert [(e.step, e.tokens_seen) for e in StandInLearner.said if isinstance(e, LearnerEvaluated)] == [
        (6, 64),
        (12, 7 * 64),
        (13, 8 * 64),
    ]
    assert not torch.equal(before, bench.model.embed.weight)


def test_a_worker_that_is_told_to_leave_says_why_and_evaluates_no_more(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher tells by the reason that this is not the end of the run."""
    monkeypatch.setattr("atoll.zoo.train.Learner", StandInLearner)
    monkeypatch.setattr(StandInLearner, "said", [])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop = StopSignal()
        bench = Workbench.build(WorkerConfig(corpus=str(text), **{**SMALL, "steps": 40}), WorkerSeat(0, "l0", tmp_path))
        monkeypatch.setattr(bench.slow, "after_step", lambda _: os.kill(os.getpid(), signal.SIGTERM))
        train_with_atoll(bench, stop)
        assert [e for e in StandInLearner.said if not isinstance(e, LearnerEvaluated)] == ["SIGTERM"]
        assert not [e for e in StandInLearner.said if isinstance(e, LearnerEvaluated) and e.step > 6]
        with pytest.raises(SystemExit) as second:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        assert second.value.code == 128 + signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
