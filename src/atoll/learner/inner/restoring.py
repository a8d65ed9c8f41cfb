"""A new process: put a state back into a fresh optimizer and extras, so that training continues bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from atoll.errors import PayloadError
from atoll.learner.inner import limits
from atoll.learner.inner.captured import Captured, OptimizerLike, reading
from atoll.learner.inner.giving import StateGiver
from atoll.learner.inner.random_state import seed
from atoll.learner.inner.taking import PART, kind_of, parameters_of
from atoll.learner.inner_state import Stateful
from atoll.learner.local_part import is_dtensor, local_part, part_like
from atoll.learner.warmup import torch_optimizers

SHAPED_OTHERWISE = ("LBFGS", "Adafactor")
"""Optimizers of torch whose state is not shaped like the parameter."""


def restore(
    captured: Captured, optimizer: OptimizerLike | None, extras: Mapping[str, Stateful], *, rng: bool
) -> list[str]:
    """Put a state of this learner's own back. Gives a line for everything that could not be restored.

    An optimizer that the state does not fit is left as it is, with a PayloadError, and so is the rest.
    """
    tree, nodes, lost = captured.structure, captured.structure["extras"], []
    giver = StateGiver(captured.tensors, copy=True)
    states = {name: giver.value(node) for name, node in nodes.items() if name in extras}
    if optimizer is not None and tree["optimizer"] is not None:
        load_saved(giver.value(tree["optimizer"]), optimizer)
    elif optimizer is not None:
        lost.append("optimizer: the state holds none")
    elif tree["optimizer"] is not None:
        lost.append("optimizer: none was given to put its state into")
    for name in sorted({*nodes, *extras}):
        if name not in states:
            lost.append(f"{name}: " + ("no such extra was given" if name in nodes else "the state does not hold it"))
            continue
        try:
            extras[name].load_state_dict(states[name])
        except Exception as error:  # the user's object: it may raise anything
            lost.append(f"{name}: {type(error).__name__}: {error}")
    if rng:
        lost += ["random numbers: the state holds none"] if tree["rng"] is None else seed(giver.value(tree["rng"]))
    return lost


def load_saved(saved: dict[str, Any], optimizer: OptimizerLike) -> None:
    """Put the optimizer's branch of a state back, with its groups' settings."""
    with reading():
        _check_fit(saved, optimizer)
        _move_groups(saved["state"], optimizer)
    _load(optimizer, saved["state"])


def restore_optimizer_only(captured: Captured, optimizer: OptimizerLike) -> None:
    """Take over a peer's moments and step counters. The learning rate and the other settings of the optimizer, the
    extras and the random numbers stay this learner's own."""
    saved = StateGiver(captured.tensors, copy=True).value(captured.structure["optimizer"])
    if saved is None:
        raise PayloadError("the peer sent no optimizer state; start with a warm-up instead")
    with reading():
        _check_fit(saved, optimizer)
    for name, tensor in captured.tensors.items():
        if name.startswith("optimizer.") and not _is_finite(tensor):
            raise PayloadError(f"the peer's {name} is not finite; start with a warm-up instead")
    state = optimizer.state_dict()
    theirs, mine = list(torch_states(saved["state"])), list(torch_states(state))
    if not mine or len(theirs) != len(mine):
        raise PayloadError("the peer's optimizer state is built otherwise than this learner's; start with a warm-up")
    with reading():
        for target, source in zip(mine, theirs, strict=True):
            ids = dict(zip(ids_of(source), ids_of(target), strict=True))
            target["state"] = {ids.get(key, key): entry for key, entry in source["state"].items()}
    _load(optimizer, state)


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = tensor.aminmax()  # unlike isfinite this makes no tensors as large as its argument
    return bool(low.isfinite() and high.isfinite())


