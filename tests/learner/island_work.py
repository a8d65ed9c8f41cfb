"""What the ranks of a test do. Imported once, by the process that ranks are forked from."""

from __future__ import annotations

import threading
import time
import warnings
import zlib
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.tensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from atoll.errors import AtollError, UnreachableError
from atoll.learner import Learner
from atoll.learner import learner as learner_module
from atoll.learner.island import freight
from atoll.learner.island.follower import FollowerShell
from atoll.learner.island.parameters import RankParameters
from atoll.learner.island.speaker import SpeakerShell
from atoll.learner.local_part import local_part
from atoll.learner.names import named_parameters
from atoll.wire import RoutedBulk

WIDTH = 300
"""No multiple of 256, and not of the number of ranks times 256: blocks lie across the ranks' rows."""


def plain(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 32))


def build(kind: str, size: int, width: int = WIDTH) -> tuple[nn.Module, bool]:
    """A model cut in this way, and whether its ranks see the same batch."""
    model = plain(width)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model), False
    if kind == "fsdp":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        return fully_shard(model), False
    if kind == "tp":
        mesh = init_device_mesh("cpu", (size,))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), True
    if kind == "stages":  # as the whole model calls them: "0" and "2"
        stage = dist.get_rank() * 2 // size
        del model[2 if stage == 0 else 0]
        return (model if stage == 0 else nn.ModuleDict({"2": model[-1]})), True
    if kind == "sharded stages":  # two stages, FSDP2 inside of the first and tensor parallel inside of the other
        stage = dist.get_rank() * 2 // size
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("stage", "inside"))["inside"]
        if stage == 0:
            del model[2]
            return fully_shard(model, mesh=mesh), True
        return parallelize_module(nn.ModuleDict({"2": model[2]}), mesh, {"2": RowwiseParallel()}), True
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "shard"))
        return fully_shard(model, mesh=mesh), False
    if kind == "2d":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"]), True
    return model, True


