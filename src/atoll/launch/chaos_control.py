"""What the chaos executor asks of the supervisor: processes by name, learners that come and go, files, and links."""

from __future__ import annotations

import signal
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.chaos import Fault
from atoll.chaos.proxy import ChaosProxy
from atoll.chaos.weather import Weather
from atoll.errors import LaunchError
from atoll.launch.folder import RunFolder, write_text
from atoll.launch.keeper import SyncerKeeper
from atoll.launch.plan import ChaosOptions
from atoll.launch.process import Child, Command, send_signal
from atoll.launch.running import training_pid
from atoll.launch.slot import Slot


def exposed(command: Command, folder: RunFolder, options: ChaosOptions | None) -> Command:
    """The same command with an environment in which faults can reach it; unchanged in a run without chaos."""
    if options is None:
        return command
    if command.role == "syncer":
        more = {"ATOLL_DISK_FULL_FILE": str(folder.disk_full_file)}
    else:
        more = {"ATOLL_POISON_FILE": str(folder.poison_file(command.id))}
    return replace(command, environment={**command.environment, **more})


class ChaosControl:
    """`chaos.ProcessControl` over the supervisor's slots. Everything happens on the supervisor's thread."""

    def __init__(
        self,
        slots: MutableMapping[str, Slot],
        keeper: Callable[[], SyncerKeeper | None],
        *,
        folder: RunFolder,
        start: Callable[[Slot], None],
        options: ChaosOptions | None,
    ) -> None:
        self._slots = slots
        self._keeper = keeper
        self._folder = folder
        self._start = start
        self._options = options

    def pid_of(self, target: str) -> int | None:
        if target == "syncer":
            keeper = self._keeper()
            return keeper.child.pid if keeper is not None and keeper.child is not None and keeper.serving else None
        slot = self._slots.get(target)
        return slot.child.pid if slot is not None and slot.child is not None and not slot.resting else None

    def slow_file(self, learner: str) -> Path:
        return self._folder.slow_file(learner)

    def poison_file(self, learner: str) -> Path:
        return self._folder.poison_file(learner)

    def disk_full_file(self) -> Path:
        return self._folder.disk_full_file

    def send_away(self, learner: str) -> bool:
        slot = self._slots.get(learner)
        if slot is None or slot.child is None or slot.over or slot.resting:
            return False
        slot.resting = True
        ask_to_leave(self._folder, slot.child)
        return True

    def bring_back(self, learner: str) -> bool:
        slot = self._slots[learner]
        if slot.over:
            return True
        if slot.child is not None:
            return False
        slot.resting = False
        self._start(slot)
        return True

    def add_guest(self, learner: str) -> str:
        if self._options is None or self._options.guest is None:
            return "this run takes no guests"
        if learner in self._slots and not self._slots[learner].over:
            return "a learner of that name is in the run already"
        slot = self._slots[learner] = Slot(self._options.guest(learner), guest=True)
        self._start(slot)
        return ""

    def end_guest(self, learner: str) -> None:
        slot = self._slots.get(learner)
        if slot is None or slot.over:
            return
        if slot.child is not None:
            ask_to_leave(self._folder, slot.child)
        else:
            slot.left, slot.restart_at_s = True, None


def ask_to_leave(folder: RunFolder, child: Child) -> None:
    """As `atoll leave` does. The file tells the supervisor that its end is no failure, and not to ask again."""
    write_text(folder.leave_file(child.id), f"{child.pid}\n")
    send_signal(training_pid(folder, child.id, child.pid), signal.SIGTERM)


def asked_to_leave(folder: RunFolder, child: Child) -> bool:
    """Whether this very process was asked: a second SIGTERM would cut its hand-over short."""
    try:
        return folder.leave_file(child.id).read_text().strip() == str(child.pid)
    except OSError:
        return False


class ProxyLinks:
    """`chaos.Links`: a proxy in front of the syncer with a port for each learner."""

    def __init__(self, seed: int) -> None:
        self._proxy = ChaosProxy(seed=seed)
        self._addresses: dict[str, str] = {}

    def start(self, upstream: Callable[[], str]) -> None:
        """`upstream` gives the syncer's address, HOST:PORT, at any time: it keeps it through restarts."""
        try:
            self._proxy.start(lambda: _split(upstream()))
        except OSError as error:
            raise LaunchError(
                f"the chaos proxy cannot listen ({error}); free some ports, or use --chaos none"
            ) from error

    def address(self, learner: str) -> str:
        """Where a learner finds the syncer: a port of its own, the same through all its restarts."""
        if learner not in self._addresses:
            host, port = self._proxy.add(learner)
            self._addresses[learner] = f"{host}:{port}"
        return self._addresses[learner]

    def place(self, command: Command) -> Command:
        """The learner's command, so that it runs where its link is: here, that is anywhere on this machine."""
        return command

    def hold(self, learner: str, faults: Sequence[Fault]) -> None:
        self._proxy.set(learner, Weather.of(faults))

    def cut(self, learner: str) -> None:
        self._proxy.cut(learner)

    def close(self) -> None:
        self._proxy.close()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port or 0)
