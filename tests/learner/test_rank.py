"""Who a learner is when nobody says it: an id and a number that no other learner has."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import SyncerThread, small_model

from atoll import ConfigError, Learner, LocalProtocolError
from atoll.core.config import SyncConfig
from atoll.learner.environment import find_place


@pytest.fixture
def syncer() -> Iterator[SyncerThread]:
    running = SyncerThread(SyncConfig(sync_every=4, fragments=2, learners_expected=3))
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_RANK", "ATOLL_WORLD", "ATOLL_LEARNER", "ATOLL_RUN_FOLDER"):
        monkeypatch.delenv(name, raising=False)


def place(**given: Any) -> Any:
    return find_place(**{"address": "a:1", "learner": None, "token": None, "tls_ca": None, "run_folder": None, **given})


def test_learners_started_by_hand_have_different_ranks_and_the_world_is_who_is_expected(syncer: SyncerThread) -> None:
    learners = [Learner(small_model(), address=syncer.address, learner_id=id) for id in ("paris", "oslo", None)]
    with pytest.raises(LocalProtocolError, match="after joining, or set ATOLL_RANK"):
        _ = learners[0].rank
    for learner in learners:
        learner.start()
    assert sorted(learner.rank for learner in learners) == [0, 1, 2]
    assert [learner.world for learner in learners] == [3, 3, 3]
    late = Learner(small_model(), address=syncer.address, learner_id="late").start()
    assert (late.rank, late.world) == (3, 4)  # one more than expected: its part of the data exists as well
    for learner in (*learners, late):
        learner.close(flush=False)


def test_what_the_environment_says_is_the_rank(syncer: SyncerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_RANK", "5")
    monkeypatch.setenv("ATOLL_WORLD", "8")
    learner = Learner(small_model(), address=syncer.address, learner_id="learner-1")
    assert learner.rank == 5  # also before joining
    learner.start()
    assert (learner.rank, learner.world) == (5, 8)
    learner.close(flush=False)
    monkeypatch.setenv("ATOLL_RANK", "-1")
    with pytest.raises(ConfigError, match="ATOLL_RANK must be a whole number"):
        place()


def test_learners_without_a_name_never_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers of one image: the same host name, and the same process id."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert place().learner != place().learner
    assert place().learner.startswith(socket.gethostname())
    assert place(learner="paris").learner == "paris"
