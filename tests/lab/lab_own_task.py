"""A user's own task for the lab's tests: linear regression with a known best loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.instruments.lab.spec import LabSpec
from atoll.instruments.lab.task import Batch, Feeder, Model

WEIGHTS = torch.tensor([[1.0, -2.0, 0.5]])


class Planes:
    """Batches of points on a plane."""

    def __init__(self, stream: int, size: int, seed: int) -> None:
        self._key = 1_000_003 * seed + 10_007 * stream
        self._size = size

    def load(self, position: int) -> Batch:
        dice = torch.Generator().manual_seed(self._key + position)
        points = torch.randn(self._size, 3, generator=dice)
        return points, points @ WEIGHTS.T


class PlaneTask:
    lr = 0.05

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(3, 1)

    def loss(self, model: Model, batch: Batch) -> Tensor:
        return ((model(batch[0]) - batch[1]) ** 2).mean()

    def feeder(self, stream: int, size: int, seed: int, device: torch.device) -> Feeder:
        return Planes(stream, size, seed)

    def held_out(self) -> list[Batch]:
        return [Planes(999, 64, 0).load(0)]


class FrozenTask(PlaneTask):
    """A layer that is never trained stands before the one that is."""

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))
        model[0].requires_grad_(False)
        return model


class BufferedTask(PlaneTask):
    def build(self, seed: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))


def make(spec: LabSpec) -> PlaneTask:
    return PlaneTask()


def make_frozen(spec: LabSpec) -> PlaneTask:
    return FrozenTask()


def make_buffered(spec: LabSpec) -> PlaneTask:
    return BufferedTask()


def make_nothing(spec: LabSpec) -> int:
    return 5


class DropoutTask(PlaneTask):
    """Its steps draw random numbers, and its parameters are drawn aside."""

    def build(self, seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))


class NothingHeldOutTask(PlaneTask):
    def held_out(self) -> list[Batch]:
        return []


def make_dropout(spec: LabSpec) -> PlaneTask:
    return DropoutTask()


def make_nothing_held_out(spec: LabSpec) -> PlaneTask:
    return NothingHeldOutTask()


def make_trouble(spec: LabSpec) -> PlaneTask:
    raise OSError("no such data")
