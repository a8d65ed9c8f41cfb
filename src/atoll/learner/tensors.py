"""The model's parameters as fragments: which tensors are synced, and copies between them and flat fp32 arrays.

What is synced: every floating-point parameter that requires gradients, tied ones once. Frozen parameters never change,
so they are not sent: start all learners from the same ones. Buffers (such as BatchNorm's running statistics) stay
local: an outer step with momentum could make a running variance negative, and every learner tracks its own well.

Embedding-like tensors (token and position embeddings, the output head) merge by plain mean: most of their rows are
untouched in most steps, and a direction averaged over such rows means little (the paper's tables 8 and 9).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from atoll.core.layout import Layout
from atoll.core.messages import TensorSpec
from atoll.errors import ConfigError, LayoutError
from atoll.learner.names import named_parameters, plain_name

EMBEDDING_LIKE = re.compile(
    r"(^|[._])(embed(ding)?s?|[a-z]*_?embeddings?|wte|wpe|tok_embeddings|embed_tokens|lm_head|head|unembed|output_layer)"
    r"([._]|$)"
)
"""Names under which token embeddings, position embeddings and output heads go in the common code bases."""


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


class ParameterSet:
    """The live parameters under a layout. Used by the training thread only."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        named = dict(named_parameters(model))
        self._parameters = [named[spec.name] for spec in layout.tensors]
        self.layout = layout
        self.device = self._parameters[0].device

    def as_kept(self, fragment: int, theta: NDArray[np.float32]) -> NDArray[np.float32]:
        """Theta as these parameters can hold it, in fp32: the slices that are kept in bf16 are rounded to it."""
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

    def read(self, fragment: int, flat: torch.Tensor) -> None:
        """flat[...] = parameters, as fp32, on flat's device."""
        for source, target in self._pairs(fragment, flat):
            target.copy_(source, non_blocking=True)

    def write(self, fragment: int, flat: torch.Tensor) -> None:
        """parameters = flat."""
        self._change(fragment, flat, lambda theta, value: theta.copy_(value, non_blocking=True))

    def mix(self, fragment: int, flat: torch.Tensor, alpha: float) -> None:
        """parameters = alpha * parameters + (1 - alpha) * flat."""
        self._change(fragment, flat, lambda theta, value: theta.copy_(value.lerp(theta.to(value.dtype), alpha)))

    def add(self, fragment: int, flat: torch.Tensor) -> None:
        """parameters = parameters + flat; lower precisions are added in fp32 and rounded once."""

        def change(theta: torch.Tensor, value: torch.Tensor) -> None:
            if theta.dtype is value.dtype:
                theta.add_(value)
            else:
                theta.copy_(theta.to(value.dtype).add_(value))

        self._change(fragment, flat, change)

    @torch.no_grad()
    def _change(self, fragment: int, flat: torch.Tensor, change: object) -> None:
        values = flat.to(self.device, non_blocking=True) if flat.device != self.device else flat
        for piece in self.layout.fragments[fragment].slices:
            parameter = self._parameters[piece.tensor].detach()
            value = values[piece.offset : piece.offset + piece.size]
            if parameter.is_contiguous():
                change(parameter.view(-1)[piece.start : piece.stop], value)  # type: ignore[operator]
            else:  # channels-last and the like: go through a contiguous copy
                dense = parameter.contiguous().view(-1)
                change(dense[piece.start : piece.stop], value)  # type: ignore[operator]
                parameter.copy_(dense.view(parameter.shape))

    def _pairs(self, fragment: int, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for piece in self.layout.fragments[fragment].slices:
            source = self._parameters[piece.tensor].detach().reshape(-1)[piece.start : piece.stop]
            yield source, flat[piece.offset : piece.offset + piece.size]

    def named(self, thetas: Sequence[NDArray[np.float32]]) -> dict[str, torch.Tensor]:
        """Copies of flat arrays, one per fragment, as the tensors that these parameters are."""
        shapes = zip(self.layout.tensors, self._parameters, strict=True)
        tensors = {spec.name: torch.empty(parameter.shape, dtype=torch.float32) for spec, parameter in shapes}
        flats = [tensor.view(-1) for tensor in tensors.values()]
        for fragment, theta in zip(self.layout.fragments, thetas, strict=True):
            for piece in fragment.slices:
                values = torch.from_numpy(theta[piece.offset : piece.offset + piece.size])
                flats[piece.tensor][piece.start : piece.stop] = values
        return tensors

    def clone(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def restore(self, saved: list[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters, saved, strict=True):
            parameter.detach().copy_(value)
