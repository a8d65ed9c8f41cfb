"""The soak: one run in which learners (and now and then the syncer) are killed with SIGKILL, against its quiet twin.

    python benchmarks/soak.py                                       # 100 kills of learners, 4 learners, nano model
    python benchmarks/soak.py --kills 10 --steps 1200 --every 4     # a short form

Both runs process the same number of tokens with the same settings. A killed learner is started again at once by the
supervisor. At the end it prints, and writes as JSON next to the run folders: kills, how far the losses are apart, the
ledger, the longest pause between two commits, the rungs on which learners came back and how many steps they needed to
contribute again, and the syncer's memory, disk and event bytes early and late.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.core import SyncConfig
from atoll.launch import LaunchPlan, RestartPolicy, train_config
from atoll.launch import train as train_module
from atoll.observe import read_events


def run(folder: Path, options: dict[str, Any], killer: Killer | None) -> dict[str, Any]:
    """One `atoll train`, with or without somebody who kills."""
    config, _ = train_config({**options, "out": str(folder)})
    original = train_module._plan

    def patient_plan(*arguments: Any, **named: Any) -> LaunchPlan:
        """The usual plan, but nobody is given up however often it is killed."""
        plan = original(*arguments, **named)
        policy = RestartPolicy(delay_s=0.2, delay_s_max=0.2, restarts_max=10_000, early_deaths_max=100)
        return replace(plan, restarts=policy)

    train_module._plan = patient_plan
    if killer is not None:
        killer.start(folder)
    try:
        finished = train_module.run_train(config, say=lambda text: print(f"  {text}", flush=True))
    finally:
        train_module._plan = original
        if killer is not None:
            killer.stop()
    assert finished.result is not None
    return finished.result


ALIVE_MIN = 3
"""Somebody is killed only while so many of the four train: a process takes some ten seconds to start, and killing
faster than that would leave one learner alone all the time."""


class Killer:
    """Kills a random learner every so often, at a random moment, until the number is reached."""

    def __init__(self, kills: int, every_s: float, syncer_every: int, seed: int) -> None:
        self.kills, self.every_s, self.syncer_every = kills, every_s, syncer_every
        self.learners_killed = self.syncers_killed = 0
        self.samples: list[tuple[float, int, int, int]] = []
        self._dice = random.Random(seed)
        self._stop = threading.Event()

    def start(self, folder: Path) -> None:
        self._folder = folder
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._stop.wait(self._dice.uniform(0.5, 1.5) * self.every_s):
            processes = self._processes()
            self._sample(time.monotonic() - began, processes)
            if self.learners_killed >= self.kills:
                continue
            victims = [p["pid"] for p in processes if p["role"] == "learner" and self._trains(p)]
            if len(victims) < ALIVE_MIN:
                continue
            os.kill(self._dice.choice(victims), signal.SIGKILL)
            self.learners_killed += 1
            if self.syncer_every and self.learners_killed % self.syncer_every == 0:
                for process in processes:
                    if process["role"] == "syncer" and alive(process["pid"]):
                        os.kill(process["pid"], signal.SIGKILL)
                        self.syncers_killed += 1

    def _trains(self, process: dict[str, Any]) -> bool:
        """True for a process that lives and has joined: killing one that still starts would test only the start."""
        events = self._folder / "events" / f"learner-{process['id']}-{process['pid']}.jsonl"
        try:
            return alive(process["pid"]) and '"learner_joined"' in events.read_text()[:20_000]
        except OSError:
            return False

    def _processes(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = json.loads((self._folder / "processes.json").read_text())
        except (OSError, ValueError):
            return []
        return found

    def _sample(self, at_s: float, processes: list[dict[str, Any]]) -> None:
        memory = sum(resident(p["pid"]) for p in processes if p["role"] == "syncer")
        self.samples.append((at_s, memory, size_of(self._folder / "state"), size_of(self._folder / "events")))


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


def analyse(folder: Path, sync_every: int) -> dict[str, Any]:
    """What the events of the faulty run say."""
    commits, rungs, rejoin = [], {}, []
    joined: dict[str, int] = {}
    first_push: dict[str, int] = {}
    for t_ns, _, event in read_events(folder):
        kind = type(event).__name__
        if kind == "Committed":
            commits.append(t_ns)
        elif kind == "LearnerRecovered":
            rungs[event.rung] = rungs.get(event.rung, 0) + 1
            joined[event.learner] = event.step
            first_push.pop(event.learner, None)
        elif kind == "LearnerPushed" and event.learner in joined and event.learner not in first_push:
            first_push[event.learner] = event.steps
            rejoin.append(event.steps)
    gaps = [(b - a) / 1e9 for a, b in itertools.pairwise(commits)]
    return {
        "commits": len(commits),
        "longest_gap_s": round(max(gaps), 2),
        "rungs": rungs,
        "steps_to_first_contribution": {
            "median": statistics.median(rejoin),
            "max": max(rejoin),
            "bound_2H": 2 * sync_every,
        },
    }


def flatness(samples: list[tuple[float, int, int, int]]) -> dict[str, Any]:
    """Medians over the second and the last quarter of the run: after the start, and at the end."""
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    names = ("syncer_memory_mb", "state_mb", "events_mb")
    found = {}
    for index, name in enumerate(names, start=1):
        pair = [statistics.median(s[index] for s in part if s[index]) / 1e6 for part in (early, late)]
        found[name] = {"early": round(pair[0], 2), "late": round(pair[1], 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between two kills")
    parser.add_argument("--syncer-every", type=int, default=25, help="also kill the syncer with every so many learners")
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", type=Path, default=None, help="run folder of a quiet twin that exists already")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    arguments = parser.parse_args()
    options = {
        "learners": 4,
        "steps": arguments.steps,
        "model": arguments.model,
        "batch": 8,
        "seq": 64,
        "seed": arguments.seed,
    }
    killer = Killer(arguments.kills, arguments.every, arguments.syncer_every, arguments.seed)
    faulty = run(arguments.out / "faulty", options, killer)
    if arguments.quiet is not None:
        quiet = json.loads((arguments.quiet / "result.json").read_text())
    else:
        quiet = run(arguments.out / "quiet", options, None)
    found = {
        "learner_kills": killer.learners_killed,
        "syncer_kills": killer.syncers_killed,
        "loss_faulty": faulty["eval_loss"],
        "loss_quiet": quiet["eval_loss"],
        "loss_ratio": faulty["eval_loss"] / quiet["eval_loss"],
        "tokens_faulty": faulty.get("tokens"),
        "tokens_quiet": quiet.get("tokens"),
        "goodput_faulty": faulty.get("goodput"),
        "goodput_quiet": quiet.get("goodput"),
        **analyse(arguments.out / "faulty", SyncConfig().sync_every),
        **flatness(killer.samples),
    }
    (arguments.out / "soak.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
