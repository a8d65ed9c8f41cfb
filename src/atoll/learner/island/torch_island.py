"""From torch.distributed to an island: which ranks are one learner, and whether they fit together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from atoll.core import TensorSpec
from atoll.errors import ConfigError
from atoll.learner.island.gloo import GlooLink
from atoll.learner.island.link import RankLink
from atoll.learner.island.meeting import build, meet
from atoll.learner.island.parameters import RankParameters
from atoll.learner.island.torch_ranks import (
    LocalParameters,
    check_local,
    fingerprint,
    holdings_of,
    holdings_of_stages,
    own_ranges,
)
from atoll.learner.local_part import is_dtensor

PIECE_CHARS = 1000
"""Of a long text at a time: in UTF-8 it stays below what ranks can compare (`gloo.TEXT_BYTES_MAX`)."""


def island_ranks(model: object, mesh: Any, group: Any) -> list[int] | None:
    """The ranks of the default group that are one learner with this process; None if it is the only one."""
    if not (dist.is_available() and dist.is_initialized()):
        if mesh is not None or group is not None:
            raise ConfigError("mesh= and group= need torch.distributed; call init_process_group first, on every rank")
        return None
    if mesh is not None and group is not None:
        raise ConfigError("give mesh= or group=, not both")
    ranks = dist.get_process_group_ranks(group) if group is not None else None
    if mesh is not None:
        ranks = sorted(int(rank) for rank in mesh.mesh.reshape(-1))
    ranks = ranks or list(range(dist.get_world_size()))
    if dist.get_rank() not in ranks:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the mesh= or group= of its own learner; give each rank its"
        )
    if len(ranks) > 1:
        return ranks
    if isinstance(model, nn.Module) and any(is_dtensor(parameter) for parameter in model.parameters()):
        return ranks  # one rank of a mesh: its DTensors hold everything
    return None


def rank_parameters(
    model: nn.Module,
    merge_modes: Mapping[str, str] | None,
    ranks: list[int],
    timeout_s: float,
    check: Callable[[], None],
) -> tuple[RankParameters, GlooLink]:
    """This rank's parameters and its link to the others; all ranks together. `check` is done where all of them hear
    what one of them finds wrong."""
    link = GlooLink(ranks, timeout_s)
    found: list[RankParameters] = []
    described: list[tuple[LocalParameters, list[Any]]] = []

    def describe() -> Mapping[str, str]:
        check()
        local = LocalParameters(model, merge_modes)
        described.append((local, own_ranges(model, local.specs)))
        return {"version of atoll": build()}

    meet(link, describe)
    held, ranges = described[0]
    own_specs, stages = held.specs, _stages(link, held.specs, ranges)

    def look() -> Mapping[str, str]:
        if stages is None:
            holdings = holdings_of(model, own_specs, ranks)
        else:
            held.join_stages(stages.specs)
            holdings = holdings_of_stages(stages.specs, stages.held)
        holdings.check()
        check_local(model, holdings, link.rank)
        staged = stages is not None
        found.append(RankParameters(held, holdings, link.rank, link.exchange, link.exchange_now, staged=staged))
        return fingerprint(model, own_specs, build())

    meet(link, look, stages.like if stages is not None else ())
    return found[0], link


@dataclass(frozen=True)
class Stages:
    """A pipeline over ranks: the tensors of all stages, in the order of ranks, and who has which."""

    specs: tuple[TensorSpec, ...]
    held: tuple[dict[str, Any], ...]
    """For each rank: what it holds of its tensors (`own_ranges`)."""
    like: tuple[int, ...]
    """For each rank: the first one with the same stage."""


def _stages(link: RankLink, specs: tuple[TensorSpec, ...], ranges: list[Any]) -> Stages | None:
    """None unless ranks have tensors of different names. Two ranks have all of them in common or none: where only some
    are, a script is wrong, and comparing says what differs."""
    if len(set(link.compare(hashlib.sha256(json.dumps([s.name for s in specs]).encode()).hexdigest()))) == 1:
        return None
    about = zip(specs, ranges, strict=True)
    told = _long_texts(link, json.dumps([[s.name, s.shape, s.dtype, s.merge, here] for s, here in about]))
    every = [[(TensorSpec(n, tuple(shape), dtype, merge), held) for n, shape, dtype, merge, held in json.loads(one)]
             for one in told]  # fmt: skip
    held = tuple({spec.name: there for spec, there in one} for one in every)
    like = tuple(next(first for first, other in enumerate(held) if other.keys() & own.keys()) for own in held)
    if any(held[first].keys() != own.keys() for first, own in zip(like, held, strict=True)):
        return None
    return Stages(tuple(spec for first in sorted(set(like)) for spec, _ in every[first]), held, like)


def _long_texts(link: RankLink, text: str) -> list[str]:
    """`RankLink.compare` of texts of any length."""
    lengths = [int(one) for one in link.compare(str(len(text)))]
    pieces = [link.compare(text[at : at + PIECE_CHARS]) for at in range(0, max(lengths), PIECE_CHARS)]
    return ["".join(told) for told in zip(*pieces, strict=True)]
