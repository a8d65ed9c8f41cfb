"""A short ramp of the inner learning rate after a cold start inside a running job.

A learner that starts with the run's parameters but without optimizer state would take its first steps with moments
that know a handful of gradients, at the full learning rate of the middle of a run. The ramp scales those steps down.
The user's schedule does not see it: the rate is scaled just before the optimizer's step and put back, to the bit, just
after.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

WRAPPERS_MAX = 4
"""Optimizers inside of optimizers: a wrapper of a library around a combination of torch's own is two deep."""


def torch_optimizers(optimizer: object, depth: int = WRAPPERS_MAX) -> Iterator[torch.optim.Optimizer]:
    """The torch optimizers that do the work: this one, or those inside a wrapper that keeps them as `optimizers` (the
    zoo's CombinedOptimizer) or `optimizer` (what most libraries do). Some wrappers, such as accelerate's, are torch
    optimizers by their class only: the hooks and the state are those of the one inside."""
    within = getattr(optimizer, "optimizer", None)
    if isinstance(optimizer, torch.optim.Optimizer) and not (isinstance(within, torch.optim.Optimizer) and depth):
        yield optimizer
    elif depth:
        inside = getattr(optimizer, "optimizers", None)
        if not isinstance(inside, list | tuple):
            inside = [within]
        for part in inside:
            yield from torch_optimizers(part, depth - 1)


class InnerWarmup:
    """Scales the learning rate of the next `steps` steps by 1/(steps+1), 2/(steps+1), ..., then removes itself."""

    def __init__(self, optimizer: object, steps: int) -> None:
        self._ramps = [_Ramp(part, steps) for part in torch_optimizers(optimizer)] if steps > 0 else []

    @property
    def active(self) -> bool:
        """False when the ramp is over, was removed, or never began: no steps, or an optimizer without hooks."""
        for ramp in self._ramps:
            if not ramp.remaining:
                ramp.remove()  # a step's hooks cannot take themselves out while torch runs through them
        return any(ramp.remaining for ramp in self._ramps)

    @property
    def factor(self) -> float:
        """What the next step's learning rate is multiplied by."""
        return min((ramp.factor for ramp in self._ramps), default=1.0)

    def remove(self) -> None:
        """End the ramp now. Safe at any time, also twice."""
        for ramp in self._ramps:
            ramp.remove()


class _Ramp:
    """The hooks on one torch optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        before = _RAMPS.get(optimizer)
        if before is not None:
            before.remove()  # two ramps on one optimizer would each undo the other's work
        _RAMPS[optimizer] = self
        self._steps = steps
        self.remaining = steps
        self._scaled: list[_Scaled] = []
        self._before = optimizer.register_step_pre_hook(self._scale)
        self._after = optimizer.register_step_post_hook(self._put_back)

    @property
    def factor(self) -> float:
        return (self._steps - self.remaining + 1) / (self._steps + 1)

    def _scale(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()  # a step that raised has left its rates scaled
        if not self.remaining:
            return
        seen: set[int] = set()  # groups may share one tensor
        for group in optimizer.param_groups:
            lr = group.get("lr")
            if lr is not None and not (isinstance(lr, torch.Tensor) and id(lr) in seen):
                seen.add(id(lr))
                self._scaled.append(_Scaled(group, self.factor))

    def _put_back(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()
        self.remaining = max(0, self.remaining - 1)
        if not self.remaining:
            self._before.remove()

    def _restore(self) -> None:
        for scaled in self._scaled:
            scaled.put_back()
        self._scaled.clear()

    def remove(self) -> None:
        self._restore()
        self.remaining = 0
        self._before.remove()
        self._after.remove()


class _Scaled:
    """One group's learning rate while it is scaled. A tensor is scaled in place, because compiled optimizers hold on to
    the tensor itself. Whoever sets the rate meanwhile wins: then there is nothing to put back."""

    def __init__(self, group: dict[str, Any], factor: float) -> None:
        self._group = group
        self._ours = group["lr"]
        if isinstance(self._ours, torch.Tensor):
            self._old = self._ours.detach().clone()
            with torch.no_grad():
                self._ours.mul_(factor)
            self._version = self._ours._version  # torch counts what is written into a tensor
        else:
            self._old = self._ours
            self._ours = group["lr"] = self._old * factor

    def put_back(self) -> None:
        if self._group.get("lr") is not self._ours:
            return
        if not isinstance(self._ours, torch.Tensor):
            self._group["lr"] = self._old
        elif self._ours._version == self._version:
            with torch.no_grad():
                self._ours.copy_(self._old)


_RAMPS: WeakKeyDictionary[torch.optim.Optimizer, _Ramp] = WeakKeyDictionary()
"""The ramp that each optimizer is under, if any."""
