"""What a Learner is made of, looked at before anything starts: models and optimizers that cannot work are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from atoll.errors import ConfigError
from atoll.learner.inner import OptimizerLike
from atoll.learner.warmup import WRAPPERS_MAX, torch_optimizers

ONE_PROCESS = (
    "today one process is one learner: start the script with `atoll run --learners N -- python train.py` instead of "
    "torchrun, one learner per GPU (several GPUs in one process work through torch.nn.DataParallel)"
)


def check_model(model: object) -> None:
    """The two arguments of a Learner are easily given in the wrong order."""
    if not isinstance(model, nn.Module):
        what = type(model).__name__
        raise ConfigError(f"model must be a torch.nn.Module, not {what}; give atoll.Learner(model, optimizer)")


def refuse_sharded(model: nn.Module) -> None:
    """Parameters that are cut over processes: no process has the values that a learner would send."""
    tensors = sys.modules.get("torch.distributed.tensor")  # imported by whoever shards, and not by us: it takes long
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, parameter in model.named_parameters():
        if tensors is not None and isinstance(parameter, tensors.DTensor):
            raise ConfigError(
                f"parameter {name!r} is a DTensor (FSDP2 or tensor parallel), and sharded models are not supported "
                f"yet; leave out fully_shard: {ONE_PROCESS}"
            )
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError(
            f"the model is wrapped in FSDP, and sharded models are not supported yet; leave it out: {ONE_PROCESS}"
        )


def refuse_ranks() -> None:
    """A Learner in each rank of a process group: what one of them adopts, the others do not have yet. One in rank 0
    alone would be as wrong: the others would never have it."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ConfigError(
            f"torch.distributed runs {distributed.get_world_size()} ranks here, and a learner of several processes is "
            "not supported yet: updates would reach the ranks at different steps, and their parameters would drift "
            f"apart; leave out init_process_group and DistributedDataParallel: {ONE_PROCESS}"
        )


class OptimizerGroup:
    """Several optimizers that were given as a list."""

    def __init__(self, optimizers: Sequence[OptimizerLike]) -> None:
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)


def check_optimizer(optimizer: object, model: nn.Module) -> OptimizerLike | None:
    """The optimizer (or several, as a list) that steps this model; anything else is refused."""
    if optimizer is None:
        return None
    if isinstance(optimizer, list | tuple):
        checked = [check_optimizer(part, model) for part in optimizer]
        parts = [part for part in checked if part is not None]
        if len(parts) != len(optimizer) or not parts:
            raise ConfigError("optimizer=[...] needs at least one optimizer, and no None; leave it out for none at all")
        return OptimizerGroup(parts)
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state_dict", "load_state_dict")):
        raise ConfigError(f"optimizer must be a torch optimizer or a list of them; not {_what(optimizer)}")
    like = _unwrapped(cast(OptimizerLike, optimizer))
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for parameter in _stepped(like)):
        raise ConfigError(
            f"this {type(optimizer).__name__} steps no parameter of this model; make the optimizer from the parameters "
            "of the very model that is given to the Learner, after the last change to what it is made of"
        )
    return like


def _unwrapped(optimizer: OptimizerLike) -> OptimizerLike:
    """The torch optimizer inside of a library's mere shell (accelerate's, Lightning's), whose state is that one's.
    Some shells take a state and keep it to themselves, and an unwrapped learner may be a peer of this one. A wrapper
    that has state of its own stays."""
    for _ in range(WRAPPERS_MAX):
        inside = getattr(optimizer, "optimizer", None)
        if not isinstance(inside, torch.optim.Optimizer) or set(inside.state_dict()) != set(optimizer.state_dict()):
            break
        optimizer = inside
    return optimizer


def _what(thing: object) -> str:
    if isinstance(thing, torch.optim.lr_scheduler.LRScheduler) or hasattr(thing, "get_last_lr"):
        return (
            f"a {type(thing).__name__}, which is a schedule; give its optimizer here, and the schedule as "
            "extras={'scheduler': scheduler}"
        )
    return f"{' '.join(repr(thing).split()):.100}; give what you call step() on"


def _stepped(optimizer: OptimizerLike) -> Iterator[object]:
    for group in optimizer.param_groups:
        yield from group["params"]


def heal_optimizer(optimizer: OptimizerLike | None) -> None:
    """Optimizer state that is not finite starts anew; the rest is kept."""
    for part in torch_optimizers(optimizer):
        for state in part.state.values():
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
            if any(not bool(torch.isfinite(value).all()) for value in tensors):
                state.clear()
