"""The supervisor with real processes that only pretend to train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launch_fakes import WAIT_S_MAX, alive, command, folder_in, supervisor, wait_for

from atoll.errors import LaunchError
from atoll.instruments.chaos import Fault
from atoll.instruments.storms.injection import PlannedFaults
from atoll.launch import local
from atoll.launch.folder import RunFolder
from atoll.launch.plan import LaunchPlan, RestartPolicy
from atoll.launch.running import main_processes
from atoll.launch.slot import LearnerSlot
from atoll.launch.watch import RunWatch
from atoll.observe import EventWriter, read_events
from atoll.observe.events import FaultEnded, FaultInjected, ProcessExited, ProcessStarted, SyncerStats

QUICK = RestartPolicy(delay_s=0.05, early_delay_s=0.05, restarts_max=3)


def events_of(folder: RunFolder, kind: type) -> list[object]:
    return [event for _, _, event in read_events(folder.path) if isinstance(event, kind)]


def pids_of(folder: RunFolder) -> list[int]:
    entries = json.loads(folder.processes_file.read_text())
    return [entry["pid"] for entry in entries if entry["role"] != "launcher"]


def test_a_run_starts_all_ends_all_and_the_syncer_gets_to_write_its_model(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    learners = [command(folder, f"learner-{i}", "joined(); stepped(10)") for i in range(3)]
    supervised = supervisor(folder, LaunchPlan(learners, syncer=command(folder, "syncer", "serve()")))
    outcome = supervised.run()
    assert outcome.reason == "finished"
    assert outcome.given_up == outcome.silent == ()
    assert outcome.syncer_code == 0
    assert folder.model_file.read_text() == "the model"
    entries = json.loads(folder.processes_file.read_text())
    assert [(e["role"], e["id"]) for e in entries] == [
        ("launcher", "launcher"),
        ("syncer", "syncer"),
        ("learner", "learner-0"),
        ("learner", "learner-1"),
        ("learner", "learner-2"),
    ]
    assert not any(alive(pid) for pid in pids_of(folder))


def test_starts_and_exits_are_in_the_events(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    supervised = supervisor(folder, LaunchPlan([command(folder, "learner-0", "joined()")]))
    supervised.run()
    supervised._writer.close()
    [started] = events_of(folder, ProcessStarted)
    [exited] = events_of(folder, ProcessExited)
    assert isinstance(started, ProcessStarted) and isinstance(exited, ProcessExited)
    assert (exited.role, exited.id, exited.pid, exited.code) == ("learner", "learner-0", started.pid, 0)


def test_a_learner_that_dies_is_restarted_and_the_run_says_so(tmp_path: Path) -> None:
    folder, said = folder_in(tmp_path), list[str]()
    dies_once = "joined()\nif first_time(): os.kill(os.getpid(), 9)\n"
    waits = "joined()\nwhile len(list((run / 'events').glob('learner-learner-1-*'))) < 2: time.sleep(0.02)\n"
    plan = LaunchPlan([command(folder, "learner-0", waits), command(folder, "learner-1", dies_once)], restarts=QUICK)
    outcome = supervisor(folder, plan, said).run()
    assert (outcome.reason, outcome.restarts, outcome.given_up) == ("finished", 1, ())
    assert any("learner-1: killed by SIGKILL" in line for line in said)
    assert "--- restart 1 ---" in folder.log_file("learner", "learner-1").read_text()


def test_the_restarted_pid_is_in_processes_json(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    dies_once = "joined()\nif first_time(): os._exit(3)\n(run / 'second-pid').write_text(str(os.getpid()))\n"
    supervisor(folder, LaunchPlan([command(folder, "learner-0", dies_once)], restarts=QUICK)).run()
    assert pids_of(folder) == [int((folder.path / "second-pid").read_text())]


def test_a_script_that_crashes_at_import_ends_the_run_with_the_end_of_its_log(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    learners = [command(folder, f"learner-{i}", "import no_such_module_at_all") for i in range(2)]
    plan = LaunchPlan(learners, syncer=command(folder, "syncer", "serve()"), restarts=QUICK)
    with pytest.raises(LaunchError, match=r"died 2 times before it joined(?s:.*)no_such_module_at_all"):
        supervisor(folder, plan).run()
    assert not any(alive(pid) for pid in pids_of(folder))


def test_a_learner_that_keeps_dying_after_it_joined_is_given_up_and_the_others_finish(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)

    class Heard(list[str]):
        def append(self, text: str) -> None:
            super().append(text)
            if "given up" in text:
                (folder.path / "heard").touch()

    said = Heard()
    dies = "joined(); print('the file is not there'); os._exit(1)"
    waits = "joined(); until(lambda: exists('heard'))"
    plan = LaunchPlan([command(folder, "learner-0", waits), command(folder, "learner-1", dies)], restarts=QUICK)
    outcome = supervisor(folder, plan, said).run()
    assert outcome.given_up == ("learner-1",)
    assert outcome.restarts == QUICK.fruitless_max - 1
    [text] = [line for line in said if "given up" in line]
    assert "without getting further (3 failures in a row)" in text and "the file is not there" in text


FAILURES = {
    "before its first step": ("", QUICK.fruitless_max),
    "at the same place of each process": ("stepped(10, steps=50, step=50 * n)", 1 + QUICK.fruitless_max),
    "at the same step of the run": ("stepped(10, steps=100 - n, step=500)", 1 + QUICK.fruitless_max),
}


@pytest.mark.parametrize(("program", "deaths"), FAILURES.values(), ids=FAILURES)
def test_a_script_that_fails_again_and_again_ends_the_run_with_its_last_lines(
    tmp_path: Path, program: str, deaths: int
) -> None:
    """However long it lives each time, and whatever it trains before: restarting it forever helps nobody."""
    folder = folder_in(tmp_path)
    fails = f"joined(); n = count('deaths')\n{program}\nraise ValueError('cannot save the model')"
    policy = RestartPolicy(delay_s=0.05, calm_s=0.0)
    plan = LaunchPlan([command(folder, "learner-0", fails)], restarts=policy)
    with pytest.raises(LaunchError, match=r"(?s)every learner has died.*cannot save the model"):
        supervisor(folder, plan).run()
    assert (folder.path / "deaths").stat().st_size == deaths


def test_failures_that_get_further_each_time_are_borne(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    dies = "joined(); n = count('deaths'); stepped(10, steps=n, step=n)\nif n < 7: os._exit(1)"
    plan = LaunchPlan([command(folder, "learner-0", dies)], restarts=RestartPolicy(delay_s=0.02, delay_s_max=0.02))
    outcome = supervisor(folder, plan).run()
    assert (outcome.reason, outcome.restarts, outcome.given_up) == ("finished", 6, ())


def test_kills_of_a_chaos_plan_are_not_failures_of_the_script(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    steps = "joined(); stepped(10, steps=5, step=5)\nif count('lives') <= 4: time.sleep(600)\n"
    faults = [Fault("kill", "learner-0", at_progress=n / 10) for n in (1, 2, 3, 4)]
    policy = RestartPolicy(delay_s=0.02, delay_s_max=0.02)
    plan = LaunchPlan(
        [command(folder, "learner-0", steps)], restarts=policy, faults=PlannedFaults(faults, folder), tokens_budget=100
    )
    outcome = supervisor(folder, plan).run()
    assert (len(outcome.faults), outcome.restarts, outcome.given_up) == (4, 4, ())


def test_refusals_of_a_learner_that_a_plan_makes_lie_are_not_failures_of_its_script(tmp_path: Path) -> None:
    """In a recorded storm it was given up within 20 s, and 13 of its lies were never told."""
    folder = folder_in(tmp_path)
    refused = "joined(); stepped(10, steps=5, step=5)\nif count('lives') <= 5: time.sleep(0.2); os._exit(1)\n"
    lie = Fault("lie", "learner-0", at_s=0.0, lasts_s=60.0, variant="counters", amount=1e3)
    plan = LaunchPlan(
        [command(folder, "learner-0", refused)],
        restarts=RestartPolicy(delay_s=0.02, delay_s_max=0.02),
        faults=PlannedFaults([lie], folder),
        tokens_budget=100,
    )
    outcome = supervisor(folder, plan).run()
    assert (len(outcome.faults), outcome.restarts, outcome.given_up) == (1, 5, ())


def test_a_learner_that_left_without_handing_over_is_named_and_not_restarted(tmp_path: Path) -> None:
    folder, said = folder_in(tmp_path), list[str]()
    syncer = command(folder, "syncer", "serve()")
    leaves = "joined(); stepped(10); finished('SIGTERM', unhanded=1234); (run / 'gone').touch(); sys.exit(4)"
    stays = "joined(); stepped(10); until(lambda: exists('gone'))"
    learners = [command(folder, "learner-0", stays), command(folder, "learner-1", leaves)]
    outcome = supervisor(folder, LaunchPlan(learners, syncer=syncer, restarts=QUICK), said).run()
    assert (outcome.reason, outcome.restarts, outcome.left) == ("finished", 0, ("learner-1",))
    assert outcome.unhanded == {"learner-1": 1234}
    assert any("without handing over 1,234 tokens (exit status 4)" in line for line in said)


@pytest.mark.parametrize(
    ("ends", "said_of_it"),
    [
        ("stepped(10); finished('finished', unhanded=1234); sys.exit(4)", "without handing over 1,234 tokens"),
        ("finished('finished'); sys.exit(1)", "without having trained"),
    ],
)
def test_a_script_that_ended_by_itself_and_badly_is_named_and_not_restarted(
    ends: str, said_of_it: str, tmp_path: Path
) -> None:
    folder, said = folder_in(tmp_path), list[str]()
    learners = [command(folder, "learner-0", f"joined(); {ends}"), command(folder, "learner-1", "joined(); stepped(1)")]
    plan = LaunchPlan(learners, syncer=command(folder, "syncer", "serve()"), restarts=QUICK)
    outcome = supervisor(folder, plan, said).run()
    assert (outcome.reason, outcome.restarts, outcome.given_up) == ("finished", 0, ())
    assert any(f"learner-0 ended {said_of_it} (exit status" in line for line in said)


def test_a_run_in_which_nobody_stepped_is_known_to_have_trained_nothing(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    assert not supervisor(folder, LaunchPlan([command(folder, "learner-0", "joined()")])).run().trained
    other = folder_in(tmp_path / "other")
    assert supervisor(other, LaunchPlan([command(other, "learner-0", "joined(); stepped(1)")])).run().trained


def test_a_run_is_stopped_in_order_after_its_minutes(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    learner = command(folder, "learner-0", "leaves_politely(); joined(); stepped(10); time.sleep(600)")
    plan = LaunchPlan([learner], syncer=command(folder, "syncer", "serve()"), minutes=1.5 / 60)
    outcome = supervisor(folder, plan).run()
    assert (outcome.reason, outcome.interrupted) == ("the time is up", False)
    assert folder.model_file.read_text() == "the model"


def test_a_script_that_steps_on_after_the_budget_is_told_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "DONE_S_MAX", 0.2)
    folder, said = folder_in(tmp_path), list[str]()
    spent = "event('syncer_stats', **{k: 0 for k in 'clock_step active commits rounds_open contributions_merged "
    spent += "contributions_late bytes_up bytes_down tokens_merged tokens_pending'.split()}, tokens_processed=100)\n"
    deaf = "leaves_politely(); joined()\nwhile True: stepped(10); time.sleep(0.02)"
    syncer = command(folder, "syncer", spent + "serve()")
    plan = LaunchPlan([command(folder, "learner-0", deaf)], syncer=syncer, tokens_budget=100)
    outcome = supervisor(folder, plan, said).run()
    assert outcome.reason == "finished" and any("use learner.done" in line for line in said)


def test_tokens_that_a_learner_only_claims_end_nobodys_run(tmp_path: Path) -> None:
    """The syncer counts a claim as far as it is plausible, and so does the launcher (the storm of issue 17 ended at
    half of the honest steps)."""
    with EventWriter(tmp_path / "events" / "syncer-1.jsonl") as writer:
        writer.emit(SyncerStats(8, 2, 1, 0, 1, 0, 0, 0, 1_000_000, 500_000, 500_000, tokens_spent=99))
    watch = RunWatch(tmp_path, tokens_budget=100)
    watch.poll()
    assert not watch.budget_spent
    with EventWriter(tmp_path / "events" / "syncer-2.jsonl") as writer:
        writer.emit(SyncerStats(9, 2, 1, 0, 1, 0, 0, 0, 1_000_000, 500_000, 500_000, tokens_spent=100))
    watch.poll()
    assert watch.budget_spent


def test_the_death_of_a_data_parallel_worker_ends_the_run(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    learners = [
        command(folder, "learner-0", "joined(); time.sleep(600)"),
        command(folder, "learner-1", "joined(); 1/0"),
    ]
    with pytest.raises(LaunchError, match=r"(?s)cannot be replaced.*ZeroDivisionError"):
        supervisor(folder, LaunchPlan(learners, restarts=RestartPolicy(restarts_max=0))).run()
    assert not any(alive(pid) for pid in pids_of(folder))


def test_a_syncer_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    bad = command(folder, "syncer", "sys.exit('the port is in use')")
    with pytest.raises(LaunchError, match=r"(?s)the syncer ended.*the port is in use"):
        supervisor(folder, LaunchPlan([command(folder, "learner-0", "pass")], syncer=bad)).run()
    assert [e["role"] for e in json.loads(folder.processes_file.read_text())] == ["launcher", "syncer"]


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    missing = command(folder, "learner-0", "")
    missing = type(missing)("learner", "learner-0", ("/no/such/program",), {})
    with pytest.raises(LaunchError, match="/no/such/program"):
        supervisor(folder, LaunchPlan([missing])).run()


def test_a_learner_that_never_joined_is_known_to_be_silent(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    outcome = supervisor(folder, LaunchPlan([command(folder, "learner-0", "print('hello')")])).run()
    assert outcome.silent == outcome.stayed_out == ("learner-0",)


def test_faults_hit_the_learners_at_their_moment(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    killed = "joined(); stepped(50)\nif first_time(): time.sleep(600)\n(run / 'again').touch()\n"
    slowed = "joined()\nslow = pathlib.Path(run / 'slow-learner-0')\n"
    slowed += "while not slow.exists(): time.sleep(0.02)\nassert float(slow.read_text()) == 4.0\n"
    slowed += "while not (run / 'again').exists(): time.sleep(0.02)\nstepped(50)\n"
    slowed += "while slow.exists(): time.sleep(0.02)\n"
    faults = [
        Fault("kill", "learner-1", at_progress=0.3),
        Fault("slow", "learner-0", at_progress=0.4, until_progress=0.9, amount=4.0),
    ]
    plan = LaunchPlan(
        [command(folder, "learner-0", slowed), command(folder, "learner-1", killed)],
        restarts=QUICK,
        faults=PlannedFaults(faults, folder),
        tokens_budget=150,
    )
    supervised = supervisor(folder, plan)
    outcome = supervised.run()
    supervised._writer.close()
    assert sorted((f.fault, f.target) for f in outcome.faults) == [("kill", "learner-1"), ("slow", "learner-0")]
    assert len(events_of(folder, FaultInjected)) == 2
    assert [e.target for e in events_of(folder, FaultEnded) if isinstance(e, FaultEnded)] == ["learner-0"]
    assert not (folder.path / "slow-learner-0").exists()


def test_a_learner_that_does_not_end_with_the_run_is_stopped(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    learners = [command(folder, "learner-0", "joined()"), command(folder, "learner-1", "joined(); time.sleep(600)")]
    outcome = supervisor(folder, LaunchPlan(learners, straggle_s_max=0.5)).run()
    assert outcome.given_up == ("learner-1",)
    assert not any(alive(pid) for pid in pids_of(folder))


def test_a_learner_is_not_restarted_into_a_run_that_has_ended(tmp_path: Path) -> None:
    folder, said = folder_in(tmp_path), list[str]()
    waits = "joined()\nuntil(lambda: exists('lives') and (run / 'lives').stat().st_size == 2)\ntime.sleep(0.5)\n"
    dies = "joined(); count('lives'); os._exit(1)"
    plan = LaunchPlan(
        [command(folder, "learner-0", waits), command(folder, "learner-1", dies)], restarts=RestartPolicy(delay_s=300.0)
    )
    outcome = supervisor(folder, plan, said).run()
    assert (outcome.given_up, outcome.restarts) == (("learner-1",), 1)  # the first restart is at once
    assert any("the run is ending" in line for line in said)


def test_a_run_may_go_on_in_a_thread_that_cannot_hear_signals(tmp_path: Path) -> None:
    folder, reasons = folder_in(tmp_path), list[str]()
    supervised = supervisor(folder, LaunchPlan([command(folder, "learner-0", "joined()")]))
    thread = threading.Thread(target=lambda: reasons.append(supervised.run().reason))
    thread.start()
    thread.join(WAIT_S_MAX)
    assert reasons == ["finished"]


LAUNCHER = """
import sys
from pathlib import Path
from atoll.launch.plan import LaunchPlan
from launch_fakes import command, folder_in, supervisor
folder = folder_in(Path(sys.argv[1]))
grandchild = "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if "stubborn" in sys.argv else ""
program = stubborn + grandchild + "joined(); time.sleep(600)"
learners = [command(folder, f"learner-{i}", program) for i in range(2)]
plan = LaunchPlan(learners, syncer=command(folder, "syncer", "serve()"))
print(supervisor(folder, plan).run().reason)
"""


def start_launcher(tmp_path: Path, *arguments: str) -> tuple[subprocess.Popen[str], RunFolder]:
    """A launcher in its own process whose two learners have joined and never end by themselves."""
    argv = [sys.executable, "-c", LAUNCHER, str(tmp_path), *arguments]
    launcher = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    folder = RunFolder(tmp_path / "run")
    wait_for(lambda: len(list(folder.events.glob("learner-*"))) == 2)
    wait_for(lambda: sum(one.role == "learner" for one in main_processes(folder)) == 2)
    return launcher, folder


def session_members(leaders: list[int]) -> list[int]:
    """Every live process in the sessions that these processes led, grandchildren included."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(int(entry.name)):
            try:
                if os.getsid(int(entry.name)) in leaders:
                    members.append(int(entry.name))
            except ProcessLookupError:
                continue
    return members


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_a_stopped_launcher_leaves_no_process_and_a_model(tmp_path: Path, number: int, reason: str) -> None:
    launcher, folder = start_launcher(tmp_path)
    pids = pids_of(folder)
    wait_for(lambda: len(session_members(pids)) == 5)
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=WAIT_S_MAX)
    assert output.strip() == reason
    wait_for(lambda: session_members(pids) == [])  # the kernel may still be at it
    assert folder.model_file.exists()


def test_a_second_interrupt_ends_learners_that_ignore_the_first(tmp_path: Path) -> None:
    launcher, folder = start_launcher(tmp_path, "stubborn")
    pids = pids_of(folder)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=WAIT_S_MAX)
    wait_for(lambda: session_members(pids) == [])  # the kernel may still be at it


def test_no_process_survives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    launcher, folder = start_launcher(tmp_path)
    pids = pids_of(folder)
    launcher.kill()
    launcher.communicate(timeout=WAIT_S_MAX)
    wait_for(lambda: not any(alive(pid) for pid in pids))
    for stray in session_members(pids):
        os.kill(stray, signal.SIGKILL)


def test_one_death_costs_half_a_second_of_waiting_and_many_in_a_row_are_waited_out(tmp_path: Path) -> None:
    policy, slot, pauses = RestartPolicy(), LearnerSlot(command(folder_in(tmp_path), "learner-0", "")), []
    while not slot.spent(policy):
        slot.died(policy, joined=True, lived_s=1.0)
        pauses.append(slot.pause_s(policy))
        slot.row += 1
    assert pauses[:2] == [0.0, 0.5] and 180 < sum(pauses) < 300
