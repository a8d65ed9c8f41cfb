"""Two syncers of one run on this machine: one serves, the other stands by and serves when that one is gone.

    syncer   standby        RUN/syncer.json names the process that serves
    serves   waits
    dies     serves         after 2 s; `--standby-after` if it is frozen
    waits    serves         started again, always with --standby: who was gone is the standby now

Nobody is started to serve but the very first one. Whoever dies, or finds itself overtaken, is started again to wait. If
both are gone, both wait, and the first to notice takes the run on.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from atoll.errors import LaunchError
from atoll.launch.keeper import SyncerKeeper
from atoll.launch.process import Child, Command, describe_exit
from atoll.syncer import EXIT_FENCED

STANDBY = "standby"
"""The option, and the id of the second process."""
PORTS = range(20_000, 32_000)
"""Below those that the system gives to outgoing connections: a port that is not listened on yet must stay free."""


class PairKeeper:
    """Keeps both. It can be used in place of a SyncerKeeper."""

    def __init__(self, first: PlaceKeeper, second: PlaceKeeper) -> None:
        self.places = (first, second)

    @property
    def child(self) -> Child | None:
        """Of the one that serves."""
        return next((one.child for one in self.places if one.serving), None)

    @property
    def waiting(self) -> Child | None:
        """The process that stands by."""
        return next((one.child for one in self.places if not one.serving and one.child is not None), None)

    @property
    def serving(self) -> bool:
        return any(one.serving for one in self.places)

    @property
    def stopped(self) -> bool:
        return any(one.stopped for one in self.places)

    @property
    def restarts(self) -> int:
        return sum(one.restarts for one in self.places)

    @property
    def address(self) -> str:
        """Both, as learners have them."""
        return ",".join(one.address for one in self.places)

    def lead(self, shards: Sequence[str]) -> None:
        for one in self.places:
            one.lead(shards)

    def start(self, *, hurry: Callable[[], bool]) -> None:
        """Start the first, wait until it serves, and start the second."""
        self.places[0].start(hurry=hurry)
        if not hurry():
            self.places[1].begin()

    def look(self, now_s: float) -> None:
        for one in self.places:
            one.look(now_s)

    def release(self) -> list[Child]:
        """The processes, for whoever ends them in this order: one that waits must not take over from one that ends."""
        ordered = sorted(self.places, key=lambda one: one.serving)
        return [child for one in ordered for child in one.release()]


class PlaceKeeper(SyncerKeeper):
    """One of the two places, through all processes that have it."""

    def begin(self) -> None:
        """Start it to wait; nobody waits for that."""
        self._command = waits(self._command)
        self.address = self._command.argv[self._command.argv.index("--listen") + 1]
        self.spawn()

    def _look_whether_it_serves(self, child: Child, now_s: float) -> None:
        if not waiting(self._command):
            super()._look_whether_it_serves(child, now_s)
        elif self._announced_by(child.pid):
            self.serving, self._began_s = True, now_s
            self._say(f"{child.id} has taken over")
        if self.serving:
            self._command = waits(self._command)  # whoever follows it

    def look(self, now_s: float) -> None:
        if self.serving and self.child is not None and not self._announced_by(self.child.pid):
            self.serving = False  # the other one has taken over: this one is frozen, and will end when it wakes up
        super().look(now_s)

    def _died(self, child: Child, code: int, now_s: float) -> None:
        if not waiting(self._command) or (code == 0 and self.serving):
            super()._died(child, code, now_s)
            return
        if code == 0:
            return  # it was told to end, or the other one has ended in order: nobody is needed
        if now_s - self._began_s >= self._policy.calm_s:
            self._row = 0
        how = "the other one has taken over" if code == EXIT_FENCED else describe_exit(code)
        self.serving = False
        self._plan_restart(how, now_s, f"Its log {child.log_file} ends with:\n{child.log_tail()}")


def waits(command: Command) -> Command:
    """The same command for a process that stands by."""
    return command if waiting(command) else replace(command, argv=[*command.argv, f"--{STANDBY}"])


def waiting(command: Command) -> bool:
    return f"--{STANDBY}" in command.argv


def standby_beside(syncer: Command) -> Command:
    """The second syncer of the same run. Its port is chosen here, because learners are told of it before it serves."""
    argv = list(syncer.argv)
    argv[argv.index("--listen") + 1] = f"127.0.0.1:{quiet_port()}"
    return waits(replace(syncer, id=STANDBY, argv=[word for word in argv if word != "--first-start"]))


def quiet_port() -> int:
    """A port of this machine that is free, and that nobody is given by accident."""
    for number in itertools.islice(itertools.count(os.getpid() * 211), len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", PORTS[number % len(PORTS)]))
            except OSError:
                continue
            return PORTS[number % len(PORTS)]
    raise LaunchError(f"no port from {PORTS[0]} to {PORTS[-1]} is free for the standby; end something, or use none")
