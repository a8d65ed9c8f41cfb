"""A real syncer and two real learners, one of them behind the proxy: what the tests of bad links share."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cluster import WAIT_S, SyncerThread, TrainingThread

from atoll.core.config import SECOND_NS, SyncConfig
from atoll.instruments.chaos import PERFECT, ChaosProxy
from atoll.wire.address import split_address

TOKENS_PER_STEP = 32
"""What a TrainingThread reports."""


class Run:
    """`near` reaches the syncer directly, `far` through the proxy."""

    def __init__(self) -> None:
        config = {"sync_every": 4, "fragments": 4, "overlap": 2, "quorum": "50%", "learners_expected": 2}
        # Short, so that a test does not wait long for what the syncer does about silence.
        patience = {"lease_ns": 4 * SECOND_NS, "lost_after_ns": 8 * SECOND_NS}
        self.syncer = SyncerThread(SyncConfig.from_dict({**config, **patience}))
        self.proxy = ChaosProxy(seed=7)
        self.proxy.start(lambda: split_address(self.syncer.address))
        host, port = self.proxy.add("far")
        self.near = TrainingThread(self.syncer.address, "near", seed=0, step_s=0.04)
        self.far = TrainingThread(f"{host}:{port}", "far", seed=1, step_s=0.04)

    def go_on(self) -> None:
        """Both learners adopt versions that do not exist yet, and merge into some."""
        newest = max(self.syncer.ask(lambda shell: [track.version for track in shell.machine.book.tracks]))
        for learner in (self.near, self.far):
            self.wait(partial(_adopted_after, learner, newest + 1), f"{learner.name} adopts new versions")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            for learner in (self.near, self.far):
                assert learner.error is None, learner.error
            assert time.monotonic() < deadline, f"never happened: {what}"
            time.sleep(0.02)

    def finish(self) -> dict[str, Any]:
        """Both learners leave in order; the ledger has every token that either has processed."""
        for learner in (self.near, self.far):
            learner.stop()
            assert learner.error is None
        stats = self.syncer.check_ledger()
        assert stats["tokens_processed"] == TOKENS_PER_STEP * (self.near.taken + self.far.taken)
        return stats

    def stop(self) -> None:
        self.proxy.set("far", PERFECT)
        for learner in (self.near, self.far):
            learner.stop()
        self.syncer.stop()
        self.proxy.close()


def _adopted_after(learner: TrainingThread, version: int) -> bool:
    return min(learner.learner.versions(), default=-1) > version
