"""The seam for faults on purpose: one's own trouble behind it, without anything of the storms."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

from launch_fakes import command, folder_in, supervisor

from atoll.launch.faults import FaultInjection, NoFaults, SupervisedRun
from atoll.launch.plan import LaunchPlan, RestartPolicy
from atoll.launch.process import Command
from atoll.observe.faults import InjectedFault


class OneKill(NoFaults):
    """Kills learner-0 once it has made a step, and marks every process that it may reach."""

    def __init__(self) -> None:
        self.injected: list[InjectedFault] = []
        self.told: list[str] = []

    def attach(self, run: SupervisedRun) -> None:
        self.run = run

    def place(self, command: Command) -> Command:
        return replace(command, environment={**command.environment, "MARKED": "yes"})

    def open(self) -> None:
        syncer = self.run.syncer()
        self.told.append(f"open, syncer {'up' if syncer is not None else 'down'} at {self.run.syncer_address()}")

    def tick(self, progress: float, now_ns: int, *, begun: bool) -> None:
        child = self.run.slots["learner-0"].child
        if begun and not self.injected and child is not None:
            os.kill(child.pid, signal.SIGKILL)
            self.injected.append(InjectedFault("kill", "learner-0", 0.0))

    def finish(self) -> None:
        self.told.append("finish")

    def close(self) -> None:
        self.told.append("close")


def test_trouble_of_ones_own_stands_behind_the_seam(tmp_path: Path) -> None:
    folder, trouble = folder_in(tmp_path), OneKill()
    behind: FaultInjection = trouble
    learner = "joined(); stepped(5)\nassert os.environ['MARKED'] == 'yes'\nif first_time(): time.sleep(600)\n"
    plan = LaunchPlan(
        [command(folder, "learner-0", learner)],
        syncer=command(folder, "syncer", "assert os.environ['MARKED'] == 'yes'; serve()"),
        restarts=RestartPolicy(delay_s=0.05, restarts_max=1),
        faults=behind,
    )
    outcome = supervisor(folder, plan).run()
    assert (outcome.reason, outcome.restarts, outcome.given_up) == ("finished", 1, ())
    assert [(one.fault, one.target) for one in outcome.faults] == [("kill", "learner-0")]
    assert trouble.told == ["open, syncer up at 127.0.0.1:1", "finish", "close"]
