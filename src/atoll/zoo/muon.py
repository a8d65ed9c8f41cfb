"""Muon in a few large matrix products: the arithmetic of torch.optim.Muon, batched over matrices of the same shape.

Muon (Jordan et al. 2024) moves a hidden matrix along its momentum made nearly orthogonal: all singular values about 1.
torch.optim.Muon goes through the parameters one by one, about 33 kernels each, and on small matrices the launches are
the cost. Here a step is, for all matrices of a parameter group on one device:

    momentum   B <- lerp(B, G, 1 - mu);  U = lerp(G, B, mu)      two kernels for all
    orient     U turned so that its short side comes first, and stacked with those of its shape, tall or wide
    iterate    A = X X';  P = b A + c A A;  X <- a X + P X        batched per shape, P per length of the short side
    apply      W <- (1 - lr decay) W - lr adjust X                X turned back; per shape

No value is read back from the device and the learning rate may live there as a tensor, so a CUDA graph can hold a step.
The products are in bfloat16 on CUDA, as torch's are, and in float32 elsewhere: many CPUs run bfloat16 slowly or not
at all. State and settings have torch's names, so each of the two loads the other's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atoll.errors import ConfigError

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's quintic: the steepest at zero whose iterates stay near 1. torch's default."""
NS_STEPS = 5
"""Iterations, as in torch."""
NS_STEPS_MAX = 99
"""torch's own bound."""
EPS = 1e-7
"""Smallest norm that a matrix is divided by, as in torch: a zero gradient gives a zero update."""
RMS_OF_ADAMW = 0.2
"""Moonshot's measure of the root mean square of AdamW's updates (Liu et al. 2025, section 2.2)."""
ADJUSTMENTS = ("original", "match_rms_adamw")

Coefficients = tuple[float, float, float]


@dataclass(slots=True)
class _Stack:
    """Indices of the matrices with the same two sides: those with at most as many rows as columns, and the others."""

    wide: list[int] = field(default_factory=list)
    tall: list[int] = field(default_factory=list)


class Muon(torch.optim.Optimizer):
    """Muon for two-dimensional parameters, with the arguments of torch.optim.Muon.

    `lr` is a number or a float tensor without dimensions on the parameters' device. Change such a tensor in place:
    a captured CUDA graph reads it at every replay. The first step makes the state, so it must come before the capture.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = NS_COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = NS_STEPS,
        adjust_lr_fn: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters; a group that cannot work is refused and leaves the optimizer as it was."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ConfigError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state. As with torch's optimizers its tensors are new ones: capture CUDA graphs again."""
        _check_state(self.param_groups, state_dict)
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor):  # torch leaves it on the device that it was saved from
                group["lr"] = group["lr"].to(group["params"][0].device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step for every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            places: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    places.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for parameters in places.values():
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Step for parameters of one device and type."""
        self._check_capture(parameters, group)
        grads = [_dense(parameter.grad) for parameter in parameters]
        buffers = [self._buffer(parameter, grad) for parameter, grad in zip(parameters, grads, strict=True)]
        torch._foreach_lerp_(buffers, grads, 1.0 - group["momentum"])
        updates = list(torch._foreach_lerp(grads, buffers, group["momentum"])) if group["nesterov"] else buffers
        rate = _as_rate(group["lr"], parameters[0].device)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1.0 - rate * group["weight_decay"])
        for family in _families(parameters):
            turned = newton_schulz(
                [_stacked(stack, updates) for stack in family],
                group["ns_coefficients"],
                steps=group["ns_steps"],
                eps=group["eps"],
            )
            for stack, matrices in zip(family, turned, strict=True):
                wide, tall = matrices[: len(stack.wide)], matrices[len(stack.wide) :].mT
                _apply([parameters[i] for i in stack.wide], wide, rate, group["adjust_lr_fn"])
                _apply([parameters[i] for i in stack.tall], tall, rate, group["adjust_lr_fn"])

    def _buffer(self, parameter: Tensor, grad: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        return state["momentum_buffer"]  # type: ignore[no-any-return]

    def _check_capture(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """What a captured graph would silently get wrong at every replay."""
        # `is_initialized` first: a PyTorch without CUDA cannot even be asked whether it captures.
        if not (parameters[0].is_cuda and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            return
        if not torch.cuda.is_current_stream_capturing():
            return
        if not isinstance(group["lr"], Tensor):
            raise ConfigError(
                f"a CUDA graph would keep the learning rate {group['lr']!r} for ever; give lr as a tensor on the "
                "parameters' device (make_optimizer with capturable=True does) and change it in place"
            )
        if any("momentum_buffer" not in self.state.get(parameter, {}) for parameter in parameters):
            raise ConfigError(
                "a CUDA graph would start Muon's momentum from zero at every replay; take a step, or call "
                "create_state(optimizer), before the capture"
            )


def newton_schulz(stacks: list[Tensor], coefficients: Coefficients, *, steps: int, eps: float) -> list[Tensor]:
    """Make every matrix of the stacks nearly orthogonal; the arguments are overwritten.

    A stack is (count, short, long); the stacks share the type, the device and the short side.
    """
    a, b, c = coefficients
    for stack in stacks:  # the Frobenius norm bounds the largest singular value, which must be at most 1
        stack.div_(torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True).clamp_(min=eps))
    counts = [stack.shape[0] for stack in stacks]
    short = stacks[0].shape[1]
    gram = stacks[0].new_empty((sum(counts), short, short))
    for _ in range(steps):
        for stack, part in zip(stacks, gram.split_with_sizes(counts), strict=True):
            torch.bmm(stack, stack.mT, out=part)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        stacks = [
            torch.baddbmm(stack, part, stack, beta=a)
            for stack, part in zip(stacks, polynomial.split_with_sizes(counts), strict=True)
        ]
    return stacks


def _families(parameters: list[Tensor]) -> list[list[_Stack]]:
    """The stacks, by the length of the short side: all of a family have Gram matrices of one shape."""
    families: dict[int, dict[int, _Stack]] = {}
    for index, parameter in enumerate(parameters):
        rows, columns = parameter.shape
        stack = families.setdefault(min(rows, columns), {}).setdefault(max(rows, columns), _Stack())
        (stack.tall if rows > columns else stack.wide).append(index)
    return [list(stacks.values()) for stacks in families.values()]


def _stacked(stack: _Stack, updates: list[Tensor]) -> Tensor:
    """A copy of the updates, short side first, in the type of the products."""
    oriented = [updates[i] for i in stack.wide] + [updates[i].mT for i in stack.tall]
    return torch.stack(oriented).to(torch.bfloat16 if oriented[0].is_cuda else torch.float32)


def _apply(parameters: list[Tensor], matrices: Tensor, rate: Tensor, adjust_lr_fn: str | None) -> None:
    """Take `rate` times the matrices, adjusted to their shape, from parameters of one shape."""
    if not parameters:
        return
    # The rate has dimensions here, so that its float32 and not the matrices' bfloat16 is the type of the product; an
    # output of its own is row-major, as the parameters are, which the foreach kernel wants.
    target = torch.empty(matrices.shape, dtype=parameters[0].dtype, device=matrices.device)
    scaled = torch.mul(matrices, rate.view(1, 1, 1), out=target)
    torch._foreach_add_(parameters, list(scaled.unbind()), alpha=-_adjustment(parameters[0].shape, adjust_lr_fn))


def _adjustment(shape: torch.Size, adjust_lr_fn: str | None) -> float:
    """Factor on the learning rate, so that one rate suits every shape."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return RMS_OF_ADAMW * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _as_rate(lr: float | Tensor, device: torch.device) -> Tensor:
    """The learning rate as a float32 tensor on the device; one that is there already is itself."""
    return lr.to(torch.float32) if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=device)


