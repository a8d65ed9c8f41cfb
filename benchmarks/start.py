"""Seconds from a command to the first step, and from a kill to the next one: Atoll against the bare script, in one run.

    python benchmarks/start.py [--runs 5] [--learners 1] [--source OTHER_CHECKOUT]

The same script, with and without Atoll, in turn; with another checkout (an older one, say) as well. `atoll run` has to
start a syncer, too; one of its learners is killed after a while. Each mark is in seconds of wall clock after the
command (or the kill); CPU seconds of the script's process are beside them, because a busy machine stretches the wall
clock and not those.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

SCRIPT = """
import json, os, sys, time
marks = {"process": time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
         + int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")}
def mark(name):
    marks[name], marks[name + "_cpu"] = time.time(), time.process_time()
import torch
mark("torch")
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())
learner = None
if sys.argv[2] == "atoll":
    import atoll
    mark("atoll")
    learner = atoll.Learner(model, optimizer)
    mark("made")
    learner.start()
    mark("joined")
for step in range(10**6):
    optimizer.zero_grad()
    model(torch.ones(8, 256)).square().mean().backward()
    optimizer.step()
    if learner:
        learner.step(tokens=8)
    if not step:
        mark("step")
        with open(sys.argv[1], "a") as out:
            out.write(json.dumps({"pid": os.getpid(), **marks}) + "\\n")
        if sys.argv[2] == "bare":
            break
    time.sleep(0.02)
"""
TRAIN_S = 3.0
WAIT_S_MAX = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument("--source", type=Path, help="another checkout, to compare with this one")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a warm cache is meant
    here = Path(__file__).resolve().parents[1]
    sources = {"this checkout": here, **({"the other": options.source.resolve()} if options.source else {})}
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        for number in range(options.runs + 1):
            made = {"the bare script": bare_run(folder, number)}
            for name, source in sources.items():
                first, again = atoll_run(folder, f"{number}-{source.name}", source, options.learners)
                made |= {f"{name}, atoll run": first, f"{name}, after a kill": again}
            for kind, row in made.items() if number else ():  # the first fills caches
                rows[kind].append(row)
    for kind, several in rows.items():
        print(f"{kind}: " + ", ".join(f"{key} {_middle(several, key)}" for key in several[0]))


def bare_run(folder: Path, number: int) -> dict[str, float]:
    marks = folder / f"bare-{number}.jsonl"
    began = time.time()
    subprocess.run([sys.executable, folder / "script.py", marks, "bare"], check=True)
    return _since(json.loads(marks.read_text()), began)


def atoll_run(folder: Path, name: str, source: Path, learners: int) -> tuple[dict[str, float], dict[str, float]]:
    """The last of the learners to make its first step, and the one that was killed."""
    marks, log = folder / f"atoll-{name}.jsonl", folder / f"log-{name}"
    script = [sys.executable, str(folder / "script.py"), str(marks), "atoll"]
    command = [sys.executable, "-m", "atoll", "run", "--learners", str(learners), "--out", str(folder / f"run-{name}")]
    own = {**os.environ, "PYTHONPATH": str(source / "src")}
    began = time.time()
    with log.open("wb") as out:
        run = subprocess.Popen([*command, "--", *script], stdout=out, stderr=out, start_new_session=True, env=own)
    try:
        first = _wait(marks, learners)
        time.sleep(TRAIN_S)
        killed = time.time()
        os.kill(int(first["pid"]), signal.SIGKILL)
        again = _wait(marks, learners + 1)
    except TimeoutError:
        sys.exit(f"no step came: {log.read_text()[-2000:]}")
    finally:
        os.killpg(run.pid, signal.SIGTERM)
        run.wait()
    return _since(first, began), _since(again, killed)


def _wait(marks: Path, count: int) -> dict[str, Any]:
    deadline = time.time() + WAIT_S_MAX
    while time.time() < deadline:
        lines = marks.read_text().splitlines() if marks.exists() else []
        if len(lines) >= count:
            return dict(json.loads(lines[count - 1]))
        time.sleep(0.02)
    raise TimeoutError


def _since(marks: dict[str, float], began: float) -> dict[str, float]:
    return {k: v if k.endswith("_cpu") else v - began for k, v in marks.items() if k != "pid"}


def _middle(rows: list[dict[str, float]], key: str) -> str:
    return f"{statistics.median(row[key] for row in rows):.2f}"


if __name__ == "__main__":
    main()
