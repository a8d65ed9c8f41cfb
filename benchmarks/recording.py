"""What --record costs: rounds per second of a real syncer with it and without, in turn, and the bytes it writes.

    python benchmarks/recording.py                      # 100M parameters, 4 learners, three times each
    python benchmarks/recording.py --parameters 10 --seconds 5

The learners are those of rounds.py: they compute nothing, so that the rate is the most that the syncer and this machine
can do. A run that also trains is far below it. Afterwards one recorded run is replayed, which shows how fast that is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rounds import FRAGMENTS, ROW, measure

from atoll.core import TensorSpec
from atoll.instruments.replay import replay


def run(folder: Path, record: bool, arguments: argparse.Namespace, tensors: tuple[TensorSpec, ...]) -> dict[str, float]:
    folder.mkdir()
    command = [sys.executable, "-m", "atoll", "syncer", "--listen", "127.0.0.1:0", "--run-folder", str(folder)]
    command += ["--learners", str(arguments.learners), "--fragments", str(FRAGMENTS), "--quorum", "all"]
    command += ["--durability", arguments.durability, "--record" if record else "--no-record"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not (folder / "syncer.json").exists():
            time.sleep(0.05)
        address = json.loads((folder / "syncer.json").read_text())["address"]
        rate = asyncio.run(measure(address, tensors, arguments.learners, arguments.seconds))
    finally:
        process.kill()
        process.wait()
    events = [json.loads(line) for path in (folder / "events").glob("*.jsonl") for line in path.open()]
    commits = [line for line in events if line["kind"] == "committed"]
    size = sum(path.stat().st_size for path in (folder / "state").glob("recording/*"))
    return {"rounds_per_s": rate, "commits": len(commits), "recorded_bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100.0, help="millions")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--durability", default="commit")
    parser.add_argument("--folder", type=Path, default=None, help="where the run folders go; default: a temporary one")
    arguments = parser.parse_args()
    rows = int(arguments.parameters * 1e6) // ROW // FRAGMENTS
    tensors = tuple(TensorSpec(f"w{i}", (rows, ROW), "float32") for i in range(FRAGMENTS))
    parameters = FRAGMENTS * rows * ROW
    results: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        for number in range(arguments.repeat):
            for record, found in results.items():
                found.append(run(Path(name) / f"{record}-{number}", record, arguments, tensors))
                print("record" if record else "plain", {k: round(v, 2) for k, v in found[-1].items()}, flush=True)
        report = replay(Path(name) / "True-0")
    ratios = [with_["rounds_per_s"] / out["rounds_per_s"] for out, with_ in zip(*results.values(), strict=True)]
    last = results[True][-1]
    seeds = 4 * parameters
    print(f"{parameters / 1e6:.1f}M parameters, {arguments.learners} learners, {FRAGMENTS} fragments")
    for record, found in results.items():
        print(
            f"{'record' if record else 'plain':8} {statistics.median(r['rounds_per_s'] for r in found):8.2f} rounds/s"
        )
    print(f"ratio: median {statistics.median(ratios):.2f}, each {[round(ratio, 2) for ratio in ratios]}")
    print(f"recorded: {(last['recorded_bytes'] - seeds) / last['commits'] / 1e6:.2f} MB per merge, and the seed once")
    print(
        f"replay: {report.merges} merges, {report.merges / report.seconds:.1f} per s, identical: {report.identical}, "
        f"left out: {report.left_out}"
    )


if __name__ == "__main__":
    main()
