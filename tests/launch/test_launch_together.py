"""Learners load their libraries while the syncer does, where nothing forbids it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch_fakes import command, folder_in, supervisor

from atoll import kernels
from atoll.errors import LaunchError
from atoll.launch.commands import FIRST_START, LISTEN
from atoll.launch.faults import NoFaults
from atoll.launch.folder import RunFolder
from atoll.launch.plan import LaunchPlan
from atoll.launch.process import Command

SERVES = """
listen = sys.argv[sys.argv.index("--listen") + 1]
import socket
with socket.socket() as port:  # as gRPC does
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind((listen.split(":")[0], int(listen.split(":")[1])))
    port.listen()
    (run / "listens").write_text("%s:%d" % port.getsockname())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if len(sys.argv) > 4:
        until(lambda: exists(sys.argv[4]))
    partial = run / "syncer.partial"
    partial.write_text(json.dumps({"address": "%s:%d" % port.getsockname(), "pid": os.getpid(), "run": "r"}))
    partial.replace(run / "syncer.json")
    time.sleep(600)
"""
SAYS = "(run / f'told-{me}').write_text(os.environ['ATOLL_SYNCER'] + str(exists('syncer.json'))); joined(); stepped(1)"


def syncer(folder: RunFolder, *more: str) -> Command:
    return command(folder, "syncer", SERVES, "--listen", LISTEN, FIRST_START, *more)


@pytest.fixture(autouse=True)
def _kernels_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "are_stored", lambda: True)


def test_learners_are_started_before_the_syncer_serves_and_know_where_it_will(tmp_path: Path) -> None:
    """The syncer of this test serves only once both learners have run."""
    folder = folder_in(tmp_path)
    learners = [command(folder, f"learner-{rank}", SAYS) for rank in range(2)]
    outcome = supervisor(folder, LaunchPlan(learners, syncer=syncer(folder, "told-learner-1"))).run()
    assert (outcome.reason, outcome.restarts) == ("finished", 0)
    listens = (folder.path / "listens").read_text()
    assert listens == json.loads((folder.path / "syncer.json").read_text())["address"]
    assert {(folder.path / f"told-learner-{rank}").read_text() for rank in range(2)} == {f"{listens}False"}


@pytest.mark.parametrize("why", ["kernels", "faults", "again"])
def test_learners_wait_for_the_syncer_where_they_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Nobody has compiled the kernels, faults are to come in between, or the run had a syncer before."""

    class Others:
        """Other faults than none."""

        def __getattr__(self, name: str) -> object:
            return getattr(NoFaults(), name)

    folder = folder_in(tmp_path)
    if why == "kernels":
        monkeypatch.setattr(kernels, "are_stored", lambda: False)
    serving = syncer(folder)
    if why == "again":
        serving = command(folder, "syncer", SERVES, "--listen", LISTEN)
    faults = Others() if why == "faults" else NoFaults()
    plan = LaunchPlan([command(folder, "learner-0", SAYS)], syncer=serving, faults=faults)  # type: ignore[arg-type]
    supervisor(folder, plan).run()
    told = (folder.path / "told-learner-0").read_text()
    assert told == (folder.path / "listens").read_text() + "True"


def test_a_syncer_that_cannot_start_ends_the_run_and_those_who_were_early(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    dies = command(folder, "syncer", "until(lambda: exists('early')); sys.exit(3)", "--listen", LISTEN, FIRST_START)
    waits = command(folder, "learner-0", "(run / 'early').write_text(str(os.getpid())); time.sleep(600)")
    with pytest.raises(LaunchError, match="ended before anybody could join"):
        supervisor(folder, LaunchPlan([waits], syncer=dies)).run()
    assert not Path(f"/proc/{(folder.path / 'early').read_text()}").exists()
