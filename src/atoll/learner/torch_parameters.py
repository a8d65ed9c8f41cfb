"""Plain torch modules as `Parameters`: which tensors are synced, and copies between them and flat fp32 arrays.

What is synced: every floating-point parameter that requires gradients, tied ones once. Frozen parameters never change,
so they are not sent: start all learners from the same ones. Buffers (such as BatchNorm's running statistics) stay
local: an outer step with momentum could make a running variance negative, and every learner tracks its own well.

Embedding-like tensors (token and position embeddings, the output head) merge by plain mean: most of their rows are
untouched in most steps, and a direction averaged over such rows means little (the paper's tables 8 and 9).

On a CPU a snapshot is a plain copy. On a GPU the training thread only gathers the fragment into a staging buffer on its
own stream (device memory bandwidth, microseconds per MB); a side stream brings it to pinned host memory while training
goes on, and whoever needs the values waits for its event in the background. The way back is the same: values to adopt
are brought to the device ahead of time, so that the training thread only adds or copies device memory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from atoll.core import Layout, TensorSpec
from atoll.errors import ConfigError, LayoutError
from atoll.learner.names import named_parameters, plain_name
from atoll.learner.parameters import F32, MakeValues, Snapshot

EMBEDDING_LIKE = re.compile(
    r"(^|[._])(embed(ding)?s?|[a-z]*_?embeddings?|wte|wpe|tok_embeddings|embed_tokens|lm_head|head|unembed|output_layer)"
    r"([._]|$)"
)
"""Names under which token embeddings, position embeddings and output heads go in the common code bases."""
BUFFERS_KEPT = 2
"""Free host buffers kept per fragment: one for the next snapshot, one for a contribution in the air."""
Change: TypeAlias = Callable[[torch.Tensor, torch.Tensor], object]
"""Changes a slice of the parameters (first) by a slice of values on their device (second)."""


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are synced, by plain name; shared ones appear once."""
    found = [(name, p) for name, p in named_parameters(model) if p.requires_grad]
    if not found:
        raise LayoutError("the model has no trainable parameters; pass one whose parameters require gradients")
    for name, parameter in found:
        if not parameter.is_floating_point():
            raise LayoutError(f"parameter {name!r} is {parameter.dtype}, which cannot be averaged; freeze it")
        if parameter.is_meta:
            raise LayoutError(f"parameter {name!r} is on the meta device; materialise the model first")
    if len(dict(found)) < len(found):
        raise LayoutError("a wrapper around the model has parameters that are named as the model's; rename them")
    return found


