"""What each rank of an island holds of a torch model: read off its DTensors, and compared over the ranks.

A plain parameter is whole on every rank (DDP, or parts of a model that are not sharded). A DTensor says by its mesh and
its placements which rows and columns are where: FSDP2, HSDP, tensor parallel and their combinations are all told apart
by that alone. torch's own placements cut a list of indices, so nobody has to know how they cut.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from atoll.core import TensorSpec
from atoll.errors import ConfigError
from atoll.learner.island.intervals import EMPTY, Intervals, intervals
from atoll.learner.island.shares import Holdings, held_runs
from atoll.learner.local_part import indices_at, is_dtensor, local_part, part_like, ranges_of
from atoll.learner.names import named_parameters
from atoll.learner.parameters import F32
from atoll.learner.torch_parameters import TorchParameters


class LocalParameters(TorchParameters):
    """This rank's parts of the parameters, by a layout of its own local tensors."""

    def join_stages(self, specs: tuple[TensorSpec, ...]) -> None:
        """This rank has one stage of a pipeline; these are the tensors of all of them."""
        self.specs = specs

    def _named(self) -> list[torch.Tensor]:
        known = dict(named_parameters(self._model))
        device = next(iter(known.values())).device
        return [
            known.get(spec.name, torch.empty(0, dtype=getattr(torch, spec.dtype), device=device)) for spec in self.specs
        ]

    def _tensor(self, index: int) -> torch.Tensor:
        return local_part(self._parameters[index])

    def save(self) -> list[torch.Tensor]:
        return [local_part(parameter).clone() for parameter in self._parameters]

    @torch.no_grad()
    def restore(self, saved: list[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters, saved, strict=True):
            local_part(parameter).copy_(value)
        self.reshard()

    def reshard(self) -> None:
        """FSDP2 may keep gathered copies of parameters that have changed since."""
        for module in _sharded_modules(self._model):
            module.reshard()

    def named(self, thetas: Sequence[F32]) -> dict[str, torch.Tensor]:
        """As what the parameters are: DTensors of which this rank has its part, or plain tensors."""
        values = [torch.empty(local_part(parameter).shape, dtype=torch.float32) for parameter in self._parameters]
        self._fill([value.view(-1) for value in values], thetas)
        here = dict(named_parameters(self._model))
        parts = zip(self.specs, values, self._parameters, strict=True)
        return {spec.name: part_like(value, parameter) for spec, value, parameter in parts if spec.name in here}


def is_sharded(model: nn.Module) -> bool:
    """True if FSDP2 keeps parts of this model's parameters on each rank."""
    return any(True for _ in _sharded_modules(model))


def _sharded_modules(model: nn.Module) -> Iterator[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]
            yield module


def own_ranges(model: nn.Module, specs: tuple[TensorSpec, ...]) -> list[Any]:
    """What this rank holds of each tensor, as ranges along its dimensions; None: all of it."""
    known = dict(named_parameters(model))
    return [_ranges(spec.name, known[spec.name]) for spec in specs]


def _ranges(name: str, parameter: torch.Tensor) -> Any:
    if not is_dtensor(parameter):
        return None
    sharded: Any = parameter
    return [ranges_of(index) for index in indices_at(name, sharded, tuple(sharded.device_mesh.get_coordinate() or ()))]


def holdings_of_stages(specs: tuple[TensorSpec, ...], held: Sequence[Mapping[str, Any]]) -> Holdings:
    """What each rank holds where they are stages of a pipeline: of each, its ranges by the names of its tensors."""
    return Holdings(specs, tuple(tuple(_told_runs(spec, of_rank) for of_rank in held) for spec in specs))


def _told_runs(spec: TensorSpec, of_rank: Mapping[str, Any]) -> Intervals:
    if spec.name not in of_rank:
        return EMPTY
    if of_rank[spec.name] is None:
        return intervals([0], [int(np.prod(spec.shape))])
    indices = [np.concatenate([np.arange(0), *(np.arange(*one) for one in ranges)]) for ranges in of_rank[spec.name]]
    return held_runs(spec.shape, tuple(indices))


def holdings_of(model: nn.Module, specs: tuple[TensorSpec, ...], ranks: Sequence[int]) -> Holdings:
    """What each of these ranks (by their numbers in the default group) holds, as this rank's model says."""
    known = dict(named_parameters(model))
    return Holdings(specs, tuple(_runs(spec, known[spec.name], ranks) for spec in specs))


def _runs(spec: TensorSpec, parameter: torch.Tensor, ranks: Sequence[int]) -> tuple[Intervals, ...]:
    if not is_dtensor(parameter):
        return (intervals([0], [int(np.prod(spec.shape))]),) * len(ranks)
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    runs: dict[tuple[int, ...], Intervals] = {}
    found = []
    for rank in ranks:
        where = tuple(int(c) for c in (mesh.mesh == rank).nonzero()[0]) if bool((mesh.mesh == rank).any()) else ()
        if not where:
            raise ConfigError(
                f"parameter {spec.name!r} is sharded over a mesh without rank {rank}, and every rank of a learner must "
                "hold a part of every parameter; give this Learner the mesh= or group= of the ranks that do"
            )
        if where not in runs:
            indices = indices_at(spec.name, parameter, where)
            runs[where] = held_runs(spec.shape, indices)
        found.append(runs[where])
    return tuple(found)


def check_local(model: nn.Module, holdings: Holdings, me: int) -> None:
    """What the placements say must be what is here."""
    known = dict(named_parameters(model))
    for spec, runs in zip(holdings.tensors, holdings.runs, strict=True):
        if spec.name not in known and not runs[me]:
            continue
        here = local_part(known[spec.name])
        if here.numel() != runs[me].count:
            raise ConfigError(
                f"rank {me} has {here.numel()} elements of {spec.name!r} where its placement says {runs[me].count}; "
                "make the Learner after the model was sharded, on every rank"
            )


def fingerprint(model: nn.Module, specs: tuple[TensorSpec, ...], version: str) -> dict[str, str]:
    """What must be the same on all ranks, by what a person calls it."""
    known = dict(named_parameters(model))
    tensors = [[s.name, s.shape, s.dtype, s.merge] for s in specs]
    frozen = [[n, str(p.dtype), list(p.shape), _cut(p)] for n, p in known.items() if not p.requires_grad]
    cuts = [_cut(known[s.name]) for s in specs]
    kinds = sorted({known[s.name].device.type for s in specs})

    def digest(value: object) -> str:
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]

    return {
        "version of atoll": version,
        "type of device": "+".join(kinds),
        "model": f"{len(specs)} trainable tensors, {digest(tensors)}",
        "sharding": digest(cuts),
        "frozen parameters": f"{len(frozen)} tensors, {digest(frozen)}",
    }


def _cut(parameter: torch.Tensor) -> str:
    return str(getattr(parameter, "placements", ""))
