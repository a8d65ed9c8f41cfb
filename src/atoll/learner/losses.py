"""Losses that are read without stalling a GPU."""

from __future__ import annotations

import math
from typing import SupportsFloat

import torch


class LossReader:
    """Turns what the loop gives as a loss into a number. A CUDA tensor is copied on its stream and read some steps
    later, when the copy has arrived: asking for it at once would make the training thread wait for the device."""

    def __init__(self) -> None:
        self._last = math.nan
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def read(self, loss: SupportsFloat | None) -> float:
        if loss is None:
            return self._last
        if not isinstance(loss, torch.Tensor):
            self._last = float(loss)
        elif loss.device.type != "cuda":
            self._last = float(loss.detach())
        else:
            self._read_device(loss.detach())
        return self._last

    def _read_device(self, loss: torch.Tensor) -> None:
        if self._pending is not None:
            host, ready = self._pending
            if not ready.query():  # type: ignore[no-untyped-call]
                return
            self._last = float(host)
        host = torch.empty((), dtype=torch.float32, pin_memory=True)
        host.copy_(loss.float(), non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        self._pending = (host, ready)
