"""A learner with the token sends numbers that no training makes. The run goes on as if it had not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cluster import SyncerProcess, check_books
from raw_learner import RawLearner

from atoll.core import messages as m


def test_1e30_in_the_first_round_of_a_run_stops_nobody(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path, "--fragments", "1", "--sync-every", "2", "--learners", "3", "--quorum", "2")
    honest = [RawLearner(syncer.address, name).join() for name in ("one", "other")]
    liar = RawLearner(syncer.address, "liar").join()
    for number in (1, 2, 3):
        for learner in (liar, *honest):
            learner.progress(2)
        for learner in (liar, *honest):
            learner.wait(m.Request, lambda request, number=number: request.round == number)
        reply = liar.contribute(0, 1e30, steps=2, tokens=64)
        assert reply.code == m.Refusal.NORM_OUTLIER and "limit" in reply.detail
        for learner in honest:
            assert learner.contribute(0, steps=2, tokens=64).accepted
        for learner in honest:
            learner.wait(m.Published, lambda published, number=number: published.version == number)
    liar.wait(m.Reseed)
    status = syncer.status()
    assert status["tokens_merged"] == 2 * 3 * 64
    check_books(status)
    for learner in (*honest, liar):
        learner.close()
    assert syncer.stop() == 0


@pytest.mark.parametrize("value", [3e38, np.inf, np.nan])
def test_a_seed_that_nobody_can_train_from_is_refused(tmp_path: Path, value: float) -> None:
    syncer = SyncerProcess(tmp_path, "--fragments", "1")
    liar = RawLearner(syncer.address, "liar")
    assert liar.hello().seed
    payload = np.full(liar.layout.fragments[0].size, value, np.float32).tobytes()
    assert liar.push(m.PushKind.SEED, 0, payload).code == m.Refusal.NOT_FINITE
    liar.close()
    honest = RawLearner(syncer.address, "honest").join()
    assert honest.versions() == (0,)
    honest.close()
    assert syncer.stop() == 0
