"""What a Learner is made of, looked at before anything starts: models and optimizers that cannot work are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from atoll.errors import ConfigError
from atoll.learner.inner import OptimizerLike
from atoll.learner.local_part import local_part
from atoll.learner.warmup import WRAPPERS_MAX, torch_optimizers


def check_model(model: object) -> None:
    """The two arguments of a Learner are easily given in the wrong order."""
    if not isinstance(model, nn.Module):
        what = type(model).__name__
        raise ConfigError(f"model must be a torch.nn.Module, not {what}; give atoll.Learner(model, optimizer)")


def refuse_sharded(model: nn.Module) -> None:
    """Parameters that are cut over processes, where whole ones are needed."""
    tensors = sys.modules.get("torch.distributed.tensor")  # imported by whoever shards, and not by us: it takes long
    for name, parameter in model.named_parameters():
        if tensors is not None and isinstance(parameter, tensors.DTensor):
            raise ConfigError(
                f"parameter {name!r} is a DTensor (FSDP2 or tensor parallel), of which this process has only a part; "
                "load the model before it is sharded"
            )
    refuse_fsdp1(model)


def refuse_fsdp1(model: nn.Module) -> None:
    """FSDP1 keeps flat parameters, of which nobody can tell what is where."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters cannot be synced; shard "
            "it with fully_shard (FSDP2, torch.distributed.fsdp.fully_shard), or wrap it in DistributedDataParallel"
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
            tensors = [local_part(value) for value in state.values() if isinstance(value, torch.Tensor)]
            if any(not bool(torch.isfinite(value).all()) for value in tensors):
                state.clear()
