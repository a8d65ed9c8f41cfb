"""What ranks do in tests of inner state: train with AdamW, and tell the whole of what the optimizer holds."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from island_work import build, gradient_step
from torch.distributed.tensor import DTensor

from atoll.learner import Learner, joining
from atoll.learner.island import peer_state
from atoll.learner.names import named_parameters

peer_state.INNER_WAIT_S = joining.INNER_WAIT_S = 200.0  # a busy machine is no reason to warm up, in a test
Told = dict[str, np.ndarray[Any, Any]]


def whole_state(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Told:
    """Every tensor of the state, by parameter and key, put together where it is cut. All ranks together."""
    found = {}
    for name, parameter in named_parameters(net):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name}.{key}"] = whole.detach().clone().numpy()
    return found


def live(rank: int, size: int, kind: str, address: str, steps: int, given: dict[str, Any]) -> dict[str, Any]:
    """One life of an island: what its optimizer held when it joined, and when it left."""
    net, same = build(kind, size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=given.pop("lr", 1e-3))
    part = slice(0, 8) if same else slice(rank * 8 // size, (rank + 1) * 8 // size)
    generator = torch.Generator().manual_seed(1)
    names = {"learner_id": "l", "island_timeout_s": 60.0, **given}
    with Learner(net, optimizer, address=address, **names) as learner:
        begun = whole_state(net, optimizer)
        why, lr = learner._inner.detail, optimizer.param_groups[0]["lr"]
        for _ in range(steps):
            x = torch.randn(8, 32, generator=generator)
            if kind == "stages":
                for parameter in net.parameters():
                    parameter.grad = torch.ones_like(parameter) * 0.01
                optimizer.step()
            else:
                gradient_step(net, optimizer, x, part)
            learner.step(tokens=8 // size)
        ended = whole_state(net, optimizer)
    return {"begun": begun, "ended": ended, "why": why, "lr": lr, "generation": learner.generation}


def digest(state: Told) -> str:
    return hashlib.sha256(b"".join(name.encode() + state[name].tobytes() for name in sorted(state))).hexdigest()


def go_on(rank: int, size: int, kind: str, address: str, until: str) -> dict[int, str]:
    """Trains until there is a file of this name. What its optimizer held, by the steps that this one had taken."""
    net, same = build(kind, size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    part = slice(0, 8) if same else slice(rank * 8 // size, (rank + 1) * 8 // size)
    generator, held = torch.Generator().manual_seed(1), {}
    with Learner(net, optimizer, address=address, learner_id="giver", island_timeout_s=60.0) as learner:
        over = torch.zeros(1)
        while not over:
            gradient_step(net, optimizer, torch.randn(8, 32, generator=generator), part)
            held[len(held) + 1] = digest(whole_state(net, optimizer))
            learner.step(tokens=8 // size)
            time.sleep(0.05)
            over[0] = Path(until).exists()
            dist.broadcast(over, 0)
    return held
