"""Plain torch modules as `Parameters`: which tensors are synced, and copies between them and flat fp32 arrays.

What is synced: every floating-point parameter that requires gradients, tied ones once. Frozen parameters never change,
so they are not sent: start all learners from the same ones. Buffers (such as BatchNorm's running statistics) stay
local: an outer step with momentum could make a running variance negative, and every learner tracks its own well.

On a CPU a snapshot is a plain copy. On a GPU the training thread only gathers the fragment into a staging buffer on its
own stream (device memory bandwidth, microseconds per MB); a side stream brings it to pinned host memory while training
goes on, and whoever needs the values waits for its event in the background. The way back is the same: values to adopt
are brought to the device ahead of time, so that the training thread only adds or copies device memory. Where the
learner's own copies live on the GPU as well (`torch_arithmetic`), the staging buffer is the snapshot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn

from atoll.core import Layout, SyncConfig, TensorSlice, TensorSpec
from atoll.errors import ConfigError, LayoutError
from atoll.learner.arithmetic import Arithmetic, HostArithmetic
from atoll.learner.merge_rule import merge_mode
from atoll.learner.names import named_parameters, plain_name
from atoll.learner.parameters import F32, MakeValues, Snapshot
from atoll.learner.torch_arithmetic import TorchArithmetic, fits

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
        by_rule = "mean" if id(parameter) in embeddings else merge_mode(name)
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


class DeviceSnapshot:
    """The same, where the parameters are."""

    def __init__(self, tensor: torch.Tensor, ready: torch.cuda.Event | None, arithmetic: TorchArithmetic) -> None:
        self._tensor = tensor
        self._ready = ready
        self._arithmetic = arithmetic

    def values(self) -> Any:
        """The copy, for what the arithmetic does next. Nobody waits."""
        return self._arithmetic.ordered(self._tensor, self._ready)


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

    def __init__(
        self, model: nn.Module, merge_modes: Mapping[str, str] | None = None, *, on_device: bool | None = False
    ) -> None:
        """`on_device`: the learner's own copies live where the parameters are; None: if they fit there."""
        self.specs = describe(model, merge_modes or {})
        self._model = model
        self._on_device = on_device
        self._arithmetic: TorchArithmetic | None = None
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def lay_out(self, layout: Layout) -> None:
        self.layout = layout
        self._parameters = self._named()
        self.device = self._parameters[0].device  # only now: the model may have been moved since it was described
        self._cuda = self.device.type == "cuda"
        self._outward = _stream(self.device) if self._cuda else None
        self._inward = _stream(self.device) if self._cuda else None

    def _named(self) -> list[torch.Tensor]:
        """The parameters in the order of `specs`."""
        named: dict[str, torch.Tensor] = dict(named_parameters(self._model))
        return [named[spec.name] for spec in self.specs]

    def _tensor(self, index: int) -> torch.Tensor:
        """What this process has of a parameter."""
        return self._parameters[index].detach()

    def arithmetic(self, config: SyncConfig) -> Arithmetic[Any]:
        """Where the learner's own copies of these parameters live. Called once, after `lay_out`."""
        count = sum(fragment.size for fragment in self.layout.fragments)
        if self._on_device or (self._on_device is None and fits(config, self.device, count)):
            self._arithmetic = TorchArithmetic(
                self.device, [self._rounded(f) for f in range(len(self.layout.fragments))]
            )
            return self._arithmetic
        return HostArithmetic(self.as_kept)

    # ------------------------------------------------------------ to the host

    @torch.no_grad()
    def read(self, fragment: int) -> TorchSnapshot | DeviceSnapshot:
        if self._outward is None and self._arithmetic is None:
            host = self._buffer(fragment)
            self._gather(fragment, host)
            return TorchSnapshot(fragment, host, None)
        staging = torch.empty(self.layout.fragments[fragment].size, dtype=torch.float32, device=self.device)
        self._gather(fragment, staging, clear=True)
        if self._arithmetic is not None:
            ready = None
            if self._cuda:
                ready = _event()
                ready.record(torch.cuda.current_stream(self.device))
            return DeviceSnapshot(staging, ready, self._arithmetic)
        assert self._outward is not None
        host = self._buffer(fragment)
        self._outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outward):
            host.copy_(staging, non_blocking=True)
            ready = _event()
            ready.record(self._outward)
        staging.record_stream(self._outward)
        return TorchSnapshot(fragment, host, ready)

    def release(self, snapshot: Snapshot) -> None:
        """A transfer still under way is ordered before the next one on the outward stream."""
        if isinstance(snapshot, TorchSnapshot) and len(self._free[snapshot.fragment]) < BUFFERS_KEPT:
            self._free[snapshot.fragment].append(snapshot.host)

    def _buffer(self, fragment: int) -> torch.Tensor:
        """A host buffer (pinned when the model is on a GPU) for this fragment. It is zero where the fragment has
        padding, and stays so because it is never used for another fragment."""
        if self._free[fragment]:
            return self._free[fragment].pop()
        size = self.layout.fragments[fragment].size
        return torch.zeros(size, dtype=torch.float32, device="cpu", pin_memory=self._cuda)

    def _gather(self, fragment: int, flat: torch.Tensor, *, clear: bool = False) -> None:
        """flat[...] = parameters, as fp32, on flat's device; `clear`: and 0 between them. In one call, because on a GPU
        a call takes longer than a copy."""
        pieces = self.layout.fragments[fragment].slices
        sources = [self._tensor(piece.tensor).reshape(-1)[piece.start : piece.stop] for piece in pieces]
        if not pieces:
            return  # a rank may hold nothing of a fragment
        places, paddings = _pieces(flat, pieces)
        torch._foreach_copy_(places, sources, non_blocking=True)
        if clear and paddings:
            torch._foreach_zero_(paddings)

    # ------------------------------------------------------------ from the host

    def stage(self, fragment: int, make: MakeValues) -> TorchStaged:
        """On a GPU, on a stream of their own, from pinned memory that `make` fills."""
        if self._arithmetic is not None:
            with self._arithmetic.beside():
                kept: Any = make(None)
                return TorchStaged(kept, self._arithmetic.done())
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
        pieces = self.layout.fragments[fragment].slices
        if not pieces:
            return
        parameters = [self._tensor(piece.tensor) for piece in pieces]
        if all(p.dtype is torch.float32 and p.is_contiguous() for p in parameters):
            flats = [p.view(-1)[piece.start : piece.stop] for p, piece in zip(parameters, pieces, strict=True)]
            with torch.no_grad():
                torch._foreach_add_(flats, _pieces(staged.tensor(), pieces)[0])
            return

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
            parameter = self._tensor(piece.tensor)
            value = values[piece.offset : piece.offset + piece.size]
            if parameter.is_contiguous():
                change(parameter.view(-1)[piece.start : piece.stop], value)
            else:  # channels-last and the like: go through a contiguous copy
                dense = parameter.contiguous().view(-1)
                change(dense[piece.start : piece.stop], value)
                parameter.copy_(dense.view(parameter.shape))

    # ------------------------------------------------------------ as they are

    def as_kept(self, fragment: int, theta: F32) -> F32:
        return self.rounded(theta, self.layout.fragments[fragment].slices)

    def rounded(self, theta: F32, pieces: Sequence[TensorSlice]) -> F32:
        """`as_kept` of an array in which these pieces lie."""
        rounded = self._typed(pieces)
        if not rounded:
            return theta
        kept = theta.copy()
        for offset, size, dtype in rounded:
            view = torch.from_numpy(kept[offset : offset + size])
            view.copy_(view.to(dtype).to(torch.float32))
        return kept

    def _rounded(self, fragment: int) -> list[tuple[int, int, torch.dtype]]:
        """The parts of a fragment that are kept as something else than fp32: offset, size, type."""
        return self._typed(self.layout.fragments[fragment].slices)

    def _typed(self, pieces: Sequence[TensorSlice]) -> list[tuple[int, int, torch.dtype]]:
        typed = [(piece.offset, piece.size, self._parameters[piece.tensor].dtype) for piece in pieces]
        return [item for item in typed if item[2] is not torch.float32]

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
        self._fill([tensor.view(-1) for tensor in tensors.values()], thetas)
        return tensors

    def _fill(self, flats: Sequence[torch.Tensor], thetas: Sequence[F32]) -> None:
        for fragment, theta in zip(self.layout.fragments, thetas, strict=True):
            for piece in fragment.slices:
                values = torch.from_numpy(theta[piece.offset : piece.offset + piece.size])
                flats[piece.tensor][piece.start : piece.stop] = values


def _pieces(flat: torch.Tensor, pieces: Sequence[TensorSlice]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The slices of a fragment in a flat array, and the padding between them."""
    if not pieces:
        return [], []
    ends = [piece.offset + piece.size for piece in pieces]
    gaps = [after.offset - end for end, after in zip(ends, pieces[1:], strict=False)]
    paddings = (*gaps, flat.numel() - ends[-1])
    sizes = chain.from_iterable(zip((piece.size for piece in pieces), paddings, strict=True))
    cut = torch.split(flat, list(sizes))
    return list(cut[::2]), [padding for padding in cut[1::2] if padding.numel()]


def _stream(device: torch.device) -> torch.cuda.Stream:
    # Of high priority: torch gives streams out in turn from a pool per priority, so these never are a training stream.
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return stream


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event
