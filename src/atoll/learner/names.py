"""What the parts of a model are called: as in the model itself, whatever is wrapped around it.

torch.compile puts `_orig_mod` into the path of every parameter and the data-parallel wrappers put `module` there. With
these segments left out, a compiled learner, a wrapped one and a plain one have the same model. A segment is left out
only where the module above it really is such a wrapper: a user's own attribute called `module` keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn


def wraps(module: nn.Module, segment: str) -> bool:
    """True if `segment` is where a wrapper of torch's, around a model or a part of it, keeps what it wraps."""
    if segment == "module":
        return isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
    compiled = sys.modules.get("torch._dynamo.eval_frame")  # takes seconds to import, and whoever compiles has done so
    return segment == "_orig_mod" and compiled is not None and isinstance(module, compiled.OptimizedModule)


def plain_name(model: nn.Module, name: str) -> str:
    """The name of a parameter or buffer of `model` without the segments of wrappers."""
    kept: list[str] = []
    module: nn.Module | None = model
    for segment in name.split("."):
        if module is None or not wraps(module, segment):
            kept.append(segment)
        module = module._modules.get(segment) if module is not None else None
    return ".".join(kept)


def named_parameters(model: nn.Module, *, tied: bool = False) -> list[tuple[str, nn.Parameter]]:
    """The parameters by plain name; with `tied`, those that are shared under each of their names."""
    found = model.named_parameters(remove_duplicate=not tied)
    return [(plain_name(model, name), parameter) for name, parameter in found]


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, nn.Module]]:
    """(plain name, buffer, its module) of the buffers that belong into a state dict."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield plain_name(model, f"{path}.{name}" if path else name), buffer, module
