"""One learner: an island of chips that steps, and the process (`learner`) that tells the syncer about it.

    running --failure--> stalled --resized or restarted--> running
    running --step boundary, returned slices have waited--> stalled (planned) --> running
    running --must wait (synchronous, or not joined yet)--> waiting --adopted--> running

A failure breaks the session; the island comes back under the same instance, with what its replicas held, unless its
last slice was lost: then it is a new process that fetches published state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.core import SECOND_NS as NS
from atoll.core import LearnerMachine
from atoll.core import effects as fx
from atoll.instruments.fleet.island import Island, Run, Stall
from atoll.instruments.fleet.learner import NO_SESSION, FleetLearner

if TYPE_CHECKING:
    from atoll.instruments.fleet.world import FleetWorld

STEP_TOKENS = 1_000_000
"""Of a whole island's step: what is counted is its share, so only proportions matter."""
HEARTBEATS_PER_LEASE = 3
"""While it stands still with its link up, a learner is heard this often before it would count as away."""

BOUNDARIES_MAX = 8
"""Things that one standing still at a step boundary may bring: adopt, answer, join."""


class Host:
    def __init__(
        self, world: FleetWorld, name: str, island: Island, *, step_s: float, pace: Callable[[], float] | None = None
    ) -> None:
        self._world = world
        self.name = name
        self.island = island
        self._step_s = step_s
        self._pace = pace
        """Drawn for every step: how much longer than `step_s` it takes."""
        self._instances = 0
        self._learner = self._new_learner()
        self.useful_s = 0.0
        """Seconds of compute in whole steps, in proportion to the live chips, less what was discarded later."""
        self.lost_s = 0.0
        """Useful seconds that were taken back: progress that died with the island or was discarded."""
        self.steps = 0
        self._run = Run(0.0, 0.0, 1.0)
        self._running = self._stalled = self._leaving = self._closed = self.gone = False
        self._waits = 0
        self._pauses = 0
        self._beat_ns = world.config.lease_ns // HEARTBEATS_PER_LEASE

    @property
    def reachable(self) -> bool:
        """Whether there is anybody to have a session with."""
        return self._world.reaches(self)

    @property
    def machine(self) -> LearnerMachine:
        """Of the process that runs now."""
        return self._learner.machine

    def start(self) -> None:
        self._learner.connect()
        self._resume()

    def leave(self) -> None:
        """Hand over everything at the next step boundary, then leave."""
        self._leaving = True
        if not self._running and not self._stalled:
            self._next()

    # ------------------------------------------------------------ chips

    @property
    def _now_s(self) -> float:
        return self._world.clock.now_ns / NS

    def _resume(self) -> None:
        """The chips run from now on."""
        self._stalled = False
        self._learner.connect()
        self._run = self.island.run_at(self._now_s)
        self._next()

    def _next(self) -> None:
        """At a step boundary: grow, wait or step."""
        if self._leaving:
            self._close()
        elif self._now_s >= self._run.grow_s:
            self._stall(self.island.grow(self._now_s))
        elif not self.machine.joined or self.machine.must_wait:
            self._wait()
        else:
            self._set_running(True)
            length_s = self._step_s * (self._pace() if self._pace is not None else 1.0)
            end_s = self._now_s + length_s
            if self._run.fail_s < end_s:
                self._world.clock.at(int(self._run.fail_s * NS), self._fail)
            else:
                self._world.clock.at(int(end_s * NS), self._stepped, length_s)

    def _close(self) -> None:
        self._set_running(False)
        if not self._closed:
            self._closed = True
            self._learner.driver.handle(fx.Closing(True, "the capacity is needed elsewhere"))
        self._do_at_boundary()

    def _stepped(self, length_s: float) -> None:
        share = self._run.share
        self.steps += 1
        self.useful_s += length_s * share
        self._learner.driver.handle(fx.Stepped(int(STEP_TOKENS * share), int(length_s * NS), 1.0))
        self._next()

    def _wait(self) -> None:
        """Nothing to step: because it joins, or because a synchronous merge is due. Chips fail meanwhile too."""
        self._set_running(False)
        self._waits += 1
        self._world.clock.at(int(self._run.fail_s * NS), self._fail_waiting, self._waits)
        self._do_at_boundary()

    def _do_at_boundary(self) -> None:
        """Do what there is to do at a boundary; step on if nothing holds the learner any more."""
        if self._closed and not self.gone:
            self._learner.driver.handle(fx.Boundary())
        for _ in range(BOUNDARIES_MAX):
            if not self.machine.boundary_wanted:
                break
            self._learner.driver.handle(fx.Boundary())
        held = self._running or self._stalled or self._closed or self.machine.must_wait or not self.machine.joined
        if not held:
            self._waits += 1
            self._next()

    def _fail_waiting(self, wait: int) -> None:
        if wait == self._waits and not self._running and not self._stalled and not self._closed:
            self._fail()

    def _fail(self) -> None:
        stall = self.island.fail(self._now_s)
        if stall.state_lost:
            self._lose_state()
        elif not self._world.keep_links:
            self._learner.disconnect("a chip failed")
        self._stall(stall)

    def _stall(self, stall: Stall) -> None:
        self._set_running(False)
        self._stalled = True
        if stall.until_s < math.inf:
            self._world.clock.at(int(stall.until_s * NS), self._resume)

    def _set_running(self, running: bool) -> None:
        if running != self._running:
            self._running = running
            self._world.stepping(1 if running else -1)
            self._pauses += not running
            if not running:
                self._world.clock.after(self._beat_ns, self._heartbeat, self._pauses)

    def _heartbeat(self, pause: int) -> None:
        """A learner that stands still says now and then that it is there, if its link is up."""
        if self._running or pause != self._pauses or self.gone:
            return
        if self._learner.session != NO_SESSION:
            self._learner.beat()
        self._world.clock.after(self._beat_ns, self._heartbeat, pause)

    # ------------------------------------------------------------ the process

    def _new_learner(self) -> FleetLearner:
        self._instances += 1
        return FleetLearner(self._world, self, f"{self.name}-{self._instances}")

    def _lose_state(self) -> None:
        """Every replica of this island's state is gone: what was not handed over is lost."""
        unanswered = self.machine.unanswered_tokens
        self._take_back(sum(unanswered) / max(1, len(unanswered)))
        self._learner.disconnect("every chip failed")
        self._learner.dead = True
        self._learner = self._new_learner()

    def discarded(self, tokens: int) -> None:
        """Of one fragment."""
        self._take_back(tokens / self._world.config.fragments)

    def _take_back(self, tokens: float) -> None:
        seconds = tokens / STEP_TOKENS * self._step_s
        self.useful_s -= seconds
        self.lost_s += seconds

    def look_up(self) -> None:
        """Something came from the syncer, or a transfer is over."""
        if not self._running and not self._stalled:
            self._do_at_boundary()

    def session_ended(self) -> None:
        if not self._stalled:
            self._learner.connect()

    # ------------------------------------------------------------ what lies between learner and syncer

    def link_down(self) -> None:
        self._learner.disconnect("the syncer or the relay is gone")

    def link_up(self) -> None:
        if (not self._stalled or self._world.keep_links) and not self.gone:
            self._learner.connect()
