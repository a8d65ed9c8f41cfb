"""Inner optimizers of the reference training, and the learning-rate schedule as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.zoo.muon import Muon
from atoll.zoo.presets import OPTIMIZERS, SCHEDULES

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
GRADIENT_NORM_MAX = 1.0
WARMUP_STEPS_MAX = 200
"""Warm-up is a twentieth of the run, but never longer than this."""
WSD_DECAY_SHARE = 0.2
"""Share of the run that the decay of `wsd` takes at its end."""


class TrainingOptimizer(Protocol):
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


def make_optimizer(
    model: nn.Module, name: str, lr: float, *, capturable: bool = False
) -> torch.optim.Optimizer | CombinedOptimizer:
    """`adamw`; `muon` (on the hidden matrices, AdamW on the rest); or plain `sgd`, for exact tests.

    With `capturable` a step can be captured into a CUDA graph: the learning rate is a tensor on the parameters' device,
    which `set_lr` fills in place. It works on the CPU too, where there is nothing to capture. Before a capture call
    `create_state`; gradients must keep their memory between replays.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer must be one of {', '.join(OPTIMIZERS)}; not {name!r}")
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0.0 <= lr < math.inf:
        raise ConfigError(f"the learning rate must be a finite number from 0; not {lr!r}")
    hidden, rest = _split(model)
    if not hidden + rest:
        raise ConfigError("the model has no parameters to train; set requires_grad on some")
    rate = _rate_tensor(hidden + rest, lr) if capturable else lr
    if name == "adamw":
        return _adamw(hidden, rest, rate)
    if name == "sgd":
        # Only the fused kernel reads a tensor's value on the device; the others would bake it into a graph.
        return torch.optim.SGD(hidden + rest, lr=rate, fused=True if capturable else None)
    if not hidden:
        raise ConfigError("the model has no hidden matrices for Muon; use --optimizer adamw")
    return CombinedOptimizer(_muon(hidden, rate), *([_adamw([], rest, rate)] if rest else []))


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(hidden matrices, everything else: the embedding, the head, anything with fewer than two dimensions)."""
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            table = name.startswith(("embed.", "head."))
            (hidden if parameter.dim() == 2 and not table else rest).append(parameter)
    return hidden, rest


def _rate_tensor(parameters: list[nn.Parameter], lr: float) -> Tensor:
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"a step can only be captured on one device, the model is on {names}; move it to one")
    return torch.full((), lr, dtype=torch.float32, device=devices.pop())


def _adamw(decayed: list[nn.Parameter], rest: list[nn.Parameter], lr: float | Tensor) -> torch.optim.AdamW:
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    capturable = isinstance(lr, Tensor)
    # One fused kernel instead of a dozen small ones per tensor: on small models the launches are the cost.
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=lr, betas=BETAS, fused=True, capturable=capturable
    )
    if capturable:
        # The steps before a capture are meant; torch would warn that they do not run in a graph.
        optimizer._warned_capturable_if_run_uncaptured = True
    return optimizer


def _muon(hidden: list[nn.Parameter], lr: float | Tensor) -> Muon:
    # Moonshot's scaling gives an update the size of AdamW's, so one learning rate serves both halves.
    return Muon(hidden, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")


@torch.no_grad()
def set_lr(optimizer: TrainingOptimizer, lr: float) -> None:
    """Give every group the learning rate `lr`. A tensor is filled in place, because CUDA graphs read it there."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def create_state(optimizer: torch.optim.Optimizer | CombinedOptimizer) -> None:
    """Make the moments and counters of a fresh optimizer without training: a CUDA graph needs them before its capture.

    This is a step with zero gradients at rate zero, which leaves the parameters as they are, to the bit; then the
    counters go back to zero. An optimizer that has state already is left alone.
    """
    if optimizer.state:
        return
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    rates = [group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"] for group in groups]
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    set_lr(optimizer, 0.0)
    optimizer.step()
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = group["lr"].copy_(rate) if isinstance(rate, Tensor) else rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float = GRADIENT_NORM_MAX) -> Tensor:
    """Scale the gradients so that their norm together is at most `max_norm`; gives the norm before, as a tensor.

    torch's own clipping: with the foreach kernels and without its check for finite norms nothing waits for the device,
    so that a CUDA graph can hold it.
    """
    return nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=False, foreach=True)


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
