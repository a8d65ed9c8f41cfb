"""Where a starting learner's inner state comes from: its own checkpoint, a peer, or nowhere; and leaving on SIGTERM."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from cluster import WAIT_S, SyncerThread, TrainingThread, small_model, spawn

from atoll.core.config import SyncConfig
from atoll.learner import Learner


@pytest.fixture
def syncer(tmp_path: Path):  # type: ignore[no-untyped-def]
    running = SyncerThread(SyncConfig(sync_every=6, fragments=2, learners_expected=1, quorum="1"), folder=tmp_path)
    yield running
    running.stop()


class Adam(TrainingThread):
    """Trains with AdamW, whose state tells where it came from."""

    def __init__(self, address: str, name: str, folder: Path | None, steps: int = 10**9) -> None:
        model = small_model()
        self.adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        super().__init__(address, name, model=model, run_folder=folder, optimizer=self.adam, steps=steps)


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state["exp_avg_sq"].clone() for state in optimizer.state.values()]


def rung_of(folder: Path, learner: str) -> dict[str, object]:
    """The last LearnerRecovered of this learner; events are written a moment after they happen."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = []
        for path in (folder / "events").glob(f"learner-{learner}-*.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found += [line for line in lines if line["kind"] == "learner_recovered"]
        if found:
            return max(found, key=lambda line: line["generation"])
        time.sleep(0.05)
    raise AssertionError("no LearnerRecovered event")


def test_a_restarted_learner_continues_with_its_own_state(syncer: SyncerThread, tmp_path: Path) -> None:
    first = Adam(syncer.address, "a", tmp_path, steps=40)
    first.thread.join(WAIT_S)
    assert first.error is None
    model = small_model()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Learner(model, adam, address=syncer.address, learner_id="a", run_folder=tmp_path) as learner:
        assert learner.generation == 2 and learner.start_step > 0
        for mine, theirs in zip(moments(adam), moments(first.adam), strict=True):
            assert torch.equal(mine, theirs)
        assert all(int(state["step"]) == 40 for state in adam.state.values())
    again = [json.loads(line) for path in (tmp_path / "events").glob("learner-a-*.jsonl") for line in path.open()]
    rungs = [line["rung"] for line in again if line["kind"] == "learner_recovered"]
    assert rungs == ["fresh", "checkpoint"]


def test_a_joiner_takes_over_a_peers_state(syncer: SyncerThread, tmp_path: Path) -> None:
    peer = Adam(syncer.address, "a", None)
    peer.wait_steps(60)
    model = small_model()
    adam = torch.optim.AdamW(model.parameters(), lr=0.5)
    before = peer.taken
    with Learner(model, adam, address=syncer.address, learner_id="b", run_folder=tmp_path) as learner:
        assert all(int(state["step"]) >= 60 for state in adam.state.values()) and adam.state
        assert adam.param_groups[0]["lr"] == 0.5
        assert learner.start_step > 0
    assert peer.taken > before or peer.error is None
    peer.stop()
    assert peer.error is None
    assert rung_of(tmp_path, "b")["rung"] == "peer"


def test_alone_and_without_state_it_warms_up(syncer: SyncerThread, tmp_path: Path) -> None:
    first = Adam(syncer.address, "a", None, steps=40)
    first.thread.join(WAIT_S)
    model = small_model()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Learner(model, adam, address=syncer.address, learner_id="b", run_folder=tmp_path) as learner:
        assert learner.start_step > 0
        before = [p.detach().clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        adam.step()
        moved = max(float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True))
        assert 0 < moved < 0.5e-3, "the first step is taken at a fraction of the learning rate"
        assert adam.param_groups[0]["lr"] == 1e-3
        learner.step(tokens=32)
    assert rung_of(tmp_path, "b")["rung"] == "parameters"


SCRIPT = """
import sys, time, torch, atoll
from cluster import small_model
model = small_model()
optimizer = torch.optim.AdamW(model.parameters())
with atoll.Learner(model, optimizer, address=sys.argv[1], learner_id="spot", run_folder=sys.argv[2]) as learner:
    print("joined", flush=True)
    while True:
        x = torch.randn(8, 32)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        learner.step(tokens=32)
        time.sleep(0.005)
"""


def test_sigterm_hands_everything_over(syncer: SyncerThread, tmp_path: Path) -> None:
    process = spawn(SCRIPT, syncer.address, str(tmp_path))
    syncer.wait_for(lambda s: s.machine.book.commits > 5, "it trains")
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0, process.stdout.read() if process.stdout else ""
    syncer.wait_for(lambda s: not s.machine.stats()["tokens_pending"], "all of it is merged")
    stats = syncer.check_ledger()
    assert stats["tokens_merged"] == stats["tokens_processed"] > 0
    member = syncer.ask(lambda s: s.machine.membership.members["spot"])
    assert str(member.state) == "left"
    assert list((tmp_path / "learners").rglob("*.safetensors")), "its inner state is kept for a successor"
