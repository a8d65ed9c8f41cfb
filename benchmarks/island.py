"""What Atoll costs an island of ranks: steps/s with and without it, the training thread's time, bytes and memory.

    python benchmarks/island.py --ranks 4 --steps 300

Ranks are gloo processes on this machine's CPU, with DistributedDataParallel or FSDP2 inside. The syncer is another
process. Both variants train the same model on the same batches, in turns, in the same processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def build(kind: str, width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def one_step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    loss = (net(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def rate(steps: int, work: Any) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        work()
    dist.barrier()
    return steps / (time.perf_counter() - began)


def rank_main(options: argparse.Namespace) -> None:
    import atoll

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = build(options.kind, options.width, options.layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x = torch.randn(options.batch, options.width)
    rate(20, lambda: one_step(net, optimizer, x))
    inside_ns = 0

    def with_atoll() -> None:
        nonlocal inside_ns
        one_step(net, optimizer, x)
        began = time.perf_counter_ns()
        learner.step(tokens=options.batch)
        inside_ns += time.perf_counter_ns() - began

    rates: dict[str, list[float]] = {"without": [], "with": []}
    with atoll.Learner(net, optimizer, learner_id="island") as learner:
        rate(20, with_atoll)
        inside_ns = 0
        for _ in range(options.turns):
            rates["without"].append(rate(options.steps, lambda: one_step(net, optimizer, x)))
            rates["with"].append(rate(options.steps, with_atoll))
        versions = sum(learner.versions())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    vault = learner._shell.vault
    assert vault is not None
    owned = sum(f.size for f in vault.layout.fragments)
    best = {name: max(found) for name, found in rates.items()}
    steps = options.turns * options.steps
    told = {"rank": dist.get_rank(), "kind": options.kind, **best, "ratio": best["with"] / best["without"]}
    told |= {"step_us": inside_ns / steps / 1000, "owned": owned, "rss_mib": memory, "versions": versions}
    Path(options.out, f"rank-{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kind", default="ddp", choices=("ddp", "fsdp"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    if options.out:
        rank_main(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "atoll", "run", "--learners", "1", "--ranks", str(options.ranks)]
        argv += ["--sync-every", "24", "--out", f"{folder}/run", "--", "python", __file__, "--out", folder]
        for name in ("kind", "steps", "turns", "width", "layers", "batch"):
            argv += [f"--{name}", str(getattr(options, name))]
        done = subprocess.run(argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        result = json.loads(Path(folder, "run", "result.json").read_text())
        for path in sorted(Path(folder).glob("rank-*.json")):
            print(path.read_text())
        print(json.dumps({name: result[name] for name in result if "bytes" in name}))


if __name__ == "__main__":
    main()
