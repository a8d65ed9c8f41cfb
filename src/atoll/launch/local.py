"""The supervisor: starts the processes of a run on this machine, restarts dead learners, and leaves nothing behind.

It knows nothing of models or training: what to start is given as commands, so that `atoll train`, `atoll run` and the
tests differ only in those. One thread, one loop; every wait has a bound; a signal sets a flag that the loop looks at.

A learner that dies is restarted after a pause that doubles each time. Two deaths in a row before it ever joined mean
that its program is broken, and the run ends with the last lines of its log. A learner that did join and then keeps
dying is given up, and the others go on without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.chaos import ChaosExecutor
from atoll.errors import LaunchError
from atoll.launch.folder import RunFolder
from atoll.launch.plan import LaunchPlan, Outcome, View
from atoll.launch.process import Child, Command, describe_exit
from atoll.launch.watch import RunWatch
from atoll.observe import Writer
from atoll.observe.events import ProcessExited, ProcessStarted, Warned

TICK_S = 0.1
"""Fine against the second that anything here takes, coarse against the cost of looking."""
SYNCER_READY_S_MAX = 60.0
"""Importing numba on a cold and busy machine takes some 10 s."""
TOO_LATE_S_MAX = 5.0
"""For a learner that was still starting when the run ended: time to notice it and to leave by itself."""
LEARNER_STOP_S_MAX = 10.0
SYNCER_STOP_S_MAX = 60.0
"""It has rounds to close and a model to write."""


class _Slot:
    """One learner's place in the run, through all its restarts."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.child: Child | None = None
        self.restarts = 0
        self.early_deaths = 0
        self.restart_at_s: float | None = None
        self.ever_joined = False
        self.finished = False
        self.given_up = False


