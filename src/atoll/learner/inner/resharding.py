"""The optimizer state of processes with one mesh, cut anew for a process of another.

State that is shaped like the part of the parameter beside it (moments, momentum) is put together from the parts that
other processes had. Step counters and the like must be the same in all of them. What is shaped otherwise moves only
where both sides have the whole parameter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from atoll.errors import PayloadError
from atoll.learner.inner.captured import Captured, OptimizerLike, raw_bytes, reading
from atoll.learner.inner.giving import StateGiver
from atoll.learner.inner.places import HeldPart, Names, Places, copy_common, from_json, places_of, to_json
from atoll.learner.inner.restoring import SHAPED_OTHERWISE, ids_of, torch_states
from atoll.learner.inner.taking import kind_of, parameters_of
from atoll.learner.warmup import torch_optimizers

REMEDY = "start with as many ranks and the mesh that the state was taken from, or without the state"


@dataclass(frozen=True)
class Target:
    """The optimizer of the process that wants state, as far as others must know it."""

    kind: str
    parameters: list[list[str]]
    places: Places
    groups: list[list[int]]
    """Of each of torch's optimizers: how many parameters its groups have."""


def target_bytes(target: Target) -> bytes:
    """For the rank that cuts the state of others."""
    about = [target.kind, target.parameters, to_json(target.places), target.groups]
    return json.dumps(about, separators=(",", ":")).encode()


def read_target(text: bytes) -> Target:
    kind, parameters, places, groups = json.loads(text)
    return Target(kind, parameters, from_json(places), groups)


def target_of(optimizer: OptimizerLike, names: Names) -> Target:
    places = places_of(optimizer, names)
    if places is None:
        raise PayloadError(f"the state of a {type(optimizer).__name__} cannot be cut for another mesh; {REMEDY}")
    groups = [[len(group["params"]) for group in part.param_groups] for part in torch_optimizers(optimizer)]
    return Target(kind_of(optimizer), parameters_of(optimizer), places, groups)


def reshard(parts: Sequence[Captured], target: Target) -> dict[str, Any]:
    """The optimizer's branch of a state of the target's own, from those of all processes of one learner."""
    opened = [_open(part, target) for part in parts]
    tree = opened[0].saved["state"]
    for index, state in enumerate(torch_states(tree)):
        sources = _by_name(opened, index)
        wanted = [(place, _found(sources, place)) for place in target.places[index]]
        entries = {key: _entry(place, found, target.kind) for key, (place, found) in enumerate(wanted)}
        state["param_groups"] = _groups(target.groups[index], [found for _, found in wanted])
        state["state"] = {key: entry for key, entry in entries.items() if entry}
    return {"kind": target.kind, "parameters": target.parameters, "state": tree}


@dataclass(frozen=True)
class _Opened:
    saved: dict[str, Any]
    places: Places


@dataclass(frozen=True)
class _Source:
    """What one process kept of one parameter."""

    place: HeldPart
    entry: dict[str, Any]
    settings: dict[str, Any]
    """Of its group."""


def _open(part: Captured, target: Target) -> _Opened:
    saved = StateGiver(part.tensors, copy=False).value(part.structure["optimizer"])
    if saved is None or part.places is None:
        why = "it does not say which parameters it is of (an older release wrote it)" if saved else "it holds none"
        raise PayloadError(f"the optimizer state of another mesh cannot be used: {why}; {REMEDY}")
    if saved["kind"] != target.kind:
        raise PayloadError(f"this is the state of a {saved['kind']}, the optimizer is a {target.kind}; {REMEDY}")
    with reading():
        counts = [len(ids_of(state)) for state in torch_states(saved["state"])]
    if counts != [len(places) for places in part.places] or len(counts) != len(target.places):
        raise PayloadError(f"the optimizer's state does not fit its own list of parameters; {REMEDY}")
    return _Opened(saved, part.places)


def _by_name(opened: Sequence[_Opened], index: int) -> dict[str, list[_Source]]:
    found: dict[str, list[_Source]] = {}
    for one in opened:
        state = list(torch_states(one.saved["state"]))[index]
        groups = [(group, key) for group in state["param_groups"] for key in group["params"]]
        at_group = [i for group in state["param_groups"] for i in range(len(group["params"]))]
        for place, (group, key), i in zip(one.places[index], groups, at_group, strict=True):
            settings = {name: value for name, value in group.items() if name != "params"}
            if "param_names" in settings:
                settings["param_names"] = [settings["param_names"][i]]
            found.setdefault(place.name, []).append(_Source(place, state["state"].get(key) or {}, settings))
    return found


