"""From torch.distributed to an island: which ranks are one learner, and whether they fit together."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from atoll.errors import AtollError, ConfigError
from atoll.learner.island.gloo import GlooLink
from atoll.learner.island.link import SPEAKER, RankLink
from atoll.learner.island.parameters import RankParameters
from atoll.learner.island.torch_ranks import LocalParameters, check_local, fingerprint, holdings_of
from atoll.learner.local_part import is_dtensor


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


def meet(link: RankLink, look: Callable[[], Mapping[str, str]]) -> None:
    """What must be the same on all ranks is compared before anything else. A rank that finds its own model wanting
    says so, and all of them end with that."""
    failed: AtollError | None = None
    about: Mapping[str, str] = {}
    try:
        about = look()
    except AtollError as error:
        failed = error
    told = [json.loads(text) for text in link.compare(json.dumps({"error": str(failed)} if failed else dict(about)))]
    if failed is not None:
        raise failed
    for rank, other in enumerate(told):
        if "error" in other:
            raise ConfigError(f"rank {rank} of this learner: {other['error']}")
        for what, mine in told[SPEAKER].items():
            if other.get(what) != mine:
                raise ConfigError(
                    f"the ranks of this learner differ in their {what}: rank 0 has {mine}, rank {rank} has "
                    f"{other.get(what)}; start all ranks from the same script, environment and installation"
                )


def rank_parameters(
    model: nn.Module, merge_modes: Mapping[str, str] | None, ranks: list[int], timeout_s: float
) -> tuple[RankParameters, GlooLink]:
    """This rank's parameters and its link to the others; all ranks together."""
    link = GlooLink(ranks, timeout_s)
    found: list[RankParameters] = []

    def look() -> Mapping[str, str]:
        held = LocalParameters(model, merge_modes)
        holdings = holdings_of(model, held.specs, ranks)
        holdings.check()
        check_local(model, holdings, link.rank)
        found.append(RankParameters(held, holdings, link.rank, link.exchange, link.exchange_now))
        return fingerprint(model, held.specs, importlib.metadata.version("atoll"))

    meet(link, look)
    return found[0], link