def inner_step(net: nn.Module, step: int) -> None:
    """The same change of every element, however the model is cut: what ranks contribute is then the same to the bit."""
    generator = torch.Generator()
    with torch.no_grad():
        for name, parameter in named_parameters(net):
            generator.manual_seed(1000 * step + zlib.crc32(name.encode()))  # whatever else is on this rank
            change = 1e-3 * torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                change = distribute_tensor(change, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.add_(change)


def gradient_step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, part: slice) -> float:
    loss = (net(x[part]) - x[part]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def slow_end(learner: Learner, pause_s: float) -> None:
    """The rank that speaks saves for longer than the others' patience with threads that do not end."""
    learner_module.STOP_S = pause_s / 10
    if learner.island_rank == 0:
        close = learner._inner.close

        def slowly(*, last: bool) -> Any:
            time.sleep(pause_s)
            return close(last=last)

        learner._inner.close = slowly  # type: ignore[method-assign]


def watch_freight(rank: int, trouble: str, seen: dict[str, Any]) -> None:
    """Note the largest array of bytes that a rank has put together; `trouble` is what rank 1 cannot do by itself."""
    freight.DIGEST_BYTES = 65_536
    together = freight.Freight._moved

    def noted(self: freight.Freight, exchange: Any, source: Any, size: int) -> Any:
        seen["largest"] = max(seen["largest"], size)
        return together(self, exchange, source, size)

    freight.Freight._moved = noted  # type: ignore[method-assign]

    async def fails(*_: Any) -> Any:
        if trouble != "reach":
            raise UnreachableError("no way from here")
        return False

    if rank == 1 and trouble:
        setattr(RoutedBulk, trouble, fails)


def defect(rank: int, size: int, address: str) -> None:
    """The last rank cannot even begin to give the others what they wait for."""

    def fails(*_: Any) -> Any:
        raise ValueError("a defect")

    if rank == size - 1:
        RankParameters.collect = fails  # type: ignore[method-assign]
    _train(rank, size, "fsdp", address, 1000, {})


def train(rank: int, size: int, kind: str, address: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = _train(rank, size, kind, address, steps, options)
    seen["model_changed"] = [str(one.message) for one in caught if "after this learner joined" in str(one.message)]
    return seen


def _train(rank: int, size: int, kind: str, address: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """`gradients`: whole batches that every kind of island sees alike, so that the mean gradient is the same."""
    net, same = build(kind, size, options.get("width", WIDTH))
    gradients, pause_s = options.get("gradients", True), options.get("pause_s", 0.0)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    if options.get("adam"):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    part = slice(0, 8) if same else slice(rank * 8 // size, (rank + 1) * 8 // size)
    largest = {"largest": 0}
    if "trouble" in options:
        watch_freight(rank, options["trouble"], largest)
    given = {"island_timeout_s": 60.0, "learner_id": "l", "address": address, **options.get("learner", {})}
    with Learner(net, optimizer, **given) as learner:
        for step in range(steps):
            x = torch.randn(8, 32, generator=generator)
            if gradients:
                gradient_step(net, optimizer, x, part)
            else:
                inner_step(net, step)
            learner.step(tokens=8 // size, loss=0.5)
            if step == options.get("add_after"):
                net.register_parameter("extra", nn.Parameter(torch.zeros(3)))
            if learner.done:
                break
            time.sleep(pause_s)
        with learner.global_params(), torch.no_grad():
            loss = float((net(x) - x).square().mean()) if "stages" not in kind else 0.0
        seen = {"rank": learner.island_rank, "size": learner.island_size, "step": learner.step_count, "loss": loss}
        seen |= {"bases": learner.versions(), "generation": learner.generation, "number": learner.rank}
        here = {name: local_part(value) for name, value in learner.published_state_dict().items()}
        if "stages" in kind:
            with learner.global_params():
                seen["swapped"] = all(torch.equal(local_part(p), here[name]) for name, p in named_parameters(net))
        if "slow_end_s" in options:
            slow_end(learner, options["slow_end_s"])
        seen["published"] = {name: list(value.shape) for name, value in here.items()}
        seen |= {"bytes": [0, 0], **largest}
        if isinstance(learner._shell, SpeakerShell | FollowerShell):
            carrier = learner._shell.work.carrier
            seen["bytes"] = [carrier.bytes_up, carrier.bytes_down]
    seen["workers_left"] = sum(thread.name == "atoll-rank" for thread in threading.enumerate())
    seen["handed_over"], seen["inner"] = learner.handed_over, learner._inner.detail
    seen["optimizer_steps"] = sorted({int(state["step"]) for state in optimizer.state.values() if "step" in state})
    return seen


def several(rank: int, size: int, runs: list[tuple[str, str, int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One learner after the other, of the same ranks."""
    return [train(rank, size, *run) for run in runs]


def failing(rank: int, size: int, address: str) -> dict[str, str]:
    """What goes wrong, and what each rank hears of it."""
    said: dict[str, str] = {}

    def attempt(what: str, work: Any) -> None:
        try:
            work()
            said[what] = "nothing"
        except AtollError as error:
            said[what] = f"{type(error).__name__}: {error}"

    def learner(model: nn.Module, **given: Any) -> Learner:
        return Learner(model, address=address, learner_id="bad", island_timeout_s=20.0, **given)

    attempt("model", lambda: learner(nn.Linear(4, 4 + rank)))
    attempt("device", lambda: learner(plain(), copies_on_device=True))
    attempt("partly", lambda: learner(nn.ModuleDict({"a": nn.Linear(2, 2), "bc"[rank % 2]: nn.Linear(2, 2)})))
    attempt("frozen", lambda: learner(plain().requires_grad_(rank == 0)))
    attempt("fsdp1", lambda: learner(FullyShardedDataParallel(plain(), device_id=torch.device("cpu"))))

    def uneven() -> None:
        with Learner(plain(), address=address, learner_id="uneven", island_timeout_s=20.0) as one:
            for _ in range(3 + rank):
                one.step(tokens=1)

    attempt("uneven", uneven)
    return said
