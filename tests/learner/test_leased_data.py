"""atoll.data through a real learner and a real syncer: every sample once, over a leave and over a syncer's death."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from cluster import WAIT_S, SyncerProcess, check_books, small_model

import atoll.data
from atoll.learner import Learner

SAMPLES = 1200


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sample i is the number i, as a float row."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), float(index))


class Reader:
    """A learner that reads leased data on its own thread and notes what it trained on."""

    def __init__(self, address: str, name: str, *, steps: int = 10**9, step_s: float = 0.01, workers: int = 0) -> None:
        self.seen: Counter[int] = Counter()
        self.steps, self.step_s, self.workers = steps, step_s, workers
        self.error: BaseException | None = None
        self.arguments = (address, name)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        address, name = self.arguments
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        try:
            with Learner(model, optimizer, address=address, learner_id=name) as learner:
                data = atoll.data.loader(
                    learner,
                    Numbers(),
                    batch_size=5,
                    chunk_size=40,
                    epochs=1,
                    seed=3,
                    num_workers=self.workers,
                    when_dry="wait",  # so few chunks do not last over the syncer's death, and repeats would be counted
                )
                for batch in data:
                    loss = (model(batch / SAMPLES)).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    learner.step(tokens=len(batch))
                    self.seen.update(int(row[0]) for row in batch)
                    self.steps -= 1
                    if self.steps <= 0:
                        break
                    time.sleep(self.step_s)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self.thread.join(2 * WAIT_S)
        assert not self.thread.is_alive() and self.error is None, self.error


def test_every_sample_is_trained_on_once_over_a_leave_and_a_dead_syncer(tmp_path: Path) -> None:
    """In a process of its own, as users have it: a reader forks workers, and beside the gRPC connections that a hundred
    other tests have left in this one such a child now and then dies of them."""
    script = [sys.executable, __file__, str(tmp_path)]
    path = os.pathsep.join(str(folder) for folder in (Path(__file__).parents[1], *sys.path) if str(folder))
    done = subprocess.run(
        script, timeout=4 * WAIT_S, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr


def read_over_a_leave_and_a_dead_syncer(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path, "--learners", "2", "--sync-every", "6", "--fragments", "2")
    leaver = Reader(syncer.address, "leaver", steps=37)  # it leaves within a chunk
    stayer = Reader(syncer.address, "stayer", workers=1)
    leaver.join()
    syncer.kill()
    time.sleep(0.5)
    syncer.again()
    late = Reader(syncer.address, "late")
    stayer.join()
    late.join()
    total = leaver.seen + stayer.seen + late.seen
    assert set(total) == set(range(SAMPLES))
    assert set(total.values()) == {1}
    assert leaver.seen and stayer.seen and late.seen
    status = syncer.status()
    counts = status["data"]["train"]
    assert (counts["done"], counts["in_hand"], counts["pool"], counts["repeated"]) == (counts["chunks"], 0, 0, 0)
    status = syncer.wait_for(lambda s: not s["tokens_pending"], "all is merged")
    check_books(status)
    # What the leaver handed over waited for its rounds on disk, so the kill has not cost that either.
    assert status["tokens_processed"] == status["tokens_merged"] == SAMPLES
    assert syncer.stop() == 0


if __name__ == "__main__":
    read_over_a_leave_and_a_dead_syncer(Path(sys.argv[1]))
