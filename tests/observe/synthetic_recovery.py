"""A run in which everything breaks once, without running one: five learners, two syncer kills (the second one loses its
disk), three learner kills with a rung each, a full disk, a lost link, and Ctrl-C with a resume three hours later."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path

from synthetic_run import FRAGMENTS, ORIGIN_NS, PARAMETERS, SECOND, STEP_TOKENS, write_events

from atoll.observe import events as ev

STEP_S = 0.3
PAUSE_S = 3 * 3600.0
STOP_S = 180.0
END_S = 240.0
"""In seconds of running time: what comes after STOP_S lies PAUSE_S later on the clock."""
KILLS = {
    "learner-2": (40.0, 4.5, "checkpoint", "of step 96, generation 1"),
    "learner-3": (60.0, 6.0, "peer", "of learner learner-0 at its step 180"),
    "learner-1": (75.0, 5.2, "parameters", "no checkpoint, and no peer answered within 10 s"),
}
"""learner: killed at, back after, rung, detail"""
CUT_OFF = ("learner-4", 120.0, 150.0)
SYNCER_AWAY = ((90.0, 94.2), (160.0, 163.1))
DISK_FULL = (105.0, 125.0)
SLOT_BYTES = 3 * 4 * PARAMETERS // FRAGMENTS
SNAPSHOT = "memory://runs/demo"
DAMAGED = "fragment 7: both slots fail their checksum (header 0x1f2e, read 0x99aa)"
HEALED = (1, 3, 4)


@dataclass
class _Island:
    id: str
    pid: int
    step_times_s: list[float] = field(default_factory=list)
    taken_s: dict[int, float] = field(default_factory=dict)

    def steps(self, fragment: int, t_s: float) -> int:
        """Steps since its last contribution for a fragment."""
        return bisect_left(self.step_times_s, t_s) - bisect_left(self.step_times_s, self.taken_s.get(fragment, 0.0))


class RecoveryRun:
    """Builds the events into `events`, sorted by time; (t_ns, source, event)."""

    def __init__(self, *, resumed: bool = True, seed: int = 3) -> None:
        self.random = random.Random(seed)
        self.end_s = END_S if resumed else STOP_S
        self.events: list[tuple[int, str, ev.Event]] = []
        self.islands = [_Island(f"learner-{i}", 200 + i) for i in range(5)]
        self.syncer = "syncer-100"
        self.tokens = 0
        self._launch(0.0, "fresh")
        for island in self.islands:
            self._train(island)
        self._accidents()
        self._rounds()
        self._books()
        self._finish("SIGINT", STOP_S)
        if resumed:
            self._launch(STOP_S + 0.01, "checkpoint")
            self._finish("finished", END_S)
        self.events.sort(key=lambda stamped: stamped[0])

    def _add(self, t_s: float, source: str, event: ev.Event) -> None:
        self.events.append((self.t_ns(t_s), source, event))

    @staticmethod
    def t_ns(t_s: float) -> int:
        """The clock at a moment of running time."""
        return ORIGIN_NS + int((t_s + (PAUSE_S if t_s > STOP_S + 1.5 else 0.0)) * SECOND)

    def write(self, folder: Path) -> Path:
        """Write the events as a run folder."""
        return write_events(self.events, folder)

    # ------------------------------------------------------------ starting and ending

    def _launch(self, at_s: float, rung: str) -> None:
        """Starting takes 4 s. What belongs to a resumed launch is put 2 s later, beyond the pause."""
        first = at_s == 0.0
        t_s = at_s if first else at_s + 2.0
        budget, title = 4_000 * STEP_TOKENS, "five islands, everything breaks"
        started = ev.RunStarted("decoupled", 5, PARAMETERS, 24, FRAGMENTS, "int4", "int4", budget, title)
        self._add(t_s, "launcher", started)
        self._start_syncer(t_s + 0.1, t_s + 0.9, 100 if first else 900, 1 if first else 4)
        if first:
            share = PARAMETERS // FRAGMENTS
            sizes = [share] * (FRAGMENTS - 1) + [PARAMETERS - share * (FRAGMENTS - 1)]
            self._add(3.9, self.syncer, ev.LayoutFixed(PARAMETERS, 40, FRAGMENTS, sizes))
        else:
            self._add(
                t_s + 1.0, self.syncer, ev.SyncerRecovered("slots", True, [40] * FRAGMENTS, 9_000_000, 210_000_000)
            )
        for i, one in enumerate(self.islands):
            one.pid = (200 if first else 500) + i
            self._start_learner(
                one, (t_s + 0.2, t_s + 3.0), 1 if first else 3, rung, "of step 560, generation 2" if not first else ""
            )

    def _start_syncer(self, begin_s: float, serve_s: float, pid: int, epoch: int) -> None:
        self.syncer = f"syncer-{pid}"
        self._add(begin_s, "launcher", ev.ProcessStarted("syncer", "syncer", pid))
        self._add(serve_s, self.syncer, ev.SyncerStarted("demo", "127.0.0.1:7077", pid, epoch, "commit"))

    def _start_learner(
        self, one: _Island, times_s: tuple[float, float], generation: int, rung: str, detail: str
    ) -> None:
        begin_s, ready_s = times_s
        source = f"learner-{one.id}-{one.pid}"
        self._add(begin_s, "launcher", ev.ProcessStarted("learner", one.id, one.pid))
        self._add(begin_s + 0.7 * (ready_s - begin_s), source, ev.LearnerStarted(one.id, one.pid))
        step = int(max(0.0, begin_s - 4) / STEP_S)
        self._add(ready_s, source, ev.LearnerJoined(one.id, generation, step, 700_000_000))
        self._add(ready_s + 0.01, source, ev.LearnerRecovered(one.id, generation, step, rung, detail, 350_000_000))
        self._add(ready_s + 0.01, self.syncer, ev.MemberChanged(one.id, generation, "active", "ready"))

    def _finish(self, reason: str, t_s: float) -> None:
        last = 900 if reason == "finished" else 102
        for i, one in enumerate(self.islands):
            pid = {0: 200, 1: 301, 2: 302, 3: 303, 4: 204}[i] if reason != "finished" else 500 + i
            source = f"learner-{one.id}-{pid}"
            self._add(t_s + 0.3, source, ev.LearnerFinished(one.id, 600, 600 * STEP_TOKENS, reason))
            self._add(t_s + 0.5, "launcher", ev.ProcessExited("learner", one.id, pid, 0))
        self._add(t_s + 0.8, f"syncer-{last}", ev.SyncerStopped(reason, 700))
        self._add(t_s + 0.9, "launcher", ev.ProcessExited("syncer", "syncer", last, 0))
        loss = 1.31 if reason == "finished" else float("nan")
        self._add(t_s + 1.0, "launcher", ev.RunFinished(reason, loss, t_s))

    # ------------------------------------------------------------ learners

    def _train(self, one: _Island) -> None:
        kill = KILLS.get(one.id)
        t_s, pid, generation = 4.0 + 0.02 * (one.pid % 10), one.pid, 1
        tokens = 0
        while t_s < self.end_s:
            if kill is not None and generation == 1 and t_s + STEP_S > kill[0]:
                t_s, generation = kill[0] + kill[1], 2
                pid += 100
                continue
            if generation < 3 and t_s + STEP_S > STOP_S:
                t_s, generation, pid = STOP_S + 6.0 + 0.02 * (pid % 10), 3, 500 + pid % 100
                continue
            duration_s = STEP_S * (1 + self.random.gauss(0, 0.04))
            t_s += duration_s
            one.step_times_s.append(t_s)
            tokens += STEP_TOKENS
            self._report(one, (t_s, duration_s), (generation, pid), tokens)

    def _report(self, one: _Island, when: tuple[float, float], who: tuple[int, int], tokens: int) -> None:
        t_s, duration_s = when
        spent = [int(share * duration_s * SECOND) for share in (0.006, 0.004, 0.012)]
        loss = 1.3 + 3.5 * 0.985 ** (t_s * 1.6) + self.random.gauss(0, 0.05)
        steps = ev.LearnerSteps(
            one.id, who[0], len(one.step_times_s), 1, STEP_TOKENS, tokens, loss,
            int(duration_s * SECOND) - sum(spent), 0, *spent, 0,
        )  # fmt: skip
        source = f"learner-{one.id}-{who[1]}"
        self._add(t_s, source, steps)
        number = len(one.step_times_s)
        if number % 60 == 0:
            self._add(t_s, source, ev.CheckpointWritten(one.id, number, 25_700_000, 2_400_000, 61_000_000))
        if one.id == "learner-0" and number % 30 == 0:
            self._add(t_s, source, ev.LearnerEvaluated(one.id, number, loss - 0.08, 5 * tokens))

    def _accidents(self) -> None:
        for learner, (at_s, back_s, rung, detail) in KILLS.items():
            one = next(island for island in self.islands if island.id == learner)
            self._add(at_s, "launcher", ev.FaultInjected("kill", learner, "SIGKILL; the supervisor restarts it"))
            self._add(at_s + 0.1, "launcher", ev.ProcessExited("learner", learner, one.pid, -9))
            one.pid += 100
            self._start_learner(one, (at_s + 0.6, at_s + back_s - 0.1), 2, rung, detail)
        for number, (down_s, up_s) in enumerate(SYNCER_AWAY):
            self._add(down_s, "launcher", ev.FaultInjected("kill", "syncer", "SIGKILL; the supervisor restarts it"))
            self._add(down_s + 0.05, "launcher", ev.ProcessExited("syncer", "syncer", 100 + number, -9))
            self._start_syncer(down_s + 0.6, up_s, 101 + number, 2 + number)
            for one in self.islands:
                source = f"learner-{one.id}-{one.pid}"
                self._add(down_s + 0.06, source, ev.LearnerLink(one.id, False, "connection reset"))
                self._add(up_s + 0.3, source, ev.LearnerLink(one.id, True))
        up_s = SYNCER_AWAY[0][1]
        self._add(
            up_s + 0.01, "syncer-101", ev.SyncerRecovered("slots", True, [20] * FRAGMENTS, 4_000_000, 180_000_000)
        )
        up_s = SYNCER_AWAY[1][1]
        recovered = ev.SyncerRecovered("step-150", False, [30] * FRAGMENTS, 8_000_000, 950_000_000, [DAMAGED])
        self._add(up_s + 0.01, "syncer-102", recovered)
        for fragment in HEALED:
            self._add(up_s + 0.8, "syncer-102", ev.FragmentHealed(fragment, 30, 32, "learner-0"))
        learner, down_s, up_s = CUT_OFF
        self._add(down_s, f"learner-{learner}-204", ev.LearnerLink(learner, False, "deadline exceeded"))
        self._add(down_s + 15, "syncer-101", ev.MemberChanged(learner, 1, "away", "silent for 15 s"))
        self._add(up_s, f"learner-{learner}-204", ev.LearnerLink(learner, True))
        self._add(up_s, "syncer-101", ev.MemberChanged(learner, 1, "active", "heard of again"))

    # ------------------------------------------------------------ the syncer

    def _serving(self, t_s: float) -> str:
        for number, (down_s, up_s) in enumerate(SYNCER_AWAY):
            if t_s < down_s:
                return f"syncer-{100 + number}"
            if t_s < up_s + 0.4:
                return ""
        if t_s < STOP_S:
            return "syncer-102"
        return "syncer-900" if t_s > STOP_S + 6.5 else ""

    def _gone(self, learner: str, t_s: float) -> bool:
        kill = KILLS.get(learner)
        cut = learner == CUT_OFF[0] and CUT_OFF[1] <= t_s < CUT_OFF[2]
        return cut or (kill is not None and kill[0] <= t_s < kill[0] + kill[1])

    def _rounds(self) -> None:
        number, versions, t_s = 0, [0] * FRAGMENTS, 6.0
        self.bytes = {"syncer-100": 0}
        while t_s < self.end_s - 0.5:
            syncer = self._serving(t_s)
            if syncer:
                fragment = number % FRAGMENTS
                versions[fragment] += 1
                self._round(t_s, syncer, number, (fragment, versions[fragment]))
                number += 1
                if number % 4 == 0:
                    self._stats(t_s, syncer, number)
            t_s += STEP_S

    def _round(self, t_s: float, syncer: str, number: int, target: tuple[int, int]) -> None:
        fragment, version = target
        asked = [one for one in self.islands if not self._gone(one.id, t_s)]
        steps = [one.steps(fragment, t_s) for one in asked]
        merged = [(one.id, count) for one, count in zip(asked, steps, strict=True) if count]
        size = int(PARAMETERS / FRAGMENTS * 0.516)
        names = [one.id for one in asked]
        self._add(t_s, syncer, ev.RoundLaunched(number, 1, fragment, int((t_s - 4) / STEP_S), names, 2))
        for one, count in merged:
            got = ev.ContributionReceived(
                number, fragment, one, 1, number, size, count, count * STEP_TOKENS, 1.0, False
            )
            self._add(t_s + self.random.uniform(0.02, 0.1), syncer, got)
        for one in asked:
            one.taken_s[fragment] = t_s
        names = [one for one, _ in merged]
        self._add(
            t_s + 0.15, syncer, ev.RoundClosed(number, fragment, names, 0, "all answered", 90_000_000, 0, 150_000_000)
        )
        counts = [count for _, count in merged]
        full = DISK_FULL[0] <= t_s < DISK_FULL[1]
        rho = 0.5 - 0.002 * t_s + self.random.gauss(0, 0.06)
        weights = [count / sum(counts) for count in counts]
        commit = ev.Committed(
            fragment, version, number, names, sum(counts) * STEP_TOKENS, 3_000_000, size, 1.0, rho, 7, counts, weights,
            0 if full else int(self.random.uniform(6, 14) * 1e6) + (60_000_000 if number == 200 else 0),
            0 if full else SLOT_BYTES,
        )  # fmt: skip
        self._add(t_s + 0.17, syncer, commit)
        self.bytes[syncer] = self.bytes.get(syncer, 0) + size * len(names)

    def _stats(self, t_s: float, syncer: str, commits: int) -> None:
        processed = STEP_TOKENS * sum(bisect_left(one.step_times_s, t_s) for one in self.islands)
        lost = STEP_TOKENS * sum(9 for kill in KILLS.values() if t_s > kill[0])
        back = STEP_TOKENS * 4 if t_s > SYNCER_AWAY[1][1] else 0
        pending = min(processed - lost - back, 60 * STEP_TOKENS)
        causes = {name: count for name, count in (("learner_lost", lost), ("rolled_back", back)) if count}
        sent = self.bytes[syncer]
        stats = ev.SyncerStats(
            int(t_s / STEP_S), 5, commits, 1, commits * 5, 0, sent, 2 * sent, processed,
            processed - lost - back - pending, pending, causes,
        )  # fmt: skip
        self._add(t_s, syncer, stats)

    def _books(self) -> None:
        """Durability, snapshots and data."""
        start_s, end_s = DISK_FULL
        self._add(start_s, "syncer-101", ev.DurabilityChanged("degraded", "commit", "No space left on device"))
        self._add(end_s, "syncer-101", ev.DurabilityChanged("commit", "commit", "every fragment is on disk again"))
        for at_s in (30.0, 60.0, 90.0, 150.0, 210.0):
            if at_s < self.end_s:
                written = ev.SnapshotWritten(
                    SNAPSHOT, int(at_s), 12 * PARAMETERS, 800_000_000, [int(at_s / 7)] * FRAGMENTS
                )
                self._add(at_s - 0.05, self._serving(at_s - 0.05), written)
        self._add(120.0, "syncer-101", ev.SnapshotFailed(SNAPSHOT, "503 slow down, after 3 attempts"))
        for second in range(5, int(self.end_s)):
            syncer = self._serving(float(second))
            if syncer:
                lost = sum(2 for kill in KILLS.values() if second > kill[0])
                done = 3 * second - lost
                pool = 2 if any(kill[0] < second < kill[0] + kill[1] for kill in KILLS.values()) else 0
                ledger = ev.DataLedger("train", 5000, done + 10 + pool, done, 10, pool, lost, 1 if second > 80 else 0)
                self._add(float(second), syncer, ledger)
