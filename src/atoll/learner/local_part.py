"""Tensors of which this process has only a part (DTensors of FSDP2 and tensor parallel), and what it has of them."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_dtensor(value: object) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")  # imported by whoever shards, and not by us: it takes long
    return tensors is not None and isinstance(value, tensors.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of it."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.detach()


def part_like(value: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A value of this process's part, as a tensor that is cut like `whole`; itself where that is not cut."""
    if not is_dtensor(whole):
        return value
    like: Any = whole
    kind: Any = type(whole.data)
    made: torch.Tensor = kind.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made