def _found(sources: dict[str, list[_Source]], place: HeldPart) -> list[_Source]:
    found = sources.get(place.name)
    if not found:
        raise PayloadError(f"the saved state has no parameter {place.name!r}; {REMEDY}")
    for source in found:
        if (source.place.shape, source.place.dtype) != (place.shape, place.dtype):
            was = f"{source.place.dtype}{list(source.place.shape)}"
            raise PayloadError(f"{place.name!r} is {place.dtype}{list(place.shape)}, its saved state is for {was}")
    return found


def _entry(place: HeldPart, sources: list[_Source], kind: str) -> dict[str, Any]:
    sources = [source for source in sources if source.entry]
    if not sources:
        return {}  # no step was taken with it yet
    if any(set(source.entry) != set(sources[0].entry) for source in sources):
        raise PayloadError(f"the ranks kept different things of {place.name!r}; {REMEDY}")
    return {key: _value(place, key, sources, kind) for key in sources[0].entry}


def _value(place: HeldPart, key: str, sources: list[_Source], kind: str) -> Any:
    first = sources[0].entry[key]
    if not isinstance(first, torch.Tensor) or not first.dim():
        if not all(same(first, source.entry[key]) for source in sources):
            raise PayloadError(f"{key} of {place.name!r} differs between the ranks; {REMEDY}")
        return first.clone() if isinstance(first, torch.Tensor) else first
    shaped = not any(name in kind for name in SHAPED_OTHERWISE)
    if shaped and all(tuple(s.entry[key].shape) == s.place.local_shape for s in sources):
        return _put_together(place, key, sources)
    if place.whole and sources[0].place.whole:
        return first.clone()
    raise PayloadError(f"{key} of {place.name!r} is not shaped like its parameter and cannot be cut anew; {REMEDY}")


def _put_together(place: HeldPart, key: str, sources: list[_Source]) -> torch.Tensor:
    first = sources[0].entry[key]
    target = torch.empty(place.local_shape, dtype=first.dtype)
    parts = {source.place.held: source for source in reversed(sources)}  # of replicas the first
    count = sum(copy_common(target, place, source.entry[key], source.place) for source in parts.values())
    if count != target.numel():
        raise PayloadError(f"the ranks' parts do not add up to {key} of {place.name!r}; {REMEDY}")
    return target


def _groups(sizes: list[int], found: list[list[_Source]]) -> list[dict[str, Any]]:
    """The groups' settings (learning rates and the like), each from the parameters that are in it now."""
    groups, first = [], 0
    for size in sizes:
        inside = [sources[0].settings for sources in found[first : first + size]]
        plain = [{name: value for name, value in one.items() if name != "param_names"} for one in inside]
        if not plain or not all(same(plain[0], one) for one in plain):
            raise PayloadError(f"the optimizer's groups are other ones than those of its saved state; {REMEDY}")
        group = {**plain[0], "params": list(range(first, first + size))}
        if all("param_names" in one for one in inside):
            group["param_names"] = [name for one in inside for name in one["param_names"]]
        groups.append(group)
        first += size
    return groups


def common_extras(parts: Sequence[Captured], merged: str) -> tuple[dict[str, Any], list[str]]:
    """The extras that are the same in all of them, and the names of the others. `merged` is a table that no two need to
    have alike: of each of its entries the first counts."""
    givers = [StateGiver(part.tensors, copy=False) for part in parts]
    found, differ = {}, []
    for name in parts[0].structure["extras"]:
        states = [g.value(p.structure["extras"].get(name)) for g, p in zip(givers, parts, strict=True)]
        if name == merged and all(isinstance(state, dict) for state in states):
            found[name] = {key: value for state in reversed(states) for key, value in state.items()}
        elif all(same(states[0], state) for state in states):
            found[name] = states[0]
        else:
            differ.append(name)
    return found, differ


def same(first: Any, second: Any) -> bool:
    """The same bits, in whatever containers."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        alike = first.shape == second.shape and first.dtype == second.dtype
        return alike and torch.equal(raw_bytes(first), raw_bytes(second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(np.array_equal(first, second))
