"""What the chaos executor asks of the supervisor: processes by name, learners that come and go, and files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from atoll.errors import ConfigError
from atoll.instruments.chaos import SYNCER, role_of
from atoll.instruments.storms.files import FaultFiles
from atoll.launch import Command, LearnerSlot, SupervisedRun, ask_to_leave


class ChaosControl:
    """`chaos.ProcessControl` over the supervisor's slots."""

    def __init__(self, run: SupervisedRun, files: FaultFiles, *, guest: Callable[[str], Command] | None) -> None:
        self._run = run
        self._slots = run.slots
        self._files = files
        self._guest = guest

    def pid_of(self, target: str) -> int | None:
        if target == SYNCER:
            syncer = self._run.syncer()
            return syncer.pid if syncer is not None else None
        if role_of(target) != "learner":
            part = self._run.served(target)
            return part.pid if part is not None else None
        slot = self._slots.get(target)
        return slot.child.pid if slot is not None and slot.child is not None and not slot.resting else None

    def slow_file(self, learner: str) -> Path:
        return self._files.slow(learner)

    def poison_file(self, learner: str) -> Path:
        return self._files.poison(learner)

    def lie_file(self, learner: str) -> Path:
        return self._files.lie(learner)

    def disk_full_file(self, target: str) -> Path:
        return self._files.disk_full if target == SYNCER else self._files.disk_full_of(target)

    def send_away(self, learner: str) -> bool:
        slot = self._slots.get(learner)
        if slot is None or slot.child is None or slot.over or slot.resting:
            return False
        slot.resting = True
        ask_to_leave(self._run.folder, learner, slot.child.pid)
        return True

    def bring_back(self, learner: str) -> bool:
        slot = self._slots[learner]
        if slot.over:
            return True
        if slot.child is not None:
            return False
        slot.resting = False
        self._run.start(slot)
        return True

    def add_guest(self, learner: str) -> str:
        if self._guest is None:
            return "this run takes no guests"
        if learner in self._slots and not self._slots[learner].over:
            return "a learner of that name is in the run already"
        try:
            command = self._guest(learner)
        except ConfigError as error:  # such as too few GPUs
            return str(error)
        slot = self._slots[learner] = LearnerSlot(command, guest=True)
        self._run.start(slot)
        return ""

    def end_guest(self, learner: str) -> None:
        slot = self._slots.get(learner)
        if slot is None or slot.over:
            return
        if slot.child is not None:
            ask_to_leave(self._run.folder, learner, slot.child.pid)
        else:
            slot.left, slot.restart_at_s = True, None
