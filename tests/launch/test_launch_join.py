"""Learners that leave a running job and join it, with real processes that only pretend to train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from launch_fakes import HELPERS, WAIT_S_MAX, InThread, alive, command, folder_in, supervisor, wait_for
from typer.testing import CliRunner

from atoll.app import app
from atoll.core.messages import ASKED_TO_LEAVE
from atoll.errors import ConfigError, LaunchError, UnreachableError
from atoll.launch import local
from atoll.launch.config import resolved, run_config, train_config
from atoll.launch.folder import RunFolder
from atoll.launch.join import join_run, leave_run, not_handed_over, run_is_over
from atoll.launch.plan import LEFT, LaunchPlan, RestartPolicy, RunOutcome
from atoll.launch.process import Command
from atoll.launch.running import Listed, joined_processes, listed, main_processes, started_mark, training_pid
from atoll.launch.watch import RunWatch
from atoll.learner import EXIT_NOT_HANDED_OVER
from atoll.observe import EventWriter
from atoll.observe.events import LearnerFinished

QUICK = RestartPolicy(delay_s=0.05, early_delay_s=0.05, restarts_max=3)
POLITE = "leaves_politely(); joined(); stepped(10)\n"
UNTIL_THE_END = POLITE + "until(lambda: exists('end'))\nfinished('the budget is spent')\n"


def start(folder: RunFolder, *programs: str, **more: Any) -> tuple[InThread, list[str]]:
    """A run with a fake syncer and these learners, going on in a thread until its learners end."""
    said = list[str]()
    learners = [command(folder, f"learner-{rank}", program) for rank, program in enumerate(programs)]
    plan = LaunchPlan(learners, syncer=command(folder, "syncer", "serve()"), restarts=QUICK, **more)
    thread = InThread(supervisor(folder, plan, said).run)
    wait_for(lambda: all(list(folder.events.glob(f"learner-{one.id}-*")) for one in learners))
    wait_for(lambda: {one.id for one in main_processes(folder)} >= {one.id for one in learners})
    return thread, said


def pid_of(folder: RunFolder, id: str) -> int:
    return next(int(e["pid"]) for e in json.loads(folder.processes_file.read_text()) if e["id"] == id)


# ---------------------------------------------------------------- leaving


@pytest.mark.parametrize("how", ["atoll leave", "SIGTERM"])
def test_a_learner_that_leaves_is_not_restarted_and_the_others_go_on(tmp_path: Path, how: str) -> None:
    folder = folder_in(tmp_path)
    # Were its end taken for the run's, learner-0 would be stopped half a second later, long before it ends by itself.
    lasts = UNTIL_THE_END.replace(
        "exists('end')", "exists('end') and time.time() > (run / 'end').stat().st_mtime + 1.5"
    )
    run, said = start(folder, lasts, UNTIL_THE_END, straggle_s_max=0.5)
    pid = pid_of(folder, "learner-1")
    if how == "SIGTERM":
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not alive(pid))
    else:
        assert leave_run(folder.path, "learner-1").pid == pid
    wait_for(lambda: any("learner-1 left" in line for line in said))
    (folder.path / "end").touch()
    outcome: RunOutcome = run.result()
    assert (outcome.reason, outcome.left, outcome.given_up, outcome.restarts) == ("finished", ("learner-1",), (), 0)


def test_a_learner_that_its_syncer_asked_to_leave_is_gone_for_good(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events" / "learner-1.jsonl") as writer:
        writer.emit(LearnerFinished("learner-1", 10, 100, ASKED_TO_LEAVE))
        writer.emit(LearnerFinished("learner-2", 10, 100, "finished"))
    watch = RunWatch(tmp_path, tokens_budget=0)
    watch.poll()
    assert watch.gone_for_good("learner-1", 0) == "left as it was asked to" and not watch.gone_for_good("learner-2", 0)


def test_a_learner_that_dies_of_being_asked_has_left_all_the_same(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    rude = "joined(); stepped(10); until(lambda: exists('end'))"
    run, _ = start(folder, UNTIL_THE_END, rude)
    leave_run(folder.path, "learner-1")
    wait_for(lambda: not folder.leave_file("learner-1").exists())
    (folder.path / "end").touch()
    outcome: RunOutcome = run.result()
    assert (outcome.left, outcome.restarts) == (("learner-1",), 0)


def test_who_asked_a_learner_to_leave_hears_what_it_could_not_hand_over(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    thin = "signal.signal(signal.SIGTERM, lambda *_: (finished('SIGTERM', unhanded=77), os._exit(4)))\n"
    run, _ = start(folder, UNTIL_THE_END, thin + "joined(); stepped(10); until(lambda: exists('end'))")
    wait_for(lambda: any(folder.events.glob("learner-learner-1-*")))
    assert not_handed_over(folder.path, "learner-1") == 0
    left = CliRunner().invoke(app, ["leave", str(folder.path), "learner-1"])
    assert left.exit_code == EXIT_NOT_HANDED_OVER and "without handing over 77 tokens" in left.output
    (folder.path / "end").touch()
    assert run.result().unhanded == {"learner-1": 77}


def test_an_old_request_to_leave_does_not_reach_the_next_process(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder.leave_file("learner-0").write_text("1\n")
    dies_once = "joined()\nif first_time(): os._exit(1)\n"
    plan = LaunchPlan(
        [command(folder, "learner-0", dies_once)], syncer=command(folder, "syncer", "serve()"), restarts=QUICK
    )
    outcome = supervisor(folder, plan).run()
    assert (outcome.left, outcome.restarts) == ((), 1)


def test_a_learner_whose_name_another_process_took_is_not_restarted(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    fenced = "joined(); finished('FencedError: another process joined as learner-1'); os._exit(1)"
    run, said = start(folder, UNTIL_THE_END, fenced)
    wait_for(lambda: any("learner-1 was replaced" in line for line in said))
    (folder.path / "end").touch()
    assert run.result().restarts == 0


def test_when_all_have_left_the_run_stops_and_is_not_done(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    run, _ = start(folder, UNTIL_THE_END, UNTIL_THE_END)
    for rank in range(2):
        leave_run(folder.path, f"learner-{rank}")
    outcome: RunOutcome = run.result()
    assert (outcome.reason, outcome.interrupted) == (LEFT, True)
    assert outcome.left == ("learner-0", "learner-1")


def test_only_learners_that_run_here_can_be_asked(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder.write_processes([listed("learner", "learner-0", os.getpid()).entry()])
    with pytest.raises(LaunchError, match=r"no learner 'paris'.*learner-0.*SIGTERM"):
        leave_run(folder.path, "paris")
    # The same pid, used again by another process.
    folder.write_processes([Listed("learner", "learner-0", os.getpid(), "1").entry()])
    with pytest.raises(LaunchError, match="none is running here"):
        leave_run(folder.path, "learner-0")


def test_a_learner_that_does_not_go_is_named(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    run, _ = start(folder, "signal.signal(signal.SIGTERM, signal.SIG_IGN); joined(); until(lambda: exists('end'))")
    with pytest.raises(LaunchError, match=r"learner-0 \(pid \d+\).*not ended.*kill -9"):
        leave_run(folder.path, "learner-0", wait_s=0.3)
    (folder.path / "end").touch()
    run.result()


def test_only_the_process_that_trains_is_signalled(tmp_path: Path) -> None:
    """The command may be a wrapper, and a learner has helpers, such as those of a DataLoader, which it still needs."""
    folder = folder_in(tmp_path)
    helper = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: open('told', 'w'))\n"
    helper += "print(flush=True)\ntime.sleep(600)"
    trains = f"import subprocess\nhelper = subprocess.Popen([sys.executable, '-c', {helper!r}], cwd=run, stdout=-1)\n"
    trains += "helper.stdout.readline()\n" + UNTIL_THE_END
    wrapper = f"import subprocess; sys.exit(subprocess.run([sys.executable, '-c', {HELPERS + trains!r}]).returncode)"
    run, _ = start(folder, UNTIL_THE_END, wrapper)
    leader = pid_of(folder, "learner-1")
    assert training_pid(folder, "learner-1", leader) != leader
    leave_run(folder.path, "learner-1")
    assert not (folder.path / "told").exists()
    (folder.path / "end").touch()
    assert run.result().left == ("learner-1",)


# ---------------------------------------------------------------- joining


def in_the_run(*ids: str, **states: str) -> Any:
    """Stands for asking the syncer."""
    members: Mapping[str, str] = {**dict.fromkeys(ids, "active"), **{k.replace("_", "-"): v for k, v in states.items()}}
    return lambda address, token: members


def told_as_a_script(folder: RunFolder, script: Path, *, learners: int = 2) -> None:
    """Make the folder look as if `atoll run` had started the script in it."""
    config = run_config({"learners": learners, "threads": 1})
    command = [sys.executable, str(script)]
    folder.write_config(config.options(), {**resolved(config), "command": command, "started_in": str(folder.path)})
    folder.write_token("secret")
    folder.syncer_file.write_text(json.dumps({"address": "127.0.0.1:1", "pid": 1, "run": "r"}))


def script(path: Path, program: str) -> Path:
    path.write_text(HELPERS + program)
    return path


def test_a_learner_is_replaced_by_a_newer_build_while_the_rest_goes_on(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    says = "(run / 'builds').open('a').write(os.environ['ATOLL_RANK'] + ' {}\\n')\n"
    program = script(tmp_path / "train.py", says.format("old") + UNTIL_THE_END)
    environment = f"os.environ['ATOLL_RANK'] = me[-1]; exec(open({str(program)!r}).read())"
    run, _ = start(folder, environment, environment)
    told_as_a_script(folder, program)
    leave_run(folder.path, "learner-1")
    script(program, says.format("new") + UNTIL_THE_END)
    join = InThread(lambda: join_run(folder.path, id="learner-1", members=in_the_run("learner-0", learner_1="left")))
    wait_for(lambda: "new" in (folder.path / "builds").read_text())
    (folder.path / "end").touch()
    joined, ids = join.result()
    outcome: RunOutcome = run.result()
    assert sorted((folder.path / "builds").read_text().split("\n")) == ["", "0 old", "1 new", "1 old"]
    assert (ids, joined.reason, joined.restarts) == (["learner-1"], "finished", 0)
    assert (outcome.reason, outcome.left, outcome.restarts) == ("finished", ("learner-1",), 0)


def test_joiners_get_free_ids_and_are_told_who_they_are(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    tells = "(run / f'told-{me}').write_text(json.dumps(dict(os.environ))); joined()"
    told_as_a_script(folder, script(tmp_path / "train.py", tells))
    folder.write_processes([listed("learner", "learner-1", os.getpid()).entry()])  # starting, and not a member yet
    members = in_the_run("learner-0", "paris", learner_2="left")
    outcome, ids = join_run(folder.path, learners=2, threads=3, members=members)
    assert (ids, outcome.reason) == (["learner-3", "learner-4"], "finished")
    told = json.loads((folder.path / "told-learner-3").read_text())
    assert (told["ATOLL_RANK"], told["ATOLL_WORLD"], told["ATOLL_LEARNER"]) == ("3", "4", "learner-3")
    assert (told["ATOLL_SYNCER"], told["ATOLL_TOKEN"], told["OMP_NUM_THREADS"]) == ("127.0.0.1:1", "secret", "3")
    assert joined_processes(folder) == []
    assert list(folder.path.glob("processes-*")) == []


def test_joiners_keep_their_seats_until_they_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_in(tmp_path)
    told_as_a_script(folder, script(tmp_path / "train.py", "joined()"))
    taken: list[set[str]] = []

    class Watched(local.Child):
        def __init__(self, command: Command, log_file: Path) -> None:
            taken.append({one.id for one in joined_processes(folder)} - {"join"})
            super().__init__(command, log_file)

    monkeypatch.setattr(local, "Child", Watched)
    join_run(folder.path, learners=3, members=in_the_run())
    assert taken == [{"learner-0", "learner-1", "learner-2"}] * 3


def test_joiners_of_a_training_run_are_the_same_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_in(tmp_path)
    config, _ = train_config({"learners": 2, "model": "nano"})
    folder.write_config(config.options(), resolved(config))
    folder.syncer_file.write_text(json.dumps({"address": "127.0.0.1:1", "pid": 1, "run": "r"}))
    worker = script(tmp_path / "worker.py", "joined(); (run / 'argument').write_text(sys.argv[-1])")
    monkeypatch.setattr(
        "atoll.launch.join.worker_argv", lambda folder: [sys.executable, str(worker), str(folder.path / "worker.json")]
    )
    outcome, _ = join_run(folder.path, members=in_the_run("learner-0", "learner-1"))
    assert outcome.reason == "finished"
    assert (folder.path / "argument").read_text() == str(folder.path / "worker.json")


def test_a_dead_joiner_is_restarted_but_not_into_a_run_that_is_over(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder.write_processes([listed("syncer", "syncer", os.getpid()).entry()])
    program = "joined()\nif first_time(): os._exit(1)\n(run / 'result.json').touch()\nos._exit(1)\n"
    told_as_a_script(folder, script(tmp_path / "train.py", program))
    assert not run_is_over(folder)
    said = list[str]()
    outcome, _ = join_run(folder.path, members=in_the_run(), say=said.append)
    assert (outcome.reason, outcome.restarts, outcome.given_up) == ("finished", 1, ())
    assert any("the run is over, so it is not restarted" in line for line in said)


JOINER = """
import sys
from pathlib import Path
from atoll.launch.join import join_run
outcome, ids = join_run(Path(sys.argv[1]), learners=2, members=lambda address, token: {})
print(outcome.reason, *ids, *outcome.given_up)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_makes_the_joiners_leave(tmp_path: Path, number: signal.Signals) -> None:
    folder = folder_in(tmp_path)
    told_as_a_script(folder, script(tmp_path / "train.py", UNTIL_THE_END))
    joiner = subprocess.Popen([sys.executable, "-c", JOINER, str(folder.path)], stdout=subprocess.PIPE, text=True)
    wait_for(lambda: len(list(folder.events.glob("learner-learner-*"))) == 2)
    wait_for(lambda: [one.role for one in joined_processes(folder)] == ["join", "learner", "learner"])
    pids = [one.pid for one in joined_processes(folder)]
    joiner.send_signal(number)
    output, _ = joiner.communicate(timeout=WAIT_S_MAX)
    assert output.split() == [number.name, "learner-0", "learner-1"]
    assert not any(alive(pid) for pid in pids)
    for path in folder.events.glob("learner-learner-*"):
        assert '"reason": "SIGTERM"' in path.read_text()


