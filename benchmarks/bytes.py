"""Bytes on the wire against data-parallel's ring all-reduce in bf16, for the same steps.

    python benchmarks/bytes.py [--learners 4] [--steps 240] [--model tiny]

Runs `atoll train` once (decoupled, H=24, int4 both ways) and reads what the syncer counted: payload bytes of
contributions, of updates, and of the whole parameters that joiners exchange. Data-parallel sends 2 (M-1)/M x 2 bytes
per parameter and learner step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile

from atoll.codec import get_codec

SYNC_EVERY = 24


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--model", default="tiny")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "atoll", "train", "--json", "--out", f"{folder}/run", "--model", options.model]
        command += ["--learners", str(options.learners), "--steps", str(options.steps), "--sync-every", str(SYNC_EVERY)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    parameters, dp = result["parameters"], result["dp_bytes_equivalent"]
    measured = result["bytes_up"] + result["bytes_down"]
    joins = 4 * parameters * options.learners  # every learner gets the parameters whole, once
    print(
        f"{options.learners} learners, {result['tokens']} tokens, {parameters} parameters, {result['commits']} commits"
    )
    print("| | MB | data-parallel over this |")
    print("|---|---|---|")
    print(f"| data-parallel, ring, bf16 | {dp / 1e6:.1f} | 1 |")
    print(f"| Atoll, everything | {measured / 1e6:.2f} | {dp / measured:.1f} |")
    print(f"| Atoll, without the first parameters | {(measured - joins) / 1e6:.2f} | {dp / (measured - joins):.1f} |")
    per_parameter = 2 * get_codec("int4").size_max(1 << 20) / (1 << 20)
    for learners in (options.learners, 10**9):
        ring = 2 * (learners - 1) / learners * 2 * SYNC_EVERY
        print(f"by formula, M = {learners}: {ring:.1f} / {per_parameter:.4f} bytes = {ring / per_parameter:.1f}x")


if __name__ == "__main__":
    main()
