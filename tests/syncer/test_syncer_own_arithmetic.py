"""A real syncer and real learners with a codec, a merge, an outer optimizer and a pacing of a user's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cluster import SyncerProcess, TrainingThread, check_books, small_model
from toys import OWN, install, register

from atoll.core.events import PaceChanged
from atoll.observe import read_events

TESTS = Path(__file__).parent.parent
registered = pytest.fixture(autouse=True)(register)
"""In this process, which is the learners'."""


@pytest.mark.parametrize("width", [32, 1024], ids=["on the control connection", "over bulk"])
def test_processes_train_with_them_through_a_crash(tmp_path: Path, width: int) -> None:
    install(tmp_path)  # for the syncer's process
    path = os.pathsep.join([str(tmp_path), str(TESTS), os.environ.get("PYTHONPATH", "")])
    options = [word for name, value in OWN.items() for word in (f"--{name.replace('_', '-')}", value)]
    syncer = SyncerProcess(
        tmp_path, "--learners", "2", "--sync-every", "4", "--fragments", "2", *options, PYTHONPATH=path
    )
    threads = [TrainingThread(syncer.address, f"t{i}", seed=i, model=small_model(width)) for i in range(2)]
    status = syncer.wait_for(lambda s: min(s["versions"], default=0) >= 3, "versions are made")
    syncer.kill()
    syncer.again(PYTHONPATH=path)
    syncer.wait_for(lambda s: min(s["versions"], default=0) >= max(status["versions"]) + 3, "the run goes on")
    for thread in threads:
        thread.stop()
        assert thread.error is None, thread.error
        assert thread.learner._machine.config.codec_up == "toy-sparse"
    check_books(syncer.status())
    assert syncer.stop() == 0
    paced = [event for _, _, event in read_events(tmp_path) if isinstance(event, PaceChanged)]
    # The syncer after the crash begins with `sync_every` again. What the first one said may have died with it.
    assert {(event.fragment, event.period, event.reason) for event in paced} == {
        (fragment, 8, "the run is under way") for fragment in range(2)
    }