def test_a_join_that_was_killed_leaves_a_list_that_is_cleared_away(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    stale = folder.path / "processes-99.json"
    folder.write_processes([Listed("learner", "learner-0", os.getpid(), "1").entry()], stale)
    told_as_a_script(folder, script(tmp_path / "train.py", "joined()"))
    _, ids = join_run(folder.path, members=in_the_run())
    assert ids == ["learner-0"]
    assert not stale.exists()


def refuse(address: str, token: str) -> Mapping[str, str]:
    raise UnreachableError("nobody answers; check its log")


def test_what_cannot_be_joined_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    with pytest.raises(LaunchError, match=r"no run of .*config.json"):
        join_run(folder.path)
    told_as_a_script(folder, script(tmp_path / "train.py", "joined()"))
    with pytest.raises(LaunchError, match=r"learner-0 is in the run already \(active\).*atoll leave"):
        join_run(folder.path, id="learner-0", members=in_the_run("learner-0"))
    with pytest.raises(LaunchError, match=r"nobody answers.*atoll resume"):
        join_run(folder.path, members=refuse)
    with pytest.raises(ConfigError, match="1 with --id"):
        join_run(folder.path, id="paris", learners=2)
    with pytest.raises(ConfigError, match="part of a file name"):
        join_run(folder.path, id="../paris", members=in_the_run())
    folder.result_file.touch()
    with pytest.raises(LaunchError, match="is finished"):
        join_run(folder.path, members=in_the_run())
    folder.result_file.unlink()
    folder.write_processes([listed("seat", "paris", os.getpid()).entry()], folder.path / "processes-1.json")
    with pytest.raises(LaunchError, match=r"paris is in the run already \(pid \d+\)"):
        join_run(folder.path, id="paris", members=in_the_run())


def test_a_syncer_by_hand_and_methods_without_one_cannot_be_joined(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder.syncer_file.write_text("{}")
    with pytest.raises(LaunchError, match=r"started by hand.*ATOLL_SYNCER"):
        join_run(folder.path)
    config, _ = train_config({"method": "dp", "model": "nano"})
    folder.write_config(config.options(), resolved(config))
    with pytest.raises(LaunchError, match="method dp"):
        join_run(folder.path)


def test_a_process_is_known_by_its_start_as_well_as_its_number() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    one = listed("learner", "learner-0", process.pid)
    assert one.alive and one.started == started_mark(process.pid) != ""
    assert not Listed("learner", "learner-0", process.pid, "12").alive
    process.kill()
    wait_for(lambda: not one.alive)  # not even as a zombie that nobody has waited for
    process.wait()
    assert not one.alive
