"""What the lab costs the host beside the training itself: what a fast GPU would have to wait for. Needs no GPU.

    python benchmarks/lab_host.py                       # eight learners of 10.6M parameters, H = 8

The model is large and its step next to nothing: what takes the time is encoding, merging, decoding and adopting. They
run on threads, as beside a GPU. Printed per step of all learners, for each of several runs: milliseconds of wall clock
and of all cores, and how often a thread gave up its core to wait, for the interpreter's lock or for another's work. Use
an idle machine: the number of waits depends on who else wants the cores.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from atoll import kernels
from atoll.instruments.lab import BACKGROUND_THREADS, Batch, LabSpec, Model, Replica, Workshop, run

BLOCKS, HEIGHT, WIDTH = 6, 384, 4608


class Hollow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ParameterList([nn.Parameter(0.02 * torch.randn(HEIGHT, WIDTH)) for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(block[:1] * x).mean() for block in self.blocks]).mean()


class HollowTask:
    lr = 1e-3

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Hollow()

    def loss(self, model: Model, batch: Batch) -> Tensor:
        return model(batch[0]).square()

    def feeder(self, stream: int, size: int, seed: int, device: torch.device) -> HollowTask:
        return self

    def load(self, position: int) -> Batch:
        return (torch.ones(1, 1),)

    def held_out(self) -> list[Batch]:
        return [self.load(0)]


def make(spec: LabSpec) -> HollowTask:
    return HollowTask()


class HollowReplica(Replica):
    @torch.no_grad()
    def _step(self) -> None:
        for parameter in self.model.parameters():
            parameter[::64].add_(1e-3)  # something to send


class HollowWorkshop(Workshop):
    def replica(self, bench: object, index: int) -> Replica:
        while len(self._replicas) <= index:
            self._replicas.append(HollowReplica(bench))  # type: ignore[arg-type]
        return self._replicas[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=BACKGROUND_THREADS, help="0: none")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workshop = HollowWorkshop("cpu")
    if arguments.threads:
        workshop.threads = ThreadPoolExecutor(arguments.threads, "lab", initializer=kernels.work_alone)
    common = {"task": "lab_host:make", "learners": arguments.learners, "batch": arguments.learners, "seq": 1}

    def cost(steps: int) -> dict[str, float]:
        """Of one run per step; its beginning and end are in it."""
        spec = LabSpec(method="decoupled", tokens=arguments.learners * steps, optimizer="sgd", evals=1, **common)
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        run(spec, keep=workshop)
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        waits = after.ru_nvcsw - before.ru_nvcsw
        return {"wall_ms": 1e3 * wall / steps, "cpu_ms": 1e3 * cpu / steps, "waits": waits / steps}

    cost(8)
    runs = [cost(arguments.steps) for _ in range(arguments.runs)]
    found = {name: [round(one[name], 1) for one in runs] for name in runs[0]}
    sizes = {"learners": arguments.learners, "parameters": BLOCKS * HEIGHT * WIDTH, "threads": arguments.threads}
    print(json.dumps({**sizes, **found}))


if __name__ == "__main__":
    main()