class Supervisor:
    """Runs one plan once. `run` blocks its thread, which must outlive the processes (see `process._die_with`)."""

    def __init__(
        self,
        folder: RunFolder,
        plan: LaunchPlan,
        *,
        writer: Writer,
        view: View | None = None,
        say: Callable[[str], None] = lambda text: None,
        say_raw: Callable[[bytes], None] = lambda data: None,
    ) -> None:
        self._folder = folder
        self._plan = plan
        self._writer = writer
        self._view = view
        self._say = say
        self._say_raw = say_raw
        self._slots = {command.id: _Slot(command) for command in plan.learners}
        self._syncer: Child | None = None
        self._syncer_code = 0
        self._join: dict[str, str] = {}
        self._watch = RunWatch(folder.path, tokens_budget=plan.tokens_budget)
        self._chaos = ChaosExecutor(plan.faults, self, emit=writer.emit)
        self._signals: list[int] = []
        self._followed_bytes = 0
        self._first_finish_s: float | None = None

    # -- what the chaos executor asks

    def pid_of(self, learner: str) -> int | None:
        slot = self._slots.get(learner)
        return slot.child.pid if slot is not None and slot.child is not None else None

    def slow_file(self, learner: str) -> Path:
        return self._folder.slow_file(learner)

    # -- the run

    def run(self) -> Outcome:
        """Start everything, keep it going to its end, stop everything. Raises LaunchError when the run cannot go on."""
        with self._catch_signals():
            try:
                if self._plan.syncer is not None:
                    self._start_syncer(self._plan.syncer)
                for slot in self._slots.values():
                    if not self._signals:
                        self._start(slot)
                if self._view is not None:
                    self._view.start()
                while not self._signals and not self._tick():
                    time.sleep(TICK_S)
            finally:
                self._stop()
                if self._view is not None:
                    self._view.stop()
        slots = self._slots
        return Outcome(
            reason=signal.Signals(self._signals[0]).name if self._signals else "finished",
            restarts=sum(slot.restarts for slot in slots.values()),
            given_up=tuple(id for id, slot in slots.items() if slot.given_up),
            silent=tuple(id for id, slot in slots.items() if not slot.ever_joined),
            faults=tuple(self._chaos.injected),
            syncer_code=self._syncer_code,
        )

    def _tick(self) -> bool:
        """Look at everything once; True when no learner is left to wait for."""
        self._watch.poll()
        self._look_at_syncer()
        now_s = time.monotonic()
        for slot in self._slots.values():
            self._look_at(slot)
            if slot.restart_at_s is not None and self._first_finish_s is not None:
                self._give_up(slot, f"{slot.command.id} was to be restarted, but the run is ending")
            elif slot.restart_at_s is not None and now_s >= slot.restart_at_s:
                self._restart(slot)
        self._chaos.tick(self._watch.progress, time.time_ns())
        if self._view is not None:
            self._view.refresh()
        self._follow()
        if all(slot.given_up for slot in self._slots.values()):
            raise LaunchError(f"every learner has died; their logs are in {self._folder.logs}")
        self._give_up_stragglers(now_s)
        return all(slot.finished or slot.given_up for slot in self._slots.values())

    # -- starting

    def _start_syncer(self, command: Command) -> None:
        self._syncer = self._spawn(command)
        deadline_s = time.monotonic() + SYNCER_READY_S_MAX
        while not self._folder.syncer_file.exists() and not self._signals:
            self._look_at_syncer()
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"the syncer was not ready after {SYNCER_READY_S_MAX:g} s; its log "
                    f"{self._syncer.log_file} ends with:\n{self._syncer.log_tail()}"
                )
            time.sleep(TICK_S / 2)
        if not self._signals:
            # The syncer renames this file into place, so it is whole.
            self._join = {"ATOLL_SYNCER": json.loads(self._folder.syncer_file.read_text())["address"]}

    def _start(self, slot: _Slot) -> None:
        slot.restart_at_s = None
        environment = {**slot.command.environment, **self._join}
        slot.child = self._spawn(replace(slot.command, environment=environment))

    def _restart(self, slot: _Slot) -> None:
        slot.restarts += 1
        with self._folder.log_file(slot.command.role, slot.command.id).open("a") as log:
            log.write(f"--- restart {slot.restarts} ---\n")
        self._start(slot)
        self._say(f"{slot.command.id} is back (restart {slot.restarts})")

    def _spawn(self, command: Command) -> Child:
        child = Child(command, self._folder.log_file(command.role, command.id))
        self._writer.emit(ProcessStarted(command.role, command.id, child.pid))
        running = [self._syncer, *(slot.child for slot in self._slots.values())]
        children = {c.id: c for c in (*running, child) if c is not None}
        listed = [{"role": "launcher", "id": "launcher", "pid": os.getpid()}]
        listed += [{"role": c.role, "id": c.id, "pid": c.pid} for c in children.values()]
        self._folder.write_processes(listed)
        return child

    # -- deaths

    def _look_at_syncer(self) -> None:
        if self._syncer is None or (code := self._syncer.poll()) is None:
            return
        syncer, self._syncer = self._syncer, None
        self._writer.emit(ProcessExited(syncer.role, syncer.id, syncer.pid, code))
        raise LaunchError(
            f"the syncer ended while the run was going on ({describe_exit(code)}); its state was in memory only, so "
            f"start the run again. Its log {syncer.log_file} ends with:\n{syncer.log_tail()}"
        )

    def _look_at(self, slot: _Slot) -> None:
        if slot.child is None or (code := slot.child.poll()) is None:
            return
        child, slot.child = slot.child, None
        self._writer.emit(ProcessExited(child.role, child.id, child.pid, code))
        # Its last events may have been written after this tick's look at them.
        self._watch.poll()
        joined = self._watch.joined_since(child.id, child.started_ns)
        slot.ever_joined = slot.ever_joined or joined
        if code == 0:
            slot.finished = True
            self._first_finish_s = self._first_finish_s or time.monotonic()
            return
        slot.early_deaths = 0 if joined else slot.early_deaths + 1
        policy = self._plan.restarts
        broken = slot.early_deaths >= policy.early_deaths_max and not slot.ever_joined
        if broken or policy.restarts_max == 0:
            when = f"{slot.early_deaths} times before it joined" if broken else "and cannot be replaced"
            raise LaunchError(
                f"{child.id} died {when} ({describe_exit(code)}); mend what the end of its log "
                f"{child.log_file} shows:\n{child.log_tail()}"
            )
        self._plan_restart(slot, f"{child.id}: {describe_exit(code)}")

    def _plan_restart(self, slot: _Slot, what: str) -> None:
        policy = self._plan.restarts
        if self._first_finish_s is not None:
            # The first learner to finish ends the run for all: a newcomer would find nothing to do.
            self._give_up(slot, f"{what}; the run is ending, so it is not restarted")
        elif slot.restarts >= policy.restarts_max or slot.early_deaths >= policy.early_deaths_max:
            text = f"{what}; given up after {slot.restarts} restarts, see {self._folder.logs}; the others go on"
            self._give_up(slot, text)
        else:
            doubled_s = policy.delay_s * 2.0 ** min(slot.restarts, 30)
            early = slot.early_deaths > 0
            delay_s = policy.early_delay_s if early else min(policy.delay_s_max, doubled_s)
            slot.restart_at_s = time.monotonic() + delay_s
            others = "before it joined" if early else "the others go on"
            self._say(f"{what}; {others}; restarting it in {delay_s:g} s")

    def _give_up_stragglers(self, now_s: float) -> None:
        """A learner that has not even joined when the first has finished comes too late to do anything."""
        limit_s, first_s = self._plan.straggle_s_max, self._first_finish_s
        if not limit_s or first_s is None:
            return
        for slot in self._slots.values():
            if slot.child is None:
                continue
            joined = self._watch.joined_since(slot.command.id, slot.child.started_ns)
            allowed_s = limit_s if joined else min(limit_s, TOO_LATE_S_MAX)
            if now_s >= first_s + allowed_s and not slot.given_up:
                self._give_up(slot, f"{slot.command.id} did not end within {allowed_s:g} s of the first; it is stopped")

    def _give_up(self, slot: _Slot, text: str) -> None:
        slot.given_up = True
        slot.restart_at_s = None
        self._writer.emit(Warned("launcher", text))
        self._say(text)

    # -- the end

    def _stop(self) -> None:
        """End what still runs, learners first: the syncer writes the model when nobody contributes any more."""
        self._chaos.finish()
        children = [slot.child for slot in self._slots.values() if slot.child is not None]
        self._end(children, LEARNER_STOP_S_MAX)
        self._watch.poll()
        for slot in self._slots.values():
            slot.ever_joined = slot.ever_joined or self._watch.joined_since(slot.command.id, 0)
        self._follow()
        if self._syncer is not None:
            syncer, self._syncer = self._syncer, None
            self._syncer_code = self._end([syncer], SYNCER_STOP_S_MAX)[0]

    def _end(self, children: Sequence[Child], timeout_s: float) -> list[int]:
        """SIGTERM to all, a bounded wait, SIGKILL to the rest. A second Ctrl-C cuts the wait short."""
        for child in children:
            child.terminate()
        deadline_s = time.monotonic() + timeout_s
        codes = []
        for child in children:
            code = child.wait(max(0.0, deadline_s - time.monotonic()), hurry=lambda: len(self._signals) > 1)
            if code is None:
                child.kill()
                # SIGKILL cannot be refused, so this ends as soon as the kernel is done with the process.
                code = child.wait(timeout_s, hurry=lambda: False)
            codes.append(-signal.SIGKILL if code is None else code)
            self._writer.emit(ProcessExited(child.role, child.id, child.pid, codes[-1]))
        return codes

    def _follow(self) -> None:
        if not self._plan.follow:
            return
        path = self._folder.log_file("learner", self._plan.follow)
        with contextlib.suppress(FileNotFoundError), path.open("rb") as log:
            log.seek(self._followed_bytes)
            data = log.read()
            self._followed_bytes += len(data)
            if data:
                self._say_raw(data)

    @contextlib.contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and a closed terminal end the run in order. Only a main thread can hear signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        caught = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # Under nohup the run shall survive its terminal.
            caught.append(signal.SIGHUP)
        before = {number: signal.signal(number, lambda n, _: self._signals.append(n)) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
