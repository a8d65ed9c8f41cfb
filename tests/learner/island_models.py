"""Models as people train them, on the ranks of an island and in one process. Imported by ranks."""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from island_work import build, plain
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import atoll
from atoll.core import LearnerMachine
from atoll.errors import AtollError, PayloadError
from atoll.learner import Learner
from atoll.learner.inner import InnerAbout, capture, restore
from atoll.learner.local_part import local_part
from atoll.learner.names import named_parameters
from atoll.learner.watch import frozen_checksum

BITS_STEPS, STEPS, BATCH = 6, 16, 8
KINDS = ("tied", "compiled", "bf16", "mixed", "accumulated", "checkpointed", "lora", "kept")
"""`mixed`: computed in bf16. `kept`: FSDP2 does not free gathered parameters after the forward pass."""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(32, 300, bias=False)
        self.back = nn.Linear(32, 300, bias=False)
        self.back.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.into(x).tanh()
        return hidden @ self.back.weight


class Adapted(nn.Module):
    """LoRA in its plainest form: a frozen layer, and a product of two thin ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(32, 300).requires_grad_(False)
        self.out = nn.Linear(300, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 300, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out((self.base(x) + self.up(self.down(x))).tanh())
        return y


def model_of(kind: str, size: int) -> nn.Module:
    """A model of this kind, sharded and wrapped where there are several ranks; in one process it is plain."""
    model: nn.Module = {"tied": Tied, "lora": Adapted}.get(kind, plain)()
    if kind == "bf16":
        model = model.to(torch.bfloat16)
    if kind == "checkpointed" and size > 1:
        for index in (0, 2):
            model[index] = checkpoint_wrapper(model[index])  # type: ignore[index,operator]
    if size > 1:
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "mixed" else MixedPrecisionPolicy()
        fully_shard(model, reshard_after_forward=kind != "kept", mp_policy=precision)
    return torch.compile(model, backend="eager") if kind == "compiled" and size > 1 else model  # type: ignore[return-value]


def nudge(net: nn.Module, step: int) -> None:
    """The same change of every trained element, however the model is cut."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for _, parameter in named_parameters(net):
            if parameter.requires_grad:
                change = 1e-2 * torch.randn(parameter.shape, generator=generator)
                if isinstance(parameter, DTensor):
                    cut = (parameter.device_mesh, parameter.placements)
                    change = distribute_tensor(change, *cut, src_data_rank=None)
                parameter.add_(change)


def descend(kind: str, net: nn.Module, optimizer: torch.optim.Optimizer, parts: list[torch.Tensor]) -> None:
    """One update, of one batch or of several behind each other."""
    optimizer.zero_grad()
    for index, part in enumerate(parts):
        if isinstance(net, FSDPModule):
            net.set_requires_gradient_sync(index == len(parts) - 1)
        kind_of = torch.bfloat16 if kind == "bf16" else torch.float32
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "mixed"):
            out = net(part.to(kind_of))
        ((out.float() - part).square().mean() / len(parts)).backward()
    optimizer.step()


