"""A syncer that dies is started again, at the same address, while the learners go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch_fakes import alive, command, folder_in, supervisor

from atoll.errors import LaunchError
from atoll.instruments.chaos import Fault
from atoll.instruments.storms.injection import PlannedFaults
from atoll.launch.folder import RunFolder
from atoll.launch.keeper import once_more
from atoll.launch.plan import LaunchPlan, SyncerPolicy
from atoll.launch.process import Command
from atoll.observe import read_events
from atoll.observe.events import FaultInjected, ProcessExited, ProcessStarted

QUICK = SyncerPolicy(delay_s=0.05, delay_s_max=0.1, early_deaths_max=3)
KILLS = "joined(); stepped(10)\nfor _ in range(int(sys.argv[1])): kill_syncer()\nstepped(10)\n"


def plan(
    folder: RunFolder, syncer: str, learner: str = KILLS, *arguments: str, policy: SyncerPolicy = QUICK
) -> LaunchPlan:
    return LaunchPlan(
        [command(folder, "learner-0", learner, *(arguments or ("1",)))],
        syncer=command(folder, "syncer", syncer),
        syncer_restarts=policy,
    )


def of_syncer(folder: RunFolder, kind: type) -> list[object]:
    return [event for _, _, event in read_events(folder.path) if isinstance(event, kind) and event.id == "syncer"]


def test_a_killed_syncer_comes_back_and_the_run_says_so(tmp_path: Path) -> None:
    folder, said = folder_in(tmp_path), list[str]()
    supervised = supervisor(folder, plan(folder, "serve()", KILLS, "2"), said)
    outcome = supervised.run()
    supervised._writer.close()
    assert (outcome.reason, outcome.restarts, outcome.syncer_restarts) == ("finished", 0, 2)
    assert said[0] == "syncer: killed by SIGKILL; learners train on; restarting it now"
    assert any("restarting it in 0.05 s" in line for line in said)  # the second time
    assert "syncer is back (restart 1)" in said and "syncer is back (restart 2)" in said
    assert folder.model_file.exists()
    started, exited = of_syncer(folder, ProcessStarted), of_syncer(folder, ProcessExited)
    assert len({event.pid for event in started if isinstance(event, ProcessStarted)}) == 3
    assert [event.code for event in exited if isinstance(event, ProcessExited)] == [-9, -9, 0]
    assert "--- restart 2 ---" in folder.log_file("syncer", "syncer").read_text()


def test_the_new_syncer_is_listed_and_gets_the_address_that_the_learners_know(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    notes = "(run / f'listen-{os.getpid()}').write_text(sys.argv[-1]); serve()"
    learner = (
        KILLS
        + "(run / 'pid').write_text(str(syncer_pid())); (run / 'list').write_text((run / 'processes.json').read_text())"
    )
    syncer = command(folder, "syncer", notes, "--listen", "127.0.0.1:0")
    learners = [command(folder, "learner-0", learner, "1")]
    supervisor(folder, LaunchPlan(learners, syncer=syncer, syncer_restarts=QUICK)).run()
    second = (folder.path / "pid").read_text()
    told = {path.name: path.read_text() for path in folder.path.glob("listen-*")}
    assert told.pop(f"listen-{second}") == "127.0.0.1:1"  # what the fake had announced
    assert list(told.values()) == ["127.0.0.1:0"]
    listed = json.loads((folder.path / "list").read_text())
    assert [str(e["pid"]) for e in listed if e["role"] == "syncer"] == [second]


def test_a_first_start_is_the_first_only_once() -> None:
    first = Command("syncer", "syncer", ("atoll", "--listen", "127.0.0.1:0", "--first-start", "--stay"), {})
    assert list(once_more(first, "127.0.0.1:9").argv) == ["atoll", "--listen", "127.0.0.1:9", "--stay"]


def test_a_command_without_an_address_stays_as_it_is() -> None:
    plain = Command("syncer", "syncer", ("atoll", "--listen"), {})
    assert list(once_more(plain, "127.0.0.1:9").argv) == ["atoll", "--listen"]


def test_the_old_syncers_file_does_not_pass_for_the_new_ones(tmp_path: Path) -> None:
    """The second syncer is slow to serve; it is not back before its own pid is in syncer.json."""
    folder, said = folder_in(tmp_path), list[str]()
    slow = "if not first_time(): until(lambda: exists('go'))\nserve()"
    learner = "joined(); old = syncer_pid(); os.kill(old, 9)\n"
    learner += "until(lambda: len(list((run / 'events').glob('launcher*'))) and exists('second'))\n"
    learner += "assert syncer_pid() == old; time.sleep(0.3); (run / 'go').touch(); until(lambda: syncer_pid() != old)"
    slow = slow.replace("if not first_time():", "if not first_time(): (run / 'second').touch();")
    outcome = supervisor(folder, plan(folder, slow, learner), said).run()
    assert (outcome.reason, outcome.syncer_restarts) == ("finished", 1)
    assert said[-1] == "syncer is back (restart 1)"


def test_a_syncer_that_cannot_start_again_ends_the_run_with_its_log_and_the_way_on(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    broken = "if not first_time(): sys.exit('the state is broken')\nserve()"
    with pytest.raises(LaunchError, match=r"(?s)died 3 times before it served.*atoll resume .*the state is broken"):
        supervisor(folder, plan(folder, broken)).run()
    pids = [entry["pid"] for entry in json.loads(folder.processes_file.read_text()) if entry["role"] != "launcher"]
    assert not any(alive(pid) for pid in pids)


def test_restarts_are_bounded_but_a_calm_stretch_starts_the_count_anew(tmp_path: Path) -> None:
    policy = SyncerPolicy(delay_s=0.02, restarts_max=2, calm_s=600.0)
    folder = folder_in(tmp_path / "restless")
    with pytest.raises(LaunchError, match="the syncer died 3 times"):
        supervisor(folder, plan(folder, "serve()", KILLS, "9", policy=policy)).run()
    folder = folder_in(tmp_path / "calm")
    calm = SyncerPolicy(delay_s=0.02, restarts_max=2, calm_s=0.0)
    outcome = supervisor(folder, plan(folder, "serve()", KILLS, "4", policy=calm)).run()
    assert outcome.syncer_restarts == 4


def test_a_syncer_that_was_fenced_out_is_not_restarted(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    fenced = "import threading\ndef leave():\n    until(lambda: exists('fence'))\n    os._exit(3)\n"
    fenced += "threading.Thread(target=leave).start()\nserve()"
    with pytest.raises(LaunchError, match="a newer syncer has taken over"):
        supervisor(folder, plan(folder, fenced, "joined(); (run / 'fence').touch(); time.sleep(600)")).run()
    assert "restart" not in folder.log_file("syncer", "syncer").read_text()


def test_a_syncer_that_somebody_stops_ends_the_run(tmp_path: Path) -> None:
    folder, said = folder_in(tmp_path), list[str]()
    stops = "joined(); os.kill(syncer_pid(), 15); time.sleep(600)"
    outcome = supervisor(folder, plan(folder, "serve()", stops), said).run()
    assert (outcome.reason, outcome.interrupted, outcome.syncer_restarts) == ("SIGTERM", True, 0)
    assert any("the run ends here" in line for line in said)


def test_a_syncer_that_hangs_while_starting_again_is_killed(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    policy = SyncerPolicy(delay_s=0.02, ready_s_max=8.0, early_deaths_max=2)
    hangs = "if not first_time() and not exists('hung'): (run / 'hung').touch(); time.sleep(600)\nserve()"
    outcome = supervisor(folder, plan(folder, hangs, KILLS, "1", policy=policy)).run()
    assert outcome.syncer_restarts == 2


def test_the_run_does_not_end_while_its_syncer_is_down(tmp_path: Path) -> None:
    """The last learner ends while nobody is there to write the model: it is waited for."""
    folder = folder_in(tmp_path)
    outcome = supervisor(folder, plan(folder, "serve()", "joined(); os.kill(syncer_pid(), 9)")).run()
    assert (outcome.reason, outcome.syncer_restarts) == ("finished", 1)
    assert folder.model_file.exists()


def test_a_fault_may_hit_the_syncer(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    waits = "joined(); old = syncer_pid(); stepped(60); until(lambda: syncer_pid() != old)"
    faulty = LaunchPlan(
        [command(folder, "learner-0", waits)],
        syncer=command(folder, "syncer", "serve()"),
        syncer_restarts=QUICK,
        faults=PlannedFaults([Fault("kill", "syncer", at_progress=0.5)], folder),
        tokens_budget=100,
    )
    supervised = supervisor(folder, faulty)
    outcome = supervised.run()
    supervised._writer.close()
    assert [(fault.fault, fault.target) for fault in outcome.faults] == [("kill", "syncer")]
    injected = [event for _, _, event in read_events(folder.path) if isinstance(event, FaultInjected)]
    assert [event.target for event in injected] == ["syncer"]
    assert outcome.syncer_restarts == 1
