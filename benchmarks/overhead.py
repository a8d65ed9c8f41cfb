"""What Atoll costs a learner: steps per second with `learner.step` over steps per second without, in one run.

    python benchmarks/overhead.py                       tiny GPT on one CPU thread
    python benchmarks/overhead.py --device cuda --model base --batch 16 --seq 1024
    python benchmarks/overhead.py --sync-every 24
    python benchmarks/overhead.py --device cuda --model base --batch 16 --seq 1024 --copies host   (or device)
    python benchmarks/overhead.py --device cuda --shape 24x14x1792 --batch 8 --seq 1024            (0.93B parameters)
    python benchmarks/overhead.py --device cuda ... --bulk-port off    (payloads through gRPC, for comparison)
    python benchmarks/overhead.py --device cuda ... --apart    (the syncer on cores of its own, as on a host of its own)

One learner and a real syncer process on one machine, int4 both ways, overlap 2, the default H and at most one round per
step: snapshot, encode, push, merge, publish, fetch, adopt. Segments with and without Atoll alternate, so that whatever
else the machine does hits both alike; each segment with Atoll is set against the mean of its two neighbours without,
and the ratio is the median of these, with its quartiles. Behind it: where the CPU time of a step went, by thread. What
`atoll-link` takes is taken with the interpreter's lock, but for a little; so the training thread is without it for that
long, and pays where it has no such slack between what it launches and what the device computes. `atoll-bulk` has the
lock for a small part of its time: it copies and checks payloads without it.
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
import threading
import time
from collections import Counter
from pathlib import Path

import torch

from atoll.core import SyncConfig
from atoll.learner import Learner
from atoll.observe import events, read_events
from atoll.zoo import build_model
from atoll.zoo.gpt import GPT
from atoll.zoo.presets import GPTConfig

SYNCER = """
import sys
from pathlib import Path
from atoll.core.config import SyncConfig
from atoll.syncer import SyncerOptions, run_syncer
config = SyncConfig(sync_every=int(sys.argv[2]))
bulk = None if sys.argv[4] == "off" else int(sys.argv[4])
options = SyncerOptions("127.0.0.1:0", config, Path(sys.argv[1]), durability=sys.argv[3], new_run=True, bulk_port=bulk)
sys.exit(run_syncer(options))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--shape", default="", help="LAYERSxHEADSxWIDTH instead of a model's name")
    parser.add_argument("--copies", default="auto", choices=["auto", "host", "device"], help="where the learner's are")
    parser.add_argument("--durability", default="commit")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--segments", type=int, default=40)
    parser.add_argument("--steps", type=int, default=24, help="steps per segment")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="the syncer has half of the cores, the learner the others")
    parser.add_argument("--bulk-port", default="0", help="of the syncer: off for gRPC alone")
    parser.add_argument("--sync-every", type=int, default=SyncConfig().sync_every, help="H")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", SYNCER, folder, str(options.sync_every), options.durability]
        command.append(options.bulk_port)
        cores = sorted(os.sched_getaffinity(0))
        if options.apart:  # a child inherits what its parent may use, and so do the threads that are made from here on
            os.sched_setaffinity(0, cores[len(cores) // 2 :])
        syncer = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        if options.apart:
            os.sched_setaffinity(0, cores[: len(cores) // 2])
        try:
            measure(options, Path(folder), syncer.pid)
        finally:
            syncer.terminate()
            syncer.wait(60)


def cpu_ns(process: int, names: dict[int, str]) -> Counter[str]:
    """CPU time of a process's threads, by name."""
    found: Counter[str] = Counter()
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            name = names.get(int(task.name)) or (task / "comm").read_text().strip()
            found[name.rstrip("0123456789")] += thread_cpu_ns(task)
        except OSError:  # it has ended meanwhile
            continue
    return found


def thread_cpu_ns(task: Path) -> int:
    """To the nanosecond where the kernel tells that, else in its ticks of 10 ms."""
    if (task / "schedstat").exists():
        return int((task / "schedstat").read_text().split()[0])
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 10**9 // os.sysconf("SC_CLK_TCK")


def cpu_here_ns() -> Counter[str]:
    return cpu_ns(os.getpid(), {thread.native_id or 0: thread.name for thread in threading.enumerate()})


def measure(options: argparse.Namespace, folder: Path, syncer: int) -> None:
    device = torch.device(options.device)
    torch.manual_seed(0)
    if options.shape:
        layers, heads, width = map(int, options.shape.split("x"))
        model = GPT(GPTConfig(layers=layers, heads=heads, width=width, lr=1e-4)).to(device)
    else:
        model = build_model(options.model, 0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = torch.randint(0, 256, (options.batch, options.seq + 1), device=device)

    def train() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    rates: dict[str, list[float]] = {"without": [], "with": []}
    cpu: dict[str, Counter[str]] = {"without": Counter(), "with": Counter(), "syncer": Counter()}
    waited = time.monotonic()
    while not (folder / "syncer.json").exists():
        assert time.monotonic() - waited < 120, "the syncer did not start"
        time.sleep(0.1)
    address = json.loads((folder / "syncer.json").read_text())["address"]
    on_device = {"auto": None, "host": False, "device": True}[options.copies]
    # Without checkpoints of the optimizer: they are every 60 s, and would fall into some segments and not into others.
    settings = {"run_folder": folder, "copies_on_device": on_device, "checkpoint_every_s": 0}
    host_before = resident_bytes()
    with Learner(model, optimizer, address=address, learner_id="bench", **settings) as learner:
        for _ in range(24):  # every fragment once, and all caches warm
            learner.step(tokens=tokens.numel(), loss=train())
        for segment in range(2 * options.segments + 1):
            name = "with" if segment % 2 else "without"
            synchronize(device)
            before, there = cpu_here_ns(), cpu_ns(syncer, {})
            began = time.perf_counter()
            for _ in range(options.steps):
                loss = train()
                if name == "with":
                    learner.step(tokens=tokens.numel(), loss=loss)
            synchronize(device)
            rates[name].append(options.steps / (time.perf_counter() - began))
            cpu[name] += cpu_here_ns() - before
            if name == "with":
                cpu["syncer"] += cpu_ns(syncer, {}) - there
            learner._meter.resume()
        parameters = sum(p.numel() for p in model.parameters())
        print(
            f"host memory of the learner: {(resident_bytes() - host_before) / parameters:.1f} bytes per parameter more"
        )
    report(options, rates, folder, sum(p.numel() for p in model.parameters()))
    report_cpu(options, cpu)


def report_cpu(options: argparse.Namespace, cpu: dict[str, Counter[str]]) -> None:
    """The threads that took most, per step."""

    def per_step_ms(which: str, name: str) -> float:
        segments = options.segments + (which == "without")
        return cpu[which][name] / segments / options.steps / 1e6

    names = sorted(cpu["with"], key=lambda name: -cpu["with"][name])[:8]
    print("CPU ms per step of the learner's threads, with (without) Atoll:")
    for name in names:
        print(f"  {name:24s} {per_step_ms('with', name):8.2f} ({per_step_ms('without', name):.2f})")
    print(f"  the syncer, all threads  {sum(per_step_ms('syncer', name) for name in cpu['syncer']):8.2f}")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(options: argparse.Namespace, rates: dict[str, list[float]], folder: Path, parameters: int) -> None:
    without, with_atoll = statistics.median(rates["without"]), statistics.median(rates["with"])
    neighbours = [(a + b) / 2 for a, b in itertools.pairwise(rates["without"])]
    ratios = [w / n for w, n in zip(rates["with"], neighbours, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    steps = [e for _, _, e in read_events(folder) if isinstance(e, events.LearnerSteps)][1:]
    pushed = [e for _, _, e in read_events(folder) if isinstance(e, events.LearnerPushed)]
    adopted = sum(isinstance(e, events.LearnerAdopted) for _, _, e in read_events(folder))
    count = max(1, sum(s.steps for s in steps))

    def per_step(name: str) -> float:
        return sum(getattr(s, name) for s in steps) / count / 1e6

    print(
        f"model {options.shape or options.model} ({parameters / 1e6:.2f}M parameters), "
        f"batch {options.batch} x {options.seq}, "
        f"{options.device}, {options.threads} torch thread(s), H={options.sync_every}, copies: {options.copies}, "
        f"payloads: {'gRPC' if options.bulk_port == 'off' else 'past gRPC'}"
    )
    print(f"steps/s without Atoll   {without:9.3f}   ({min(rates['without']):.3f} .. {max(rates['without']):.3f})")
    print(f"steps/s with Atoll      {with_atoll:9.3f}   ({min(rates['with']):.3f} .. {max(rates['with']):.3f})")
    print(f"ratio                   {middle:9.4f}   (quartiles {low:.4f} .. {high:.4f} over {len(ratios)} pairs)")
    print(
        f"inside learner.step, ms per step: snapshot {per_step('snapshot_ns'):.3f}, adopt {per_step('adopt_ns'):.3f}, "
        f"rest {per_step('overhead_ns'):.3f}; between calls {per_step('compute_ns'):.2f}"
    )
    print(
        f"{len(pushed)} contributions, {adopted} adopts in {count} steps with Atoll; "
        f"background encode {statistics.median(p.encode_ns for p in pushed) / 1e6:.2f} ms, "
        f"push {statistics.median(p.push_ns for p in pushed) / 1e6:.2f} ms (median)"
    )


if __name__ == "__main__":
    main()
