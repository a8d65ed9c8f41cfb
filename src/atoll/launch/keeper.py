"""The syncer's place in a run, through all its restarts.

    starting --RUN/syncer.json names its pid--> serving --dies--> waiting --pause over--> starting

Its first start is waited for. Later ones happen beside the run: the learners train on, and find it again because it
comes back at the same address and from its last commit.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.errors import LaunchError
from atoll.launch.commands import FIRST_START, HOST, LISTEN
from atoll.launch.folder import RunFolder
from atoll.launch.plan import SyncerPolicy, pause_before, said_pause
from atoll.launch.process import Child, Command, describe_exit, note
from atoll.observe import ProcessExited, Writer
from atoll.syncer import EXIT_FENCED

POLL_S = 0.05


class SyncerKeeper:
    """Starts the syncer and starts it again. Everything happens inside `start` and `look`, on the caller's thread."""

    def __init__(
        self,
        folder: RunFolder,
        command: Command,
        *,
        policy: SyncerPolicy,
        spawn: Callable[[Command], Child],
        writer: Writer,
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._file = folder.syncer_file
        """Where the process says that it can be reached."""
        self._who = "syncer"
        self._command = command
        self._policy = policy
        self._spawn = spawn
        self._writer = writer
        self._say = say
        self._row = 0
        self._early_deaths = 0
        self._began_s = 0.0
        self._restart_at_s: float | None = None
        self.child: Child | None = None
        self.serving = False
        self.address = ""
        self.expected = ""
        """Where it will serve, if that is known before it does."""
        self._held: socket.socket | None = None
        self.restarts = 0
        self.stopped = False
        """Somebody else has told it to end, and it did."""

    @property
    def id(self) -> str:
        return self._command.id

    def start(self, *, hurry: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Start it and wait until it serves, or until somebody is in a hurry. `meanwhile` is done before the wait."""
        self.spawn()
        meanwhile()
        _await_all([self], hurry=hurry)

    def spawn(self) -> None:
        """Start it, and wait for nothing."""
        self._began_s = time.monotonic()
        self.child = self._spawn(self._command)

    def look(self, now_s: float) -> None:
        """Notice its death, its readiness, or that a pause is over. Raises LaunchError when it cannot be kept going."""
        child = self.child
        if child is None:
            if self._restart_at_s is not None and now_s >= self._restart_at_s:
                self._restart(now_s)
            return
        if not self.serving:  # Asked first: it may have begun to serve and died since the last look.
            self._look_whether_it_serves(child, now_s)
        if (code := child.poll()) is not None:
            self.child = None
            self._writer.emit(ProcessExited(child.role, child.id, child.pid, code))
            self._died(child, code, now_s)

    def release(self) -> list[Child]:
        """The process, if it runs, for whoever ends it; nothing is restarted from here on."""
        child, self.child = self.child, None
        self._restart_at_s = None
        self._let_go_of_port()
        return [child] if child is not None else []

    def _let_go_of_port(self) -> None:
        if self._held is not None:
            self._held.close()

    def _look_whether_it_serves(self, child: Child, now_s: float) -> None:
        address = self._announced_by(child.pid)
        if address:
            self.serving, self.address, self._began_s = True, address, now_s
            self._let_go_of_port()
            if self.restarts:
                self._say(f"{self._who} is back (restart {self.restarts})")
        elif now_s - self._began_s > self._policy.ready_s_max:
            if not self.address:
                raise LaunchError(
                    f"the {self._who} was not ready after {self._policy.ready_s_max:g} s; its log {child.log_file} "
                    f"ends with:\n{child.log_tail()}"
                )
            child.kill()  # Counted as a death before it served.

    def _announced_by(self, pid: int) -> str:
        """The address in RUN/syncer.json, if this very process wrote it: an earlier syncer's file may lie there."""
        try:
            # The syncer renames this file into place, so it is whole.
            announced = json.loads(self._file.read_text())
            return str(announced["address"]) if announced["pid"] == pid else ""
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""

    def _died(self, child: Child, code: int, now_s: float) -> None:
        log = f"Its log {child.log_file} ends with:\n{child.log_tail()}"
        if not self.address:
            raise LaunchError(
                f"the {self._who} ended before anybody could join ({describe_exit(code)}); mend what its log shows. "
                f"{log}"
            )
        if code == EXIT_FENCED:  # Starting it again would be a fight.
            raise LaunchError(
                f"a newer {self._who} has taken over this run, so this launcher ends; look for the other one (`atoll "
                f"resume` or `atoll syncer` on {self._folder.path}). {log}"
            )
        if code == 0:
            self.stopped, self.serving = True, False
            self._say(f"the {self._who} was told to stop, and has stopped; the run ends here")
            return
        self._early_deaths = 0 if self.serving else self._early_deaths + 1
        if self.serving and now_s - self._began_s >= self._policy.calm_s:
            self._row = 0
        self.serving = False
        self._plan_restart(describe_exit(code), now_s, log)

    def _plan_restart(self, how: str, now_s: float, log: str) -> None:
        policy = self._policy
        if self._early_deaths >= policy.early_deaths_max or self._row >= policy.restarts_max:
            times = f"{self._early_deaths} times before it served" if self._early_deaths else f"{self._row + 1} times"
            raise LaunchError(
                f"the {self._who} died {times} ({how}) and is given up; mend what its log shows, then `atoll resume "
                f"{self._folder.path}` goes on from the last commit. {log}"
            )
        delay_s = pause_before(self._row, policy.delay_s, policy.delay_s_max)
        self._row += 1
        self._restart_at_s = now_s + delay_s
        self._say(f"{self._who}: {how}; learners train on; restarting it {said_pause(delay_s)}")

    def _restart(self, now_s: float) -> None:
        self.restarts += 1
        self._restart_at_s = None
        self._began_s = now_s
        note(self._folder.log_file(self._command.role, self._command.id), f"--- restart {self.restarts} ---")
        self.child = self._spawn(once_more(self._command, self.address))

    def foresee(self) -> None:
        """Before it is started: fix the port that it will serve at, so that others may be told of it already. A socket
        that is bound and does not listen keeps the port from everybody but who asks for this very one."""
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((HOST, 0))
        self.expected = f"{HOST}:{self._held.getsockname()[1]}"
        argv = list(self._command.argv)
        argv[argv.index("--listen") + 1] = self.expected
        self._command = replace(self._command, argv=argv)

    @property
    def begins(self) -> bool:
        """Whether this is the first start of a new run, on any port."""
        return FIRST_START in self._command.argv and LISTEN in self._command.argv

    def lead(self, shards: Sequence[str]) -> None:
        """Before it is started: these shards have the fragments."""
        self._command = replace(self._command, argv=[*self._command.argv, "--shards", ",".join(shards)])


class ShardKeeper(SyncerKeeper):
    """A shard's place in a run, likewise: while it is away its fragments wait, and the others go on."""

    def __init__(self, folder: RunFolder, command: Command, place: Path, **more: Any) -> None:
        super().__init__(folder, command, **more)
        self._file, self._who = place / "shard.json", command.id


class RelayKeeper(SyncerKeeper):
    """A relay's place, likewise: while it is away its learners go to the syncer themselves. The run does not depend on
    it, and one that finds no syncer when it starts, because that one is away as well, is tried again."""

    def __init__(self, folder: RunFolder, command: Command, place: Path, **more: Any) -> None:
        super().__init__(folder, command, **more)
        self._file, self._who = place / "relay.json", command.id

    def reach(self, syncer: str, place: Callable[[Command], Command]) -> None:
        """Before it is started: where the syncer is. `place` may replace that by a worse way."""
        told = {**self._command.environment, "ATOLL_SYNCER": syncer}
        placed = place(replace(self._command, environment=told))
        argv = [*placed.argv, "--upstream", placed.environment["ATOLL_SYNCER"]]
        self._command = replace(placed, argv=argv)

    def _died(self, child: Child, code: int, now_s: float) -> None:
        if self.address and code == 0:
            self.serving = False  # somebody has told it to end: its learners go on without it
            self._say(f"{self._who} was told to stop, and has stopped; its learners go past it")
            return
        super()._died(child, code, now_s)
        self._early_deaths = 0


class PeerKeeper(ShardKeeper):
    """A shard beside a learner. The run does not depend on it: what it takes with it, learners bring to the others."""

    leaving = False
    """It is told to go, and hands its fragments over first."""

    def begin(self, syncer: str) -> None:
        """Start it. It comes to the run when it can, and nobody waits for that."""
        argv = [*self._command.argv, "--join", syncer]
        self._command = replace(self._command, argv=argv)
        self._began_s = time.monotonic()
        self.child = self._spawn(self._command)

    def leave(self) -> None:
        """Its learner is gone for good."""
        if self.child is not None and not self.leaving:
            self.leaving = True
            self._say(f"{self._who} hands its fragments to the other shards, and leaves")
            self.child.terminate()

    def look(self, now_s: float) -> None:
        try:
            super().look(now_s)
        except LaunchError as error:
            for child in self.release():
                child.kill()
            self._say(f"{error}. The run goes on: the other shards get its fragments from the learners")

    def _died(self, child: Child, code: int, now_s: float) -> None:
        if self.leaving or code == 0:
            self._say(f"{self._who} is gone ({describe_exit(code)})")
        else:
            super()._died(child, code, now_s)


def start_all(keepers: Sequence[SyncerKeeper], *, hurry: Callable[[], bool]) -> None:
    """Start them and wait until all serve, or until somebody is in a hurry. The others come together, after the first:
    on a machine where nothing has run yet that one compiles what the others find in its cache."""
    for some in (keepers[:1], keepers[1:]):
        for keeper in some:
            if not hurry():
                keeper.spawn()
        _await_all(some, hurry=hurry)


def _await_all(keepers: Sequence[SyncerKeeper], *, hurry: Callable[[], bool]) -> None:
    while not hurry():
        for keeper in keepers:
            keeper.look(time.monotonic())
        if all(keeper.serving for keeper in keepers):
            return
        time.sleep(POLL_S)


def once_more(command: Command, address: str) -> Command:
    """The same command for a process that has served before. Its --listen is replaced: learners that run already look
    for the syncer where it was. And the run is not new any more."""
    argv = [word for word in command.argv if word != FIRST_START]
    if "--listen" in argv[:-1]:
        argv[argv.index("--listen") + 1] = address
    return replace(command, argv=argv)
