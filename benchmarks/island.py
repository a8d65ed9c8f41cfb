"""What Atoll costs an island of ranks: steps/s with `learner.step` over steps/s without, bytes and memory of each rank.

    python benchmarks/island.py --ranks 4                                       # the ratio, with DDP inside
    python benchmarks/island.py --ranks 4 --kind fsdp
    python benchmarks/island.py --ranks 4 --kind fsdp --width 2048 --layers 12 --batch 8 --segments 4 --steps 8
                                                                                # 50M parameters: memory shows

Ranks are gloo processes on this machine's CPU. The syncer is another process. Segments with and without Atoll
alternate, in the same processes on the same batches, so that whatever else the machine does hits both alike; each
segment with Atoll is set against the mean of its two neighbours without, and the ratio is the median of these, with its
quartiles. Memory is what a rank's process has more, from just before the Learner is made to after the last segment.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WARM_STEPS = 48
"""Every fragment twice, and all caches warm."""
SEGMENTS_MIN = 4
"""Below that there are no quartiles to speak of."""
PASSED_ON = ("kind", "steps", "segments", "seconds", "width", "layers", "batch")
"""What a rank needs to know of the options."""
SAID = ("ranks", "sync_every", *PASSED_ON)


def build(kind: str, width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def rank_main(options: argparse.Namespace) -> None:
    import atoll
    from atoll import kernels

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = build(options.kind, options.width, options.layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x = torch.randn(options.batch, options.width)

    def train() -> None:
        loss = (net(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def segment(steps: int, learner: atoll.Learner | None) -> tuple[float, int]:
        """Steps per second, and the nanoseconds of the training thread that Atoll had."""
        dist.barrier()
        began_s, inside_ns = time.perf_counter(), 0
        for _ in range(steps):
            train()
            if learner is not None:
                entered_ns = time.perf_counter_ns()
                learner.step(tokens=options.batch)
                inside_ns += time.perf_counter_ns() - entered_ns
        dist.barrier()
        return steps / (time.perf_counter() - began_s), inside_ns

    segment(WARM_STEPS, None)
    kernels.warm_up()  # compilers and libraries take the same memory whatever the model is
    assert atoll.Learner
    before = resident_bytes()
    with atoll.Learner(net, optimizer, checkpoint_every_s=0) as learner:
        segments = affordable(options, segment(WARM_STEPS, learner)[0])
        found = [segment(options.steps, learner if number % 2 else None) for number in range(2 * segments + 1)]
        memory = resident_bytes() - before
        vault = learner._shell.vault
        assert vault is not None
        told = {"rank": dist.get_rank(), "owned": sum(fragment.size for fragment in vault.layout.fragments)}
        told |= {"memory_bytes": memory, "versions": sum(learner.versions())}
    inside_us = sum(inside_ns for _, inside_ns in found) / (segments * options.steps) / 1000
    told |= {"rates": [rate for rate, _ in found], "step_us": inside_us}
    Path(options.out, f"rank-{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def affordable(options: argparse.Namespace, rate: float) -> int:
    """Segments with Atoll that the time is enough for; the same on all ranks."""
    told = torch.tensor([options.seconds * rate / options.steps / 2 - 1])
    dist.broadcast(told, 0)
    return max(SEGMENTS_MIN, min(options.segments, int(told)))


def report(options: argparse.Namespace, ranks: list[dict[str, Any]], run: Path) -> dict[str, Any]:
    from atoll.observe import events, read_events

    rates = ranks[0]["rates"]
    neighbours = [(a + b) / 2 for a, b in itertools.pairwise(rates[::2])]
    ratios = [w / n for w, n in zip(rates[1::2], neighbours, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    parameters = options.layers * (options.width + 1) * options.width
    pushed = [one for _, _, one in read_events(run) if isinstance(one, events.LearnerPushed)]
    moved = [one for _, _, one in read_events(run) if isinstance(one, events.IslandBytes)][-1]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "ranks": options.ranks,
        "kind": options.kind,
        "parameters": parameters,
        "step_ms": round(1000 / statistics.median(rates[::2]), 2),
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "segments": len(ratios),
        "steps_each": options.steps,
        "learner_step_us": [round(one["step_us"], 1) for one in ranks],
        "contributions": len(pushed),
        "owned_values": [one["owned"] for one in ranks],
        "bytes_up": list(moved.up),
        "bytes_down": list(moved.down),
        "memory_mib": [round(one["memory_bytes"] / 2**20, 1) for one in ranks],
        "memory_bytes_per_parameter": [round(one["memory_bytes"] / parameters, 2) for one in ranks],
        "shard_bytes": 4 * parameters // options.ranks,
    }


COST = (
    "| what | parameters | step | steps/s with over without, median | quartiles | pairs of segments | H | when, where |"
)
RANKS = "| rank | `learner.step`, mean | values owned | bytes up | bytes down | memory more | per own value |"


def rule(head: str) -> str:
    return "|---" * (head.count("|") - 1) + "|"


def cost_row(options: argparse.Namespace, found: dict[str, Any]) -> str:
    """One row of the first table of docs/results/islands.md."""
    low, high = found["quartiles"]
    cells = [f"{options.ranks} gloo ranks, {found['kind']}", f"{found['parameters']:,}", f"{found['step_ms']:g} ms"]
    cells += [
        f"{found['ratio']:.4f}",
        f"{low:.4f} to {high:.4f}",
        f"{found['segments']} of {found['steps_each']} steps",
    ]
    return f"| {' | '.join(cells)} | {options.sync_every} | {found['date']}, {os.cpu_count()} cores |"


def rank_rows(options: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    columns = (found[name] for name in ("learner_step_us", "owned_values", "bytes_up", "bytes_down", "memory_mib"))
    rows = []
    for rank, (us, owned, up, down, mib) in enumerate(zip(*columns, strict=True)):
        per = found["memory_bytes_per_parameter"][rank] * options.ranks
        rows.append(f"| {rank} | {us:g} us | {owned:,} | {up:,} | {down:,} | {mib:g} MiB | {per:.1f} bytes |")
    return rows


def section(options: argparse.Namespace, found: dict[str, Any]) -> str:
    """What was measured, as rows of the page's tables."""
    given = " ".join(f"--{name.replace('_', '-')} {getattr(options, name)}" for name in SAID)
    lines = [f"### {found['date']}, {os.cpu_count()} cores", "", f"    python benchmarks/island.py {given}", ""]
    lines += [COST, rule(COST), cost_row(options, found), ""]
    lines += [f"{found['contributions']} contributions.", "", RANKS, rule(RANKS), *rank_rows(options, found)]
    return "\n".join(["", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kind", default="ddp", choices=("ddp", "fsdp"))
    parser.add_argument("--steps", type=int, default=24, help="of each segment")
    parser.add_argument("--segments", type=int, default=14, help="with Atoll, at most; one more without")
    parser.add_argument("--seconds", type=float, default=30.0, help="for all segments: slow machines make fewer")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sync-every", type=int, default=8, help="H")
    parser.add_argument("--report", default="", help="a Markdown page that gets a dated section")
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        rank_main(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "atoll", "run", "--learners", "1", "--ranks", str(options.ranks)]
        argv += [
            "--sync-every",
            str(options.sync_every),
            "--out",
            f"{folder}/run",
            "--",
            sys.executable,
            __file__,
            "--out",
            folder,
        ]
        for name in PASSED_ON:
            argv += [f"--{name}", str(getattr(options, name))]
        done = subprocess.run(argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            logs = [path.read_text()[-2000:] for path in sorted(Path(folder, "run", "logs").glob("*"))]
            sys.exit("\n".join([done.stdout, done.stderr, *logs]))
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
        found = report(options, ranks, Path(folder, "run"))
    print(section(options, found))
    if options.report:
        with Path(options.report).open("a") as page:
            page.write(section(options, found))


if __name__ == "__main__":
    main()
