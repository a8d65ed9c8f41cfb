"""What the ranks of a test do. Imported once, by the process that ranks are forked from."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch._dynamo
import torch.distributed.tensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from atoll.learner import Learner

WIDTH = 300
"""No multiple of 256, and not of the number of ranks times 256: blocks lie across the ranks' rows."""


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 32))


def build(kind: str, size: int) -> tuple[nn.Module, bool]:
    """A model cut in this way, and whether its ranks see the same batch."""
    model = plain()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model), False
    if kind == "fsdp":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        return fully_shard(model), False
    if kind == "tp":
        mesh = init_device_mesh("cpu", (size,))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), True
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "shard"))
        return fully_shard(model, mesh=mesh), False
    if kind == "2d":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"]), True
    return model, True


def train(rank: int, size: int, kind: str, address: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train with whole batches that every kind of island sees alike: the mean gradient is the same."""
    net, same = build(kind, size)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    pause_s = options.pop("pause_s", 0.0)
    seen: dict[str, Any] = {}
    with Learner(net, optimizer, address=address, learner_id="l", island_timeout_s=60.0, **options) as learner:
        for _ in range(steps):
            x = torch.randn(8, 32, generator=generator)
            part = x if same else x[rank * 8 // size : (rank + 1) * 8 // size]
            loss = (net(part) - part).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.step(tokens=8 if size == 1 else 8 // size, loss=float(loss.detach()))
            if learner.done:
                break
            time.sleep(pause_s)
        seen |= {"rank": learner.island_rank, "size": learner.island_size, "step": learner.step_count}
        with learner.global_params():
            seen["published_loss"] = float((net(x) - x).square().mean().detach())
        seen["bases"] = learner.versions()
        seen["generation"], seen["number"] = learner.generation, learner.rank
    seen["handed_over"] = learner.handed_over
    return seen