def _check_fit(saved: dict[str, Any], optimizer: OptimizerLike) -> None:
    """The same kind of optimizer over parameters of the same types and shapes, in the same groups."""
    remedy = "start this learner with the model and optimizer that the state was taken from, or without the state"
    kind, groups = kind_of(optimizer), parameters_of(optimizer)
    if saved["kind"] != kind:
        raise PayloadError(f"this is the state of a {saved['kind']}, the optimizer is a {kind}; {remedy}")
    if [len(group) for group in saved["parameters"]] != [len(group) for group in groups]:
        raise PayloadError(f"the optimizer's groups have other numbers of parameters than its saved state; {remedy}")
    for i, (old, new) in enumerate(zip(chain(*saved["parameters"]), chain(*groups), strict=True)):
        if old != (new if PART in old else new.partition(PART)[0]):  # older releases did not say which part it is
            raise PayloadError(f"parameter {i} of the optimizer is {new}, its saved state is for {old}; {remedy}")
    for part, param, entry in _entries(optimizer, saved["state"]):
        if type(part).__module__.startswith("torch.optim.") and type(part).__name__ not in SHAPED_OTHERWISE:
            for key, value in entry.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != local_part(param).shape:
                    shapes = f"{list(value.shape)} for {list(local_part(param).shape)}"
                    raise PayloadError(f"{key} is shaped {shapes}; {remedy}")


def _move_groups(state: dict[str, Any], optimizer: object) -> None:
    """A learning rate that is a tensor goes to the device of the optimizer's own: torch leaves it where it finds it."""
    for part, saved in zip(torch_optimizers(optimizer), torch_states(state), strict=False):
        for own, group in zip(part.param_groups, saved["param_groups"], strict=True):
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and isinstance(own.get(key), torch.Tensor):
                    group[key] = value.to(own[key].device)


def _load(optimizer: OptimizerLike, state: dict[str, Any]) -> None:
    before = optimizer.state_dict()
    for _, param, entry in _entries(optimizer, state):
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and is_dtensor(param) and value.shape == local_part(param).shape:
                entry[key] = part_like(value.to(param.device), param)
    try:
        optimizer.load_state_dict(state)
    except Exception as error:  # a custom optimizer may raise anything
        optimizer.load_state_dict(before)
        raise PayloadError(f"the optimizer does not take the state: {error}; start without it") from error
    for part, param, entry in _entries(optimizer, state):
        loaded = part.state.get(param, {})
        for key, value in entry.items():
            cast = loaded.get(key)
            # torch casts moments to the parameter's type; fp32 moments of bf16 parameters would lose their low bits.
            if isinstance(value, torch.Tensor) and isinstance(cast, torch.Tensor) and cast.dtype != value.dtype:
                loaded[key] = value.to(cast.device)


def torch_states(tree: Any, depth: int = limits.DEPTH_MAX) -> Iterator[dict[str, Any]]:
    """The state dicts of torch's form inside of a state dict: itself, or those of a combination's parts."""
    if isinstance(tree, dict) and {"state", "param_groups"} <= set(tree):
        yield tree
    elif isinstance(tree, dict | list | tuple) and depth:
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from torch_states(item, depth - 1)


def ids_of(state: dict[str, Any]) -> list[Any]:
    if not all(isinstance(group, dict) for group in state["param_groups"]):
        raise TypeError("a group of parameters must be a table")
    return [key for group in state["param_groups"] for key in group["params"]]


def _entries(
    optimizer: object, state: dict[str, Any]
) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor, dict[str, Any]]]:
    """(optimizer, parameter, what the state holds for it), where the optimizer is made of torch's."""
    found, saved = list(torch_optimizers(optimizer)), list(torch_states(state))
    for part, own in zip(found, saved, strict=True) if len(found) == len(saved) else ():
        params = [param for group in part.param_groups for param in group["params"]]
        for key, param in zip(ids_of(own), params, strict=True):
            if isinstance(own["state"].get(key), dict):
                yield part, param, own["state"][key]