def describe(model: nn.Module, merge_modes: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    """One TensorSpec per synced parameter. `merge_modes` maps names to "rda" (as the run's setting says) or "mean", and
    wins over the rule."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    specs = []
    known = dict(trainable(model))
    devices = sorted({str(parameter.device) for parameter in known.values()})
    if len(devices) > 1:
        raise LayoutError(f"the model is spread over {', '.join(devices)}; put all of it on one device")
    merge_modes = {plain_name(model, name): mode for name, mode in merge_modes.items()}
    for name in merge_modes:
        if name not in known:
            raise ConfigError(f"merge_modes names {name!r}, which is not a trainable parameter of the model")
    for name, parameter in known.items():
        by_rule = "mean" if id(parameter) in embeddings or EMBEDDING_LIKE.search(name) else "rda"
        shape = tuple(parameter.shape) or (1,)
        dtype = str(parameter.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, shape, dtype, merge_modes.get(name, by_rule)))
    return tuple(specs)


class TorchSnapshot:
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


class TorchStaged:
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


class TorchParameters:
    """The trainable parameters of a module on one device (`parameters.Parameters`)."""

    def __init__(self, model: nn.Module, merge_modes: Mapping[str, str] | None = None) -> None:
        self.specs = describe(model, merge_modes or {})
        self._model = model
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def lay_out(self, layout: Layout) -> None:
        self.layout = layout
        named = dict(named_parameters(self._model))
        self._parameters = [named[spec.name] for spec in self.specs]
        self.device = self._parameters[0].device  # only now: the model may have been moved since it was described
        self._cuda = self.device.type == "cuda"
        self._outward = _stream(self.device) if self._cuda else None
        self._inward = _stream(self.device) if self._cuda else None

    # ------------------------------------------------------------ to the host

    @torch.no_grad()
    def read(self, fragment: int) -> TorchSnapshot:
        host = self._buffer(fragment)
        if self._outward is None:
            self._gather(fragment, host)
            return TorchSnapshot(fragment, host, None)
        staging = torch.zeros(host.shape, dtype=torch.float32, device=self.device)
        self._gather(fragment, staging)
        self._outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outward):
            host.copy_(staging, non_blocking=True)
            ready = _event()
            ready.record(self._outward)
        staging.record_stream(self._outward)
        return TorchSnapshot(fragment, host, ready)

    def release(self, snapshot: Snapshot) -> None:
        """A transfer still under way is ordered before the next one on the outward stream."""
        assert isinstance(snapshot, TorchSnapshot)
        free = self._free[snapshot.fragment]
        if len(free) < BUFFERS_KEPT:
            free.append(snapshot.host)

    def _buffer(self, fragment: int) -> torch.Tensor:
        """A host buffer (pinned when the model is on a GPU) for this fragment. It is zero where the fragment has
        padding, and stays so because it is never used for another fragment."""
        if self._free[fragment]:
            return self._free[fragment].pop()
        size = self.layout.fragments[fragment].size
        return torch.zeros(size, dtype=torch.float32, device="cpu", pin_memory=self._cuda)

    def _gather(self, fragment: int, flat: torch.Tensor) -> None:
        """flat[...] = parameters, as fp32, on flat's device."""
        for piece in self.layout.fragments[fragment].slices:
            source = self._parameters[piece.tensor].detach().reshape(-1)[piece.start : piece.stop]
            flat[piece.offset : piece.offset + piece.size].copy_(source, non_blocking=True)

    # ------------------------------------------------------------ from the host

    def stage(self, fragment: int, make: MakeValues) -> TorchStaged:
        """On a GPU, on a stream of their own, from pinned memory that `make` fills."""
        if self._inward is None:
            return TorchStaged(torch.from_numpy(make(None)), None)
        size = self.layout.fragments[fragment].size
        host = torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=True)
        make(host.numpy())
        with torch.cuda.stream(self._inward):
            tensor = host.to(self.device, non_blocking=True)
            ready = _event()
            ready.record(self._inward)
        ready.synchronize()  # the pinned memory must outlive its transfer, and nobody is in a hurry here
        return TorchStaged(tensor, ready)

    def write(self, fragment: int, staged: TorchStaged) -> None:
        self._change(fragment, staged, lambda theta, value: theta.copy_(value, non_blocking=True))

    def mix(self, fragment: int, staged: TorchStaged, alpha: float) -> None:
        self._change(fragment, staged, lambda theta, value: theta.copy_(value.lerp(theta.to(value.dtype), alpha)))

    def add(self, fragment: int, staged: TorchStaged) -> None:
        def change(theta: torch.Tensor, value: torch.Tensor) -> None:
            if theta.dtype is value.dtype:
                theta.add_(value)
            else:
                theta.copy_(theta.to(value.dtype).add_(value))

        self._change(fragment, staged, change)

    @torch.no_grad()
    def _change(self, fragment: int, staged: TorchStaged, change: Change) -> None:
        flat = staged.tensor()
        values = flat.to(self.device, non_blocking=True) if flat.device != self.device else flat
        for piece in self.layout.fragments[fragment].slices:
            parameter = self._parameters[piece.tensor].detach()
            value = values[piece.offset : piece.offset + piece.size]
            if parameter.is_contiguous():
                change(parameter.view(-1)[piece.start : piece.stop], value)
            else:  # channels-last and the like: go through a contiguous copy
                dense = parameter.contiguous().view(-1)
                change(dense[piece.start : piece.stop], value)
                parameter.copy_(dense.view(parameter.shape))

    # ------------------------------------------------------------ as they are

    def as_kept(self, fragment: int, theta: F32) -> F32:
        pieces = self.layout.fragments[fragment].slices
        typed = [(piece.offset, piece.size, self._parameters[piece.tensor].dtype) for piece in pieces]
        rounded = [item for item in typed if item[2] is not torch.float32]
        if not rounded:
            return theta
        kept = theta.copy()
        for offset, size, dtype in rounded:
            view = torch.from_numpy(kept[offset : offset + size])
            view.copy_(view.to(dtype).to(torch.float32))
        return kept

    def save(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def restore(self, saved: list[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters, saved, strict=True):
            parameter.detach().copy_(value)

    def named(self, thetas: Sequence[F32]) -> dict[str, torch.Tensor]:
        """Copies of flat arrays, one per fragment, as the tensors that these parameters are."""
        shapes = zip(self.specs, self._parameters, strict=True)
        tensors = {spec.name: torch.empty(parameter.shape, dtype=torch.float32) for spec, parameter in shapes}
        flats = [tensor.view(-1) for tensor in tensors.values()]
        for fragment, theta in zip(self.layout.fragments, thetas, strict=True):
            for piece in fragment.slices:
                values = torch.from_numpy(theta[piece.offset : piece.offset + piece.size])
                flats[piece.tensor][piece.start : piece.stop] = values
        return tensors


def _stream(device: torch.device) -> torch.cuda.Stream:
    # Of high priority: torch gives streams out in turn from a pool per priority, so these never are a training stream.
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return stream


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event