def train(rank: int, size: int, kind: str, address: str, gradients: bool, **options: Any) -> dict[str, Any]:
    net = model_of(kind, size)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    generator = torch.Generator().manual_seed(1)
    given = {"address": address, "learner_id": "l", "island_timeout_s": 60.0, **options}
    with Learner(net, optimizer, **given) as learner:
        for step in range(STEPS if gradients else BITS_STEPS):
            x = torch.randn(BATCH, 32, generator=generator)
            micro = x.split(BATCH // 2) if kind == "accumulated" else (x,)
            parts = [one[rank * len(one) // size : (rank + 1) * len(one) // size] for one in micro]
            if gradients:
                descend(kind, net, optimizer, parts)
            else:
                nudge(net, step)
            learner.step(tokens=BATCH // size)
        with learner.global_params(), torch.no_grad():
            loss = float((net(x.to(next(net.parameters()).dtype)).float() - x).square().mean())
        machine = learner._machine
        told = {"loss": loss, "step": learner.step_count, "names": sorted(learner.published_state_dict())}
        told["frozen"] = machine.frozen if isinstance(machine, LearnerMachine) else 0
    told["handed_over"] = learner.handed_over
    return told


def each(rank: int, size: int, runs: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Every kind, as bits and with gradients; what fails says so and does not keep the others from running."""
    told: dict[str, Any] = {}
    for kind, (bits, trained) in runs.items():
        try:
            told[kind] = train(rank, size, kind, bits, False), train(rank, size, kind, trained, True)
        except Exception as error:
            told[kind] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    return told


def side_by_side(rank: int, size: int, address: str) -> dict[str, Any]:
    """Two learners of two ranks each in one torch.distributed world: one is told its mesh, one its group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("learner", "shard"))
    number, own = rank // 2, mesh["shard"]
    place: dict[str, Any] = {"mesh": own} if number == 0 else {"group": own.get_group()}
    net = fully_shard(plain(), mesh=own)
    with Learner(net, address=address, learner_id=f"l{number}", island_timeout_s=60.0, **place) as learner:
        for step in range(STEPS):
            nudge(net, 100 * number + step)
            learner.step(tokens=4)
        told = {"rank": learner.island_rank, "size": learner.island_size, "id": learner.learner_id}
        told["name"] = learner.island_name
    return {**told, "handed_over": learner.handed_over}


def whole_parts(rank: int, size: int, kind: str, address: str, steps: int, folder: Path) -> dict[str, Any]:
    """One island of a mixed run: what its rank has of the published model after the last step."""
    net, _ = build(kind, size)
    given = {"address": address, "learner_id": kind, "run_folder": folder, "island_timeout_s": 120.0}
    with Learner(net, torch.optim.SGD(net.parameters(), lr=0.05), **given) as learner:
        for step in range(steps):
            nudge(net, 1000 * (1 + len(kind)) + step)
            learner.step(tokens=4, loss=0.5)
        here = {name: local_part(value).numpy().copy() for name, value in learner.published_state_dict().items()}
        told = {"versions": learner.versions(), "parts": here}
    learner.adopt_published()  # as the callbacks of trainers do when it is over
    last = {name: local_part(value) for name, value in learner.published_state_dict().items()}
    kept = all(torch.equal(local_part(parameter), last[name]) for name, parameter in named_parameters(net))
    return {**told, "handed_over": learner.handed_over, "kept": kept}


def unlike(rank: int, size: int, address: str) -> dict[str, tuple[str, float]]:
    """Ranks that do not fit together, or do not come: what each of them hears, and after how many seconds."""
    said: dict[str, tuple[str, float]] = {}

    def attempt(what: str, work: Any) -> None:
        began_s = time.monotonic()
        try:
            work()
            said[what] = "nothing", 0.0
        except AtollError as error:
            said[what] = f"{type(error).__name__}: {error}", time.monotonic() - began_s
        dist.barrier()

    def made(name: str, net: nn.Module | None = None, optimizer: Any = None, timeout_s: float = 20.0) -> Learner:
        net = plain() if net is None else net
        return Learner(net, optimizer, address=address, learner_id=name, island_timeout_s=timeout_s)

    def other_version() -> None:
        real = atoll.__version__
        atoll.__version__ = f"9.{rank}"
        try:
            made("version")
        finally:
            atoll.__version__ = real

    def never_steps() -> None:
        learner = made("still", timeout_s=3.0).start()
        time.sleep(8.0 * rank)
        while True:
            learner.step(tokens=1)

    def never_made() -> None:
        if rank == 0:
            made("alone", timeout_s=3.0)
        time.sleep(8.0 * rank)

    attempt("version", other_version)
    attempt("device", lambda: made("device", plain().to("meta") if rank else None))
    attempt("optimizer", lambda: made("optimizer", None, "no optimizer" if rank else None))
    attempt("never steps", never_steps)
    attempt("never made", never_made)
    return said


def frozen_sums(rank: int, size: int) -> tuple[int, int]:
    """Checksums of what is frozen: as an island finds it, and as one process does."""
    from atoll.learner.island.gloo import GlooLink
    from atoll.learner.island.picking import picking

    mesh = init_device_mesh("cpu", (size,))
    whole, cut = Adapted(), Adapted()
    cut.base.weight = nn.Parameter(distribute_tensor(cut.base.weight.detach(), mesh, [Shard(0)]), requires_grad=False)
    cut.out.weight = nn.Parameter(distribute_tensor(cut.out.weight.detach(), mesh, [Shard(1)]), requires_grad=False)
    return frozen_checksum(cut, picking(GlooLink(range(size)))), frozen_checksum(whole)


def other_mesh(rank: int, size: int) -> list[str]:
    """The state of rows, given to rows and to columns of the same shape."""
    mesh = init_device_mesh("cpu", (size,))

    def stepped(dim: int) -> torch.optim.AdamW:
        weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(dim)]))
        optimizer = torch.optim.AdamW([weight])
        weight.square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return optimizer

    saved = capture(stepped(0), {}, InnerAbout("l", "r", 1, 1, (0,), 8))
    said = []
    for dim in (0, 1):
        try:
            restore(saved, stepped(dim), {}, rng=False)
            said.append("restored")
        except PayloadError as error:
            said.append(str(error))
    return said


class Counter:
    """An extra of a checkpoint."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def adam_here(rank: int, size: int, address: str, folder: Path, adam: tuple[int, ...]) -> dict[str, Any]:
    """Trains with a run folder; ranks in `adam` have an AdamW, the others an SGD."""
    net, counter = plain(), Counter()
    optimizer = torch.optim.AdamW(net.parameters()) if rank in adam else torch.optim.SGD(net.parameters(), momentum=0.9)
    given = {"run_folder": folder, "extras": {"counter": counter}, "island_timeout_s": 60.0}
    with Learner(net, optimizer, address=address, learner_id="l", **given) as learner:
        begun = {"moments": len(optimizer.state), "counted": counter.count, "why": learner._inner.detail}
        for _ in range(8):
            descend("", net, optimizer, [torch.ones(2, 32)])
            counter.count += 1
            learner.step(tokens=2)
    return begun
