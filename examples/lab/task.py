"""A task of your own for the lab: which plane do these points lie on? Run it in its own folder, where
`atoll lab` finds it:

    atoll lab run --set task=task:make --learners 4 --batch 64 --seq 1 --tokens 100000 --threads 1
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.instruments.lab import Batch, LabSpec, Model

PLANE = torch.tensor([[1.0, -2.0, 0.5]])


class Points:
    """Batches of one stream: a pure function of (seed, stream, position), so that every run reads the same."""

    def __init__(self, stream: int, size: int, seed: int, device: torch.device) -> None:
        self._first, self._size, self._device = 1_000_003 * seed + 10_007 * stream, size, device

    def load(self, position: int) -> Batch:
        dice = torch.Generator().manual_seed(self._first + position)
        points = torch.randn(self._size, 3, generator=dice)
        return points.to(self._device), (points @ PLANE.T).to(self._device)


class PlaneTask:
    lr = 0.01  # used unless --lr says otherwise

    def build(self, seed: int) -> nn.Module:
        """The model; its parameters depend on the seed alone. Buffers are refused: nobody publishes them."""
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 16), nn.GELU(), nn.Linear(16, 1))

    def loss(self, model: Model, batch: Batch) -> Tensor:
        return ((model(batch[0]) - batch[1]) ** 2).mean()

    def feeder(self, stream: int, size: int, seed: int, device: torch.device) -> Points:
        """Learner i reads stream i; data-parallel reads stream 0 in batches of everybody's size."""
        return Points(stream, size, seed, device)

    def held_out(self) -> list[Batch]:
        """What is evaluated, on the CPU; batches weigh as much as they are long."""
        return [Points(999, 256, 0, torch.device("cpu")).load(0)]


def make(spec: LabSpec) -> PlaneTask:
    return PlaneTask()
