"""A plausible run without running one: four learners, one killed and back, one slowed 4x. For tests and for looking."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from atoll.observe import RunState
from atoll.observe import events as ev
from atoll.observe.lines import encode

SECOND = 1_000_000_000
ORIGIN_NS = 1_760_000_000 * SECOND
FRAGMENTS = 24
PARAMETERS = 3_200_000
STEP_TOKENS = 4096
KILLED, SLOWED = "learner-2", "learner-1"

Timed = tuple[float, ev.Event]
"""A time in seconds, and what happened then."""


def state_of(*events: Timed) -> RunState:
    """A run of which these events are known, in order of time."""
    state = RunState()
    for t_s, event in sorted(events, key=lambda stamped: stamped[0]):
        state.apply(int(t_s * SECOND), event)
    return state


@dataclass
class _Learner:
    id: str
    t_s: float
    step: int = 0
    tokens: int = 0
    generation: int = 1
    reported_s: float = 0.0
    rejoined: bool = False


class SyntheticRun:
    """Builds the events into `events`, sorted by time; (t_ns, source, event)."""

    def __init__(self, *, seconds: float = 120.0, learners: int = 4, seed: int = 1, synchronous: bool = False) -> None:
        self.random = random.Random(seed)
        self.seconds = seconds
        self.synchronous = synchronous
        self.kill_s, self.back_s = 0.30 * seconds, 0.30 * seconds + 5.2
        self.slow_s = (0.45 * seconds, 0.75 * seconds)
        self.tokens = 0
        self.events: list[tuple[int, str, ev.Event]] = []
        self.learners = [_Learner(f"learner-{i}", 4.0 + 0.1 * i) for i in range(learners)]
        self._launch()
        self._train()
        self._step_times_ns = sorted(t_ns for t_ns, _, event in self.events if isinstance(event, ev.LearnerSteps))
        self._rounds()
        self._finish()
        self.events.sort(key=lambda stamped: stamped[0])

    def _add(self, t_s: float, source: str, event: ev.Event) -> None:
        self.events.append((ORIGIN_NS + int(t_s * SECOND), source, event))

    def _launch(self) -> None:
        count = len(self.learners)
        budget = int(STEP_TOKENS * self.seconds / 0.3 * count * 0.9)
        title = f"{count} learners, tiny GPT on the standard library"
        self._add(
            0, "launcher", ev.RunStarted("decoupled", count, PARAMETERS, 24, FRAGMENTS, "int4", "int4", budget, title)
        )
        self._add(0.1, "launcher", ev.ProcessStarted("syncer", "syncer", 100))
        self._add(0.9, "syncer", ev.SyncerStarted("demo", "127.0.0.1:7077", 100))
        for i, one in enumerate(self.learners):
            self._add(0.2 + 0.01 * i, "launcher", ev.ProcessStarted("learner", one.id, 200 + i))
            self._add(3.0 + 0.1 * i, one.id, ev.LearnerStarted(one.id, 200 + i))
            self._add(3.9 + 0.1 * i, one.id, ev.LearnerJoined(one.id, 1, 0, 800_000_000))
            self._add(3.9 + 0.1 * i, "syncer", ev.MemberChanged(one.id, 1, "active", "ready"))
        share = PARAMETERS // FRAGMENTS
        sizes = [share] * (FRAGMENTS - 1) + [PARAMETERS - share * (FRAGMENTS - 1)]
        self._add(3.9, "syncer", ev.LayoutFixed(PARAMETERS, 40, FRAGMENTS, sizes))

    def _step_s(self, one: _Learner) -> float:
        base = 0.29 * (1 + 0.05 * math.sin(one.t_s / 7) + self.random.gauss(0, 0.03))
        slow = one.id == SLOWED and self.slow_s[0] <= one.t_s < self.slow_s[1]
        return base * (4.0 if slow else 1.0)

    def _train(self) -> None:
        while True:
            one = min(self.learners, key=lambda learner: learner.t_s)
            if one.t_s >= self.seconds:
                return
            if one.id == KILLED and one.t_s >= self.kill_s and not one.rejoined:
                self._kill(one)
                continue
            duration_s = self._step_s(one)
            if one.id == KILLED and one.t_s + duration_s > self.kill_s and not one.rejoined:
                one.t_s = self.kill_s  # the step during which it is killed is never reported
                continue
            one.t_s += duration_s
            one.step += 1
            one.tokens += STEP_TOKENS
            self.tokens += STEP_TOKENS
            self._report(one, duration_s)
            if one.id == "learner-0" and one.step % 25 == 0:
                loss = self._loss() - 0.06
                self._add(one.t_s, one.id, ev.LearnerEvaluated(one.id, one.step, loss, self.tokens))

    def _loss(self) -> float:
        return 1.35 + 4.1 * math.exp(-((self.tokens / 4.5e5) ** 0.55))

    def _report(self, one: _Learner, duration_s: float) -> None:
        parts = {"stall": 0.25 if self.synchronous else 0.0, "adopt": 0.006, "snapshot": 0.004, "overhead": 0.008}
        spent = {name: int(share * duration_s * SECOND) for name, share in parts.items()}
        compute = int(duration_s * SECOND) - sum(spent.values())
        self._add(
            one.t_s,
            one.id,
            ev.LearnerSteps(
                one.id,
                one.generation,
                one.step,
                1,
                STEP_TOKENS,
                one.tokens,
                self._loss() + self.random.gauss(0, 0.06),
                compute,
                spent["stall"],
                spent["adopt"],
                spent["snapshot"],
                spent["overhead"],
                self.random.choice([0, 0, 1, 1, 2]) + (3 if one.id == SLOWED and duration_s > 0.6 else 0),
            ),
        )

    def _kill(self, one: _Learner) -> None:
        t_s = self.kill_s
        self._add(t_s, "launcher", ev.FaultInjected("kill", one.id, "SIGKILL; the supervisor restarts it"))
        self._add(t_s + 0.1, "launcher", ev.ProcessExited("learner", one.id, 202, -9))
        self._add(t_s + 0.6, "launcher", ev.ProcessStarted("learner", one.id, 302))
        self._add(t_s + 4.1, f"{one.id}-302", ev.LearnerStarted(one.id, 302))
        one.step = max(learner.step for learner in self.learners)
        self._add(t_s + 4.9, f"{one.id}-302", ev.LearnerJoined(one.id, 2, one.step, 700_000_000))
        one.generation, one.t_s, one.rejoined, one.tokens = 2, self.back_s, True, 0

    def _rounds(self) -> None:
        slow, until = self.slow_s
        self._add(slow, "launcher", ev.FaultInjected("slow", SLOWED, "every step takes 4x as long", ORIGIN_NS))
        self._add(until, "launcher", ev.FaultEnded("slow", SLOWED))
        t_s, number, versions = 5.0, 0, [0] * FRAGMENTS
        bytes_up = bytes_down = 0
        size = int(PARAMETERS / FRAGMENTS * 0.516)
        while t_s < self.seconds - 0.5:
            fragment = number % FRAGMENTS
            asked = [one.id for one in self.learners if not (one.id == KILLED and self.kill_s < t_s < self.back_s)]
            self._add(t_s, "syncer", ev.RoundLaunched(number, 1, fragment, int((t_s - 4) / 0.3), asked, 2))
            merged = []
            for learner in asked:
                late = learner == SLOWED and slow < t_s < until and self.random.random() < 0.6
                at_s = t_s + self.random.uniform(0.02, 0.15) + (0.7 if late else 0.0)
                received = ev.ContributionReceived(
                    number, fragment, learner, 1, number, size, 24, 24 * STEP_TOKENS, 1.0, late
                )
                self._add(at_s, "syncer", received)
                pushed = ev.LearnerPushed(
                    learner, fragment, number, number, size, 24, 24 * STEP_TOKENS, 1, 1, "late" if late else "accepted"
                )
                self._add(at_s, learner, pushed)
                bytes_up += size
                merged += [] if late else [learner]
            versions[fragment] += 1
            bytes_down += size * len(asked)
            full = len(merged) == len(asked)
            closed = ev.RoundClosed(
                number,
                fragment,
                merged,
                0,
                "all answered" if full else "quorum and grace",
                90_000_000,
                60_000_000,
                170_000_000,
            )
            self._add(t_s + 0.17, "syncer", closed)
            rho = 0.55 * math.exp(-t_s / 80) + self.random.gauss(0, 0.08) if versions[fragment] > 1 else math.nan
            commit = ev.Committed(
                fragment,
                versions[fragment],
                number,
                merged,
                24 * STEP_TOKENS * len(merged),
                3_000_000,
                size,
                1.0,
                rho,
                7,
            )
            self._add(t_s + 0.18, "syncer", commit)
            number += 1
            t_s += 0.3
            if number % 4 == 0:
                self._stats(t_s, number, bytes_up, bytes_down)
        self._stats(self.seconds, number, bytes_up, bytes_down)

    def _stats(self, t_s: float, commits: int, bytes_up: int, bytes_down: int) -> None:
        processed = STEP_TOKENS * bisect_right(self._step_times_ns, ORIGIN_NS + int(t_s * SECOND))
        lost = 12 * STEP_TOKENS if t_s > self.kill_s else 0
        pending = min(processed - lost, 11 * STEP_TOKENS * len(self.learners))
        stats = ev.SyncerStats(
            int(t_s / 0.3), 4, commits, 1, commits * 3, commits // 9, bytes_up, bytes_down, processed,
            processed - lost - pending, pending, {"learner_lost": lost} if lost else {},
        )  # fmt: skip
        self._add(t_s, "syncer", stats)

    def _finish(self) -> None:
        for one in self.learners:
            finished = ev.LearnerFinished(one.id, one.step, one.tokens, "token budget reached")
            self._add(self.seconds + 0.4, one.id, finished)
            pid = (300 if one.rejoined else 200) + int(one.id[-1])
            self._add(self.seconds + 0.8, "launcher", ev.ProcessExited("learner", one.id, pid, 0))
        self._add(self.seconds + 1.0, "syncer", ev.SyncerStopped("run over", 400))
        self._add(
            self.seconds + 1.5, "launcher", ev.RunFinished("token budget reached", self._loss() - 0.06, self.seconds)
        )

    def write(self, folder: Path) -> Path:
        """Write the events as a run folder."""
        return write_events(self.events, folder)


def write_events(events: list[tuple[int, str, ev.Event]], folder: Path) -> Path:
    """One file per source, as the processes of a run would leave them."""
    (folder / "events").mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[bytes]] = {}
    for t_ns, source, event in events:
        lines.setdefault(source, []).append(encode(t_ns, event))
    for source, parts in lines.items():
        (folder / "events" / f"{source}.jsonl").write_bytes(b"".join(parts))
    return folder
