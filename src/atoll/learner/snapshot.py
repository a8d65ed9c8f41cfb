"""Copies of fragments taken by the training thread, and the host buffers they live in.

On a CPU a snapshot is a plain copy. On a GPU the training thread only gathers the fragment into a staging buffer on its
own stream (device memory bandwidth, microseconds per MB); a side stream brings it to pinned host memory while training
goes on, and whoever needs the values waits for its event in the background. The way back is the same: values to adopt
are brought to the device ahead of time, so that the training thread only adds or copies device memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.learner.tensors import ParameterSet

F32 = NDArray[np.float32]

BUFFERS_KEPT = 2
"""Free host buffers kept per fragment: one for the next snapshot, one for a contribution in the air."""


class Snapshot:
    """One fragment's parameters at a step boundary."""

    def __init__(self, fragment: int, host: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        self.fragment = fragment
        self.host = host
        self._ready = ready

    def values(self) -> F32:
        """The copy, once it is complete. May block for a transfer: background threads only."""
        ready = self._ready  # several threads may ask
        if ready is not None:
            ready.synchronize()
            self._ready = None  # asking again would cost the interpreter's lock
        array: F32 = self.host.numpy()
        return array


class Staged:
    """Values on the model's device, ready for the training thread."""

    def __init__(self, tensor: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        self._tensor = tensor
        self._ready = ready

    def tensor(self) -> torch.Tensor:
        """Training thread: the values, ordered after their transfer on the current stream."""
        if self._ready is not None:
            stream = torch.cuda.current_stream(self._tensor.device)
            stream.wait_event(self._ready)
            self._tensor.record_stream(stream)
        return self._tensor


class Mover:
    """Moves fragments between the model's device and the host."""

    def __init__(self, parameters: ParameterSet) -> None:
        self._parameters = parameters
        self._cuda = parameters.device.type == "cuda"
        self._side = _stream(parameters.device) if self._cuda else None
        self._inward = _stream(parameters.device) if self._cuda else None
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def buffer(self, fragment: int) -> torch.Tensor:
        """A host buffer (pinned when the model is on a GPU) for this fragment. It is zero where the fragment has
        padding, and stays so because it is never used for another fragment."""
        if self._free[fragment]:
            return self._free[fragment].pop()
        size = self._parameters.layout.fragments[fragment].size
        return torch.zeros(size, dtype=torch.float32, device="cpu", pin_memory=self._cuda)

    def release(self, snapshot: Snapshot) -> None:
        """Give the buffer back. A transfer still under way is ordered before the next one on the side stream."""
        free = self._free[snapshot.fragment]
        if len(free) < BUFFERS_KEPT:
            free.append(snapshot.host)

    @torch.no_grad()
    def take(self, fragment: int) -> Snapshot:
        size = self._parameters.layout.fragments[fragment].size
        host = self.buffer(fragment)
        if self._side is None:
            self._parameters.read(fragment, host)
            return Snapshot(fragment, host, None)
        staging = torch.zeros(size, dtype=torch.float32, device=self._parameters.device)
        self._parameters.read(fragment, staging)
        self._side.wait_stream(torch.cuda.current_stream(self._parameters.device))
        with torch.cuda.stream(self._side):
            host.copy_(staging, non_blocking=True)
            ready = _event()
            ready.record(self._side)
        staging.record_stream(self._side)
        return Snapshot(fragment, host, ready)

    def stage(self, fragment: int, make: Callable[[F32 | None], F32]) -> Staged:
        """Background: bring values to the device on a stream of their own. `make` puts them into the memory it is
        given, from which they can be sent; without any it gives them in its own."""
        if self._inward is None:
            return Staged(torch.from_numpy(make(None)), None)
        size = self._parameters.layout.fragments[fragment].size
        host = torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=True)
        make(host.numpy())
        with torch.cuda.stream(self._inward):
            tensor = host.to(self._parameters.device, non_blocking=True)
            ready = _event()
            ready.record(self._inward)
        ready.synchronize()  # the pinned memory must outlive its transfer, and nobody is in a hurry here
        return Staged(tensor, ready)


def _stream(device: torch.device) -> torch.cuda.Stream:
    # Of high priority: torch gives streams out in turn from a pool per priority, so these never are a training stream.
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return stream


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event
