"""Single values of tensors that are cut over the ranks of an island, found by all of them together."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from atoll.learner.island.link import I64, RankLink
from atoll.learner.local_part import indices_at, is_dtensor, local_part
from atoll.learner.watch import Pick


def picking(link: RankLink) -> Pick:
    """How all ranks find the values at some places of a whole tensor. A rank adds the bits of what it holds and counts
    itself; replicas hold the same bits, so the sum over ranks is a multiple of them. Before there are workers."""

    def pick(parameter: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        if not is_dtensor(parameter):
            return parameter.detach().take(places)
        held, here = _held(parameter, places.cpu())
        values = local_part(parameter).take(here.to(parameter.device)).cpu()
        words = values.view(torch.uint8).view(len(values), parameter.element_size())
        summed: I64 = np.zeros((places.numel(), words.shape[1] + 1), np.int64)
        summed[held.numpy(), :-1] = words.numpy()
        summed[held.numpy(), -1] = 1
        link.add_up(summed)
        found = summed[:, :-1] // np.maximum(summed[:, -1:], 1)
        return torch.from_numpy(found.astype(np.uint8)).view(parameter.dtype).view(-1)

    return pick


def _held(parameter: Any, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the places are here, and where in the flattened local tensor."""
    shape = tuple(parameter.shape) or (1,)
    index = indices_at("", parameter, tuple(parameter.device_mesh.get_coordinate()))
    held, here = torch.ones(places.numel(), dtype=torch.bool), torch.zeros_like(places)
    for size, own, along in zip(shape, index, torch.unravel_index(places, shape), strict=True):
        position = torch.full((size,), -1)
        position[torch.from_numpy(own)] = torch.arange(len(own))
        held &= position[along] >= 0
        here = here * len(own) + position[along]
    return held, here[held]
