"""How fast is the lab: tokens/s of M learners in virtual time over tokens/s of plain training of one model.

    python benchmarks/lab.py --model small --batch 256 --seq 256 --tokens 20000000        # one GPU, minutes
    python benchmarks/lab.py --model nano --batch 16 --seq 64 --tokens 200000              # a laptop

Plain training is the lab's own step (captured on a GPU) with a learner's batch, one step after the other, without
anything of Atoll around it. Both are measured in one process, one after the other, after a run that warms up.
"""

from __future__ import annotations

import argparse
import json

from atoll.instruments.lab import LabSpec, Workshop, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small")
    parser.add_argument("--learners", type=int, nargs="+", default=[8])
    parser.add_argument("--batch", type=int, default=256, help="sequences of all learners together")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    arguments = parser.parse_args()
    workshop = Workshop(arguments.device, compiles=arguments.compile)
    for learners in arguments.learners:
        common = {
            "model": arguments.model,
            "learners": learners,
            "batch": arguments.batch,
            "seq": arguments.seq,
            "optimizer": arguments.optimizer,
            "evals": 1,
        }
        run(LabSpec(method="decoupled", tokens=arguments.tokens // 20, **common), keep=workshop)
        rates = {}
        for method in ("single", "decoupled"):
            rates[method] = run(LabSpec(method=method, tokens=arguments.tokens, **common), keep=workshop).tokens_per_s
        line = {
            **common,
            "plain_tokens_per_s": round(rates["single"]),
            "lab_tokens_per_s": round(rates["decoupled"]),
            "ratio": round(rates["decoupled"] / rates["single"], 3),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
