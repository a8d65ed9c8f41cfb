"""Inner optimizers of the reference training, and the learning-rate schedule as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from atoll.errors import ConfigError

OPTIMIZERS = ("adamw", "muon", "sgd")
SCHEDULES = ("cosine", "wsd", "constant")
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
GRADIENT_NORM_MAX = 1.0
WARMUP_STEPS_MAX = 200
"""Warm-up is a twentieth of the run, but never longer than this."""
WSD_DECAY_SHARE = 0.2
"""Share of the run that the decay of `wsd` takes at its end."""


class OptimizerLike(Protocol):
    """What the training loop and the learner need of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self) -> Any: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class CombinedOptimizer:
    """Several torch optimizers that step together, each on parameters of its own."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups themselves, not copies: setting a group's `lr` has effect."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of every parameter; read it, but write through the parts."""
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)


def make_optimizer(model: nn.Module, name: str, lr: float) -> torch.optim.Optimizer | CombinedOptimizer:
    """`adamw`; `muon` (torch.optim.Muon on the hidden matrices, AdamW on the rest); or plain `sgd`, for exact tests."""
    hidden, rest = _split(model)
    if name == "adamw":
        return _adamw(hidden, rest, lr)
    if name == "sgd":
        return torch.optim.SGD(hidden + rest, lr=lr)
    if name == "muon":
        return CombinedOptimizer(_muon(hidden, lr), _adamw([], rest, lr))
    raise ConfigError(f"optimizer must be one of {', '.join(OPTIMIZERS)}; not {name!r}")


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(hidden matrices, everything else: the embedding, the head, anything with fewer than two dimensions)."""
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            table = name.startswith(("embed.", "head."))
            (hidden if parameter.dim() == 2 and not table else rest).append(parameter)
    return hidden, rest


def _adamw(decayed: list[nn.Parameter], rest: list[nn.Parameter], lr: float) -> torch.optim.AdamW:
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    # One fused kernel instead of a dozen small ones per tensor: on small models the launches are the cost.
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=BETAS, fused=True)


def _muon(hidden: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    make: Callable[..., torch.optim.Optimizer] | None = getattr(torch.optim, "Muon", None)
    if make is None:
        raise ConfigError(
            f"torch {torch.__version__} has no torch.optim.Muon; "
            "use --optimizer adamw, or upgrade with: pip install 'torch>=2.9'"
        )
    if any(not parameter.is_cuda for parameter in hidden):
        raise ConfigError(
            "torch.optim.Muon multiplies in bfloat16, which many CPUs run slowly or not at all; "
            "use --optimizer adamw on the CPU, or --device cuda"
        )
    # Moonshot's scaling gives an update the size of AdamW's, so one learning rate serves both halves.
    return make(hidden, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")


def set_lr(optimizer: OptimizerLike, lr: float) -> None:
    """Give every group the learning rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def lr_at(
    step: int,
    total: int,
    *,
    peak: float,
    warmup: int | None = None,
    schedule: str = "cosine",
    floor: float = 0.1,
) -> float:
    """Learning rate of the step with index `step` (from 0) in a run of `total` steps.

    Linear warm-up to `peak`; then cosine down to `floor * peak`, or flat and a linear decay over the last fifth (wsd),
    or flat. Past `total` it stays at the floor.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}; not {schedule!r}")
    if warmup is None:
        warmup = min(WARMUP_STEPS_MAX, total // 20)
    rise = min(1.0, (step + 1) / (warmup + 1))
    return peak * rise * (floor + (1.0 - floor) * _remaining(step, total, warmup, schedule))


def _remaining(step: int, total: int, warmup: int, schedule: str) -> float:
    """Share of the way from the floor to the peak: 1 while flat, 0 at the end."""
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        return max(0.0, min(1.0, (total - step) / max(1.0, WSD_DECAY_SHARE * total)))
    progress = min(1.0, max(0, step - warmup) / max(1, total - warmup))
    return 0.5 * (1.0 + math.cos(math.pi * progress))