def _dense(grad: Tensor | None) -> Tensor:
    if grad is None or grad.layout is not torch.strided:
        raise ConfigError("Muon needs dense gradients; make the embedding with sparse=False, or give it to AdamW")
    return grad


# ---------------------------------------------------------------- checks


def _check_group(group: dict[str, Any]) -> None:
    for parameter in group["params"]:
        if parameter.dim() != 2 or not parameter.is_floating_point():
            raise ConfigError(
                f"Muon is for real matrices, not for a parameter of shape {list(parameter.shape)} and type "
                f"{parameter.dtype}; give it to AdamW (make_optimizer does)"
            )
    _check_lr(group["lr"], group["params"])
    _check_range("weight_decay", group["weight_decay"], 0.0, math.inf)
    _check_range("momentum", group["momentum"], 0.0, 1.0)
    if not _is_finite(group["eps"]) or group["eps"] <= 0.0:
        raise ConfigError(f"Muon's eps must be a finite number above 0; not {group['eps']!r}")
    if type(group["ns_steps"]) is not int or not 1 <= group["ns_steps"] <= NS_STEPS_MAX:
        raise ConfigError(f"Muon's ns_steps must be a whole number from 1 to {NS_STEPS_MAX}; not {group['ns_steps']!r}")
    coefficients = group["ns_coefficients"]
    if not isinstance(coefficients, tuple | list) or len(coefficients) != 3 or not all(map(_is_finite, coefficients)):
        raise ConfigError(f"Muon's ns_coefficients must be three finite numbers; not {coefficients!r}")
    if group["adjust_lr_fn"] is not None and group["adjust_lr_fn"] not in ADJUSTMENTS:
        allowed = ", ".join(ADJUSTMENTS)
        raise ConfigError(f"Muon's adjust_lr_fn must be None or one of {allowed}; not {group['adjust_lr_fn']!r}")


def _check_lr(lr: object, parameters: list[Tensor]) -> None:
    if isinstance(lr, Tensor):
        if lr.dim() or not lr.is_floating_point():
            raise ConfigError(
                f"Muon's lr as a tensor must be a float without dimensions; not {list(lr.shape)} of {lr.dtype}"
            )
        elsewhere = {str(parameter.device) for parameter in parameters} - {str(lr.device)}
        if elsewhere:
            raise ConfigError(
                f"Muon's lr is a tensor on {lr.device}, with parameters on {', '.join(sorted(elsewhere))}; "
                "make it there, one group per device, or give a plain number"
            )
        lr = lr.item()
    _check_range("lr", lr, 0.0, math.inf)


def _check_range(name: str, value: object, low: float, below: float) -> None:
    if not _is_finite(value) or not low <= value < below:  # type: ignore[operator]
        limit = f" and below {below:g}" if math.isfinite(below) else ""
        raise ConfigError(f"Muon's {name} must be a finite number from {low:g}{limit}; not {value!r}")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_state(groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> None:
    """Momentum of another shape would broadcast or fail in the middle of a step. Group sizes are torch's own check."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for key, parameter in zip(keys, parameters, strict=False):
        buffer = state_dict["state"].get(key, {}).get("momentum_buffer")
        if isinstance(buffer, Tensor) and buffer.shape != parameter.shape:
            raise ConfigError(
                f"the state's momentum_buffer is shaped {list(buffer.shape)} for a parameter of "
                f"{list(parameter.shape)}; load the state of the same model, or start without it"
            )
