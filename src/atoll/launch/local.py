"""The supervisor: starts the processes of a run on this machine, restarts dead ones, and leaves nothing behind.

It knows nothing of models or training: what to start is given as commands, so that `atoll train`, `atoll run`,
`atoll join` and the tests differ only in those. One thread, one loop; every wait has a bound; a signal sets a flag that
the loop looks at.

A learner that dies is restarted at once, then after a pause that doubles, until it has trained well for a while. Two
deaths in a row before it ever joined mean that its program is broken, and the run ends with the last lines of its log.
A learner that did join and then keeps failing without getting further is given up, with the last lines of its log, and
the others go on without it. One that was asked to leave (`atoll leave`, SIGTERM) is gone for good, whether it could
hand over everything or not, and the others go on. What happens to a dead syncer is in `keeper`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll import kernels
from atoll.errors import LaunchError
from atoll.launch.commands import site_of
from atoll.launch.config import PEERS
from atoll.launch.faults import NoFaults, SupervisedRun
from atoll.launch.folder import RunFolder
from atoll.launch.keeper import PeerKeeper, RelayKeeper, ShardKeeper, SyncerKeeper, start_all
from atoll.launch.pair import STANDBY, PairKeeper, PlaceKeeper
from atoll.launch.plan import FINISHED, LEFT, TIME_UP, LaunchPlan, RunOutcome, View, said_pause
from atoll.launch.process import Child, Command, describe_exit, note, tail_of
from atoll.launch.running import ask_to_leave, asked_to_leave, joined_processes, listed, training_pid
from atoll.launch.slot import LearnerSlot
from atoll.launch.watch import RunWatch
from atoll.observe import ProcessExited, ProcessStarted, Warned, Writer

TICK_S = 0.1
"""Fine against the second that anything here takes, coarse against the cost of looking."""
TOO_LATE_S_MAX = 5.0
"""For a learner that was still starting when the run ended: time to notice it and to leave by itself."""
DONE_S_MAX = 10.0
"""After the token budget is spent a learner hears of it within a second or a step; who then takes two more is deaf."""
LEARNER_STOP_S_MAX = 45.0
"""A learner that is told to end finishes its step, hands over within 20 s, and writes its checkpoint. The end of an
interpreter that has loaded torch took up to 5 s more on a busy machine (25 s in all, on a thin link). If it were killed
any earlier it would have no status of its own."""
SYNCER_STOP_S_MAX = 60.0
"""It has rounds to close and a model to write."""
PEERS_S_MAX = 60.0
"""How long learners wait for the shards beside them, which take some seconds to start; who is later gets fragments
then."""
PEER_STOP_S_MAX = 150.0
"""A shard that leaves a run hands its fragments over within 120 s."""


class Supervisor:
    """Runs one plan once. `run` blocks its thread, which must outlive the processes (see `process.die_with`)."""

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
        self._began_ns = time.time_ns()
        self._slots = {command.id: LearnerSlot(command) for command in plan.learners}
        self._keeper: SyncerKeeper | PairKeeper | None = None
        self._faults = plan.faults
        self._faults.attach(
            SupervisedRun(
                folder,
                self._slots,
                syncer=self._serving_syncer,
                syncer_address=lambda: self._keeper.address if self._keeper is not None else "",
                served=self._served,
                start=self._start,
                emit=writer.emit,
            )
        )
        keeping: dict[str, Any] = {
            "policy": plan.syncer_restarts,
            "spawn": self._spawn,
            "writer": writer,
            "say": say,
        }
        if plan.syncer is not None and plan.standby is not None:
            places = [PlaceKeeper(folder, self._faults.place(one), **keeping) for one in (plan.syncer, plan.standby)]
            self._keeper = PairKeeper(places[0], places[1])
        elif plan.syncer is not None:
            self._keeper = SyncerKeeper(folder, self._faults.place(plan.syncer), **keeping)
        self._shards = [
            ShardKeeper(folder, self._faults.place(command), folder.shard_folder(number), **keeping)
            for number, command in enumerate(plan.shards)
        ]
        self._relays = [
            RelayKeeper(folder, command, folder.relay_folder(number), **keeping)
            for number, command in enumerate(plan.relays)
        ]
        self._peers = {
            learner: PeerKeeper(folder, command, folder.shard_folder(int(command.id.rpartition("-")[2])), **keeping)
            for learner, command in plan.peers.items()
        }
        self._syncer_code = 0
        self._watch = RunWatch(folder.path, tokens_budget=plan.tokens_budget)
        self._signals: list[int] = []
        self._followed_bytes = _size(self._follow_file) if plan.follow else 0
        self._first_finish_s: float | None = None
        self._first_step_s: float | None = None
        self._budget_spent_s: float | None = None
        self._steps_when_done: dict[str, int] = {}
        self._time_up = False

    # -- the run

    def run(self) -> RunOutcome:
        """Start everything, keep it going to its end, stop everything. Raises LaunchError when the run cannot go on."""
        with self._catch_signals():
            try:
                self._start_shards()
                if self._keeper is not None and not self._signals:
                    self._start_syncer(self._keeper)
                self._start_peers()
                self._faults.open()
                self._start_relays()
                self._start_learners()
                if self._view is not None:
                    self._view.start()
                while not self._signals and not self._tick():
                    time.sleep(TICK_S)
            finally:
                try:
                    self._stop()
                finally:
                    self._faults.close()
                    if self._view is not None:
                        self._view.stop()
        return self.outcome(self._reason())

    def _reason(self) -> str:
        if self._signals:
            return signal.Signals(self._signals[0]).name
        if self._time_up:
            return TIME_UP
        finished = any(slot.finished for slot in self._slots.values()) or self._watch.budget_spent
        return FINISHED if finished else LEFT

    def outcome(self, reason: str) -> RunOutcome:
        """What the run came to, once everything has stopped; also of one that `run` could not keep going."""
        slots = self._slots
        return RunOutcome(
            reason=reason,
            restarts=sum(slot.restarts for slot in slots.values()),
            given_up=tuple(id for id, slot in slots.items() if slot.given_up),
            silent=tuple(id for id, slot in slots.items() if not slot.ever_joined and not slot.guest),
            faults=tuple(self._faults.injected),
            syncer_code=self._syncer_code,
            syncer_restarts=self._keeper.restarts if self._keeper is not None else 0,
            stayed_out=tuple(id for id, slot in slots.items() if slot.stayed_out),
            left=tuple(id for id, slot in slots.items() if slot.left and not slot.guest),
            learners=len(slots),
            skipped=tuple(self._faults.skipped),
            trained=self._watch.trained,
            unhanded={id: tokens for id, tokens in self._watch.unhanded.items() if id in slots and tokens},
        )

    def _tick(self) -> bool:
        """Look at everything once; True when there is nobody left to wait for."""
        self._watch.poll()
        now_s = time.monotonic()
        self._pass_warnings_on()
        if self._first_step_s is None and self._watch.stepped_since(self._began_ns):
            self._first_step_s = now_s  # starting torch on a busy machine takes half a minute, and is no training
        if self._first_step_s is not None and 0.0 < self._plan.minutes * 60.0 <= now_s - self._first_step_s:
            self._say(f"{self._plan.minutes:g} minutes are over; the learners hand over and leave")
            self._time_up = True
            return True
        if self._keeper is not None:
            self._keeper.look(now_s)
            if self._keeper.stopped:
                self._signals.append(signal.SIGTERM)  # whoever ended the syncer meant the run
                return True
        for shard in self._shards:
            shard.look(now_s)
            if shard.stopped:
                self._signals.append(signal.SIGTERM)
                return True
        for relay in self._relays:
            relay.look(now_s)
        self._look_at_peers(now_s)
        for slot in list(self._slots.values()):
            self._look_at(slot)
            if slot.resting and slot.child is None and self._first_finish_s is not None:
                slot.left, slot.resting = True, False  # the run is over before it was to come back
            if slot.restart_at_s is not None and self._first_finish_s is not None:
                self._give_up(slot, f"{slot.command.id} was to be restarted, but the run is ending")
            elif slot.restart_at_s is not None and now_s >= slot.restart_at_s:
                self._restart(slot)
        self._faults.tick(self._watch.progress, time.time_ns(), begun=self._watch.tokens > 0)
        if self._view is not None:
            self._view.refresh()
        self._follow()
        self._give_up_stragglers(now_s)
        self._end_the_deaf(now_s)
        return self._over()

    def _over(self) -> bool:
        """Whether everybody is through. The syncer must be there at the end: it holds what the others have done."""
        slots = self._slots.values()
        if not all(slot.over for slot in slots) or (self._keeper is not None and not self._keeper.serving):
            return False
        if any(slot.finished for slot in slots):
            return True
        if not self._plan.guest and self._others_train():
            return False
        if all(slot.given_up for slot in slots):
            last = self._folder.log_file("learner", next(reversed(self._slots)))
            raise LaunchError(
                f"every learner has died and was given up; mend what their logs in {self._folder.logs} show, such as "
                f"the end of {last.name}:\n{tail_of(last)}"
            )
        return True

    def _pass_warnings_on(self) -> None:
        """Without a live view nobody would see what learners and syncer warn of. Those of the learner whose output is
        repeated here are in it already."""
        warnings, self._watch.warnings = self._watch.warnings, []
        for t_ns, warned in warnings:
            own = warned.source in ("launcher", self._plan.follow)
            if self._view is None and not own and t_ns >= self._began_ns:
                self._say(f"{warned.source} warns: {warned.text}")

    def _others_train(self) -> bool:
        """Learners that another launcher or another machine has brought in still need the syncer."""
        return self._watch.active > 0 or any(one.alive for one in joined_processes(self._folder))

    # -- starting

    def _start_shards(self) -> None:
        start_all(self._shards, hurry=lambda: bool(self._signals))
        if self._shards and self._keeper is not None:
            self._keeper.lead([self._faults.front(shard.id, shard.address) for shard in self._shards])
        if self._peers and self._keeper is not None:
            self._keeper.lead([PEERS])

    def _start_syncer(self, keeper: SyncerKeeper | PairKeeper) -> None:
        """Where nothing forbids it, learners load their libraries while the syncer does. Who breaks links on purpose
        must know its address first, shards beside learners and relays come before these, and kernels are compiled by
        one process alone."""
        alone = isinstance(self._faults, NoFaults) and not self._peers and not self._relays
        if isinstance(keeper, SyncerKeeper) and keeper.begins and alone and kernels.are_stored():
            keeper.foresee()
            keeper.start(hurry=lambda: bool(self._signals), meanwhile=self._start_learners)
        else:
            keeper.start(hurry=lambda: bool(self._signals))

    def _start_learners(self) -> None:
        for slot in self._slots.values():
            if slot.child is None and not self._signals:
                self._start(slot)

    def _syncer_address(self) -> str:
        """Where learners and relays find the syncer, or both of them."""
        if isinstance(self._keeper, PairKeeper):
            return ",".join(self._faults.front(one.id, one.address) for one in self._keeper.places)
        return (self._keeper.address or self._keeper.expected) if self._keeper is not None else ""

    def _start_relays(self) -> None:
        for relay in self._relays:
            relay.reach(self._syncer_address(), self._faults.place)
        start_all(self._relays, hurry=lambda: bool(self._signals))

    def _relay_of(self, command: Command) -> str:
        number = int(command.environment["ATOLL_RANK"])
        relay = self._relays[site_of(number, learners=len(self._plan.learners), sites=len(self._relays))]
        return self._faults.front(relay.id, relay.address)

    def _served(self, id: str) -> Child | None:
        if id == STANDBY:
            return self._keeper.waiting if isinstance(self._keeper, PairKeeper) else None
        return next((one.child for one in (*self._shards, *self._relays) if one.id == id and one.serving), None)

    def _start_peers(self) -> None:
        """Wait a little for them: fragments are shared out among those that are there when the first learner comes."""
        address = self._keeper.address if self._keeper is not None else self._plan.syncer_address
        for peer in self._peers.values():
            if not self._signals:
                peer.begin(address)
        until_s = time.monotonic() + PEERS_S_MAX
        while not all(peer.serving for peer in self._peers.values()) and time.monotonic() < until_s:
            if self._signals or self._plan.guest:
                return
            self._look_at_peers(time.monotonic())
            time.sleep(TICK_S)

    def _look_at_peers(self, now_s: float) -> None:
        for learner, peer in self._peers.items():
            slot = self._slots[learner]
            if (slot.left or slot.given_up) and self._first_finish_s is None:
                peer.leave()
            peer.look(now_s)

    def _start(self, slot: LearnerSlot) -> None:
        slot.restart_at_s = None
        command = slot.command
        if self._keeper is not None:
            places = [self._relay_of(command)] if self._relays else []
            address = ",".join([*places, self._syncer_address()])
            command = replace(command, environment={**command.environment, "ATOLL_SYNCER": address})
        slot.child = self._spawn(self._faults.place(command))

    def _serving_syncer(self) -> Child | None:
        return self._keeper.child if self._keeper is not None and self._keeper.serving else None

    def _restart(self, slot: LearnerSlot) -> None:
        slot.restarts += 1
        slot.row += 1
        note(self._folder.log_file(slot.command.role, slot.command.id), f"--- restart {slot.restarts} ---")
        self._start(slot)
        self._say(f"{slot.command.id} is back (restart {slot.restarts})")

    def _spawn(self, command: Command) -> Child:
        child = Child(command, self._folder.log_file(command.role, command.id))
        self._writer.emit(ProcessStarted(command.role, command.id, child.pid))
        self._list_processes(child)
        return child

    def _list_processes(self, *started: Child) -> None:
        """Write down who runs, for `atoll join`, `leave` and `resume`; `started` are not in their slots yet."""
        syncers = self._keeper.places if isinstance(self._keeper, PairKeeper) else (self._keeper,)
        served = (*self._shards, *self._relays, *self._peers.values())
        running = [one.child if one is not None else None for one in (*syncers, *served, *self._slots.values())]
        children = {c.id: c for c in (*running, *started) if c is not None}
        role = "join" if self._plan.guest else "launcher"
        entries = [listed(role, role, os.getpid()), *(listed(c.role, c.id, c.pid) for c in children.values())]
        if self._plan.guest:  # of those that are still to be started this process keeps the seats
            waiting = [slot.command.id for slot in self._slots.values() if not slot.over]
            entries += [listed("seat", id, os.getpid()) for id in waiting if id not in children]
        try:
            path = self._folder.joined_file if self._plan.guest else self._folder.processes_file
            self._folder.write_processes([one.entry() for one in entries], path)
        except OSError as error:
            # A full disk must not end a run.
            self._writer.emit(Warned("launcher", f"could not list the run's processes: {error}; make room"))

    # -- deaths

    def _look_at(self, slot: LearnerSlot) -> None:
        if slot.child is None or (code := slot.child.poll()) is None:
            return
        child, slot.child = slot.child, None
        self._writer.emit(ProcessExited(child.role, child.id, child.pid, code))
        # Its last events may have been written after this tick's look at them.
        self._watch.poll()
        joined = self._watch.joined_since(child.id, child.started_ns)
        slot.ever_joined = slot.ever_joined or joined
        if how := self._gone_for_good(child):
            if slot.resting and self._first_finish_s is None:
                self._say(f"{child.id} {how} ({describe_exit(code)}), and will come back")
                return
            slot.left = True
            lost = f", without handing over {tokens:,} tokens" if (tokens := self._watch.unhanded.get(child.id)) else ""
            self._say(f"{child.id} {how}{lost} ({describe_exit(code)}); the others go on")
            return
        badly = self._watch.ended_badly(child.id, child.started_ns) if code else ""
        if code == 0 or badly:
            if badly:
                self._say(f"{child.id} ended {badly} ({describe_exit(code)}); the others go on")
            slot.finished = True
            slot.stayed_out = not (slot.ever_joined or slot.guest or self._watch.budget_spent)
            self._first_finish_s = self._first_finish_s or time.monotonic()
            return
        policy = self._plan.restarts
        on_purpose = self._broken_by_plan(slot)
        slot.died(policy, joined=joined or on_purpose, lived_s=(time.time_ns() - child.started_ns) / 1e9)
        if joined and not on_purpose:
            slot.failed(self._watch.reached_since(child.id, child.started_ns))
        never = slot.early_deaths >= policy.early_deaths_max and not slot.ever_joined
        broken = never and not slot.guest and not self._plan.over()
        if broken or policy.restarts_max == 0:
            when = f"{slot.early_deaths} times before it joined" if broken else "and cannot be replaced"
            raise LaunchError(
                f"{child.id} died {when} ({describe_exit(code)}); mend what the end of its log "
                f"{child.log_file} shows:\n{child.log_tail()}"
            )
        self._plan_restart(slot, f"{child.id}: {describe_exit(code)}")

    def _broken_by_plan(self, slot: LearnerSlot) -> bool:
        """Whether the chaos plan has killed it since its last death, or makes it lie, for which it is refused again and
        again: that says nothing of its program."""
        faults = [one.fault for one in self._faults.injected if one.target == slot.command.id]
        kills = faults.count("kill")
        planned, slot.kills_planned = kills > slot.kills_planned or "lie" in faults, kills
        return planned

    def _gone_for_good(self, child: Child) -> str:
        """Whether `atoll leave`, which leaves a file, or the learner itself says that it is not to come back, and how
        it went. Data-parallel and single runs have no members that come and go."""
        if self._keeper is None and not self._plan.guest:
            return ""
        if asked_to_leave(self._folder, child.id, child.pid):
            self._folder.leave_file(child.id).unlink(missing_ok=True)
            return "left as it was asked to"
        return self._watch.gone_for_good(child.id, child.started_ns)

    def _plan_restart(self, slot: LearnerSlot, what: str) -> None:
        policy = self._plan.restarts
        if self._plan.over():
            slot.finished = True
            self._say(f"{what}; the run is over, so it is not restarted")
        elif self._first_finish_s is not None:
            # The first learner to finish ends the run for all: a newcomer would find nothing to do.
            self._give_up(slot, f"{what}; the run is ending, so it is not restarted")
        elif slot.spent(policy):
            log = self._folder.log_file("learner", slot.command.id)
            stuck = f" without getting further ({slot.fruitless} failures in a row)" if slot.fruitless > 1 else ""
            text = f"{what}; given up after {slot.restarts} restarts{stuck}; the others go on; the end of its log {log}"
            self._give_up(slot, text, tail_of(log))
        else:
            delay_s = slot.pause_s(policy)
            slot.restart_at_s = time.monotonic() + delay_s
            if self._plan.guest:
                self._list_processes()  # its seat is kept until it is back
            others = "before it joined" if slot.early_deaths else "the others go on"
            self._say(f"{what}; {others}; restarting it {said_pause(delay_s)}")

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

    def _end_the_deaf(self, now_s: float) -> None:
        """The budget is spent, and a learner steps on: its script does not look at `learner.done`. One that evaluates
        or saves its model meanwhile takes no steps, and has all the time it needs."""
        if not self._watch.budget_spent:
            return
        self._budget_spent_s = self._budget_spent_s or now_s
        for slot in self._slots.values() if now_s - self._budget_spent_s >= DONE_S_MAX else ():
            child = slot.child
            if child is None or asked_to_leave(self._folder, child.id, child.pid):
                continue
            steps = self._watch.reached_since(child.id, child.started_ns).steps
            if steps > self._steps_when_done.setdefault(child.id, steps) + 1:
                self._say(f"the token budget is spent and {child.id} steps on: it is told to leave; use learner.done")
                ask_to_leave(self._folder, child.id, child.pid)

    def _give_up(self, slot: LearnerSlot, text: str, tail: str = "") -> None:
        slot.given_up = True
        slot.restart_at_s = None
        self._writer.emit(Warned("launcher", text))
        self._say(f"{text}:\n{tail}" if tail else text)

    # -- the end

    def _stop(self) -> None:
        """End what still runs, learners first: the syncer writes the model when nobody contributes any more."""
        self._faults.finish()
        children = [slot.child for slot in self._slots.values() if slot.child is not None]
        self._end(children, LEARNER_STOP_S_MAX)
        self._watch.poll()
        self._pass_warnings_on()
        for slot in self._slots.values():
            slot.ever_joined = slot.ever_joined or self._watch.joined_since(slot.command.id, self._began_ns)
        self._follow()
        self._end(_running(relay.release() for relay in self._relays), SYNCER_STOP_S_MAX)
        for syncer in self._keeper.release() if self._keeper is not None else ():
            self._syncer_code = self._end([syncer], SYNCER_STOP_S_MAX)[0]
        wait_s = PEER_STOP_S_MAX if self._plan.guest else SYNCER_STOP_S_MAX
        self._end(_running(one.release() for one in (*self._shards, *self._peers.values())), wait_s)
        if self._plan.guest:
            self._folder.joined_file.unlink(missing_ok=True)

    def _end(self, children: Sequence[Child], timeout_s: float) -> list[int]:
        """SIGTERM to all, a bounded wait, SIGKILL to the rest. A second Ctrl-C cuts the wait short."""
        for child in children:
            if asked_to_leave(self._folder, child.id, child.pid):
                continue
            child.terminate(training_pid(self._folder, child.id, child.pid) if child.role == "learner" else None)
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

    @property
    def _follow_file(self) -> Path:
        return self._folder.log_file("learner", self._plan.follow)

    def _follow(self) -> None:
        if not self._plan.follow:
            return
        with contextlib.suppress(FileNotFoundError), self._follow_file.open("rb") as log:
            if _size(self._follow_file) < self._followed_bytes:
                self._followed_bytes = 0  # it was begun anew
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


def _running(released: Iterable[Sequence[Child]]) -> list[Child]:
    return [child for children in released for child in children]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
