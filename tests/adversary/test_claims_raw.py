"""The raw learner is a learner: if it does not lie, its run goes on like any other."""

from __future__ import annotations

from pathlib import Path

from cluster import SyncerProcess, check_books
from raw_learner import RawLearner

from atoll.core import messages as m


def test_two_raw_learners_that_do_not_lie_make_versions(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path, "--fragments", "1", "--sync-every", "2", "--learners", "2", "--quorum", "all")
    learners = [RawLearner(syncer.address, name).join() for name in ("one", "other")]
    for number in range(1, 4):
        for learner in learners:
            learner.progress(2)
        for learner in learners:
            learner.wait(m.Request, lambda request, number=number: request.round == number)
            assert learner.contribute(0, steps=2, tokens=64).accepted
        for learner in learners:
            learner.wait(m.Published, lambda published, number=number: published.version == number)
    status = syncer.status()
    assert status["tokens_merged"] == 2 * 3 * 64
    check_books(status)
    for learner in learners:
        learner.close()
    assert syncer.stop() == 0
