"""What the parts of a model are called: as in the model itself, whatever is wrapped around it.

torch.compile puts `_orig_mod` into the path of every parameter, the data-parallel wrappers put `module` there, and
activation checkpointing puts `_checkpoint_wrapped_module`. With these segments left out, a compiled learner, a wrapped
one and a plain one have the same model. A segment is left out only where the module above it really is such a wrapper:
a user's own attribute called `module` keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

WRAPPERS = {
    "_orig_mod": ("torch._dynamo.eval_frame", "OptimizedModule"),
    "_checkpoint_wrapped_module": ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"),
    "_fsdp_wrapped_module": ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
}
"""Where torch's wrappers keep what they wrap, by their class. It is looked up among what is imported: that takes
seconds, and whoever wraps has done so."""


def wraps(module: nn.Module, segment: str) -> bool:
    """True if `segment` is where a wrapper of torch's, around a model or a part of it, keeps what it wraps."""
    if segment == "module":
        return isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
    place, kind = WRAPPERS.get(segment, ("", ""))
    imported = sys.modules.get(place)
    return imported is not None and isinstance(module, getattr(imported, kind))


def plain_name(model: nn.Module, name: str) -> str:
    """The name of a parameter or buffer of `model` without the segments of wrappers."""
    kept: list[str] = []
    module: nn.Module | None = model
    for segment in name.split("."):
        module = _inside(module, segment)
        if module is None or not wraps(module, segment):
            kept.append(segment)
        module = module._modules.get(segment) if module is not None else None
    return ".".join(kept)


def _inside(module: nn.Module | None, segment: str) -> nn.Module | None:
    """Activation checkpointing leaves its segment out of the names that it gives itself: go past it."""
    while module is not None and segment not in module._modules:
        hidden = [inner for name, inner in module._modules.items() if inner is not None and wraps(module, name)]
        if not hidden:
            break
        module = hidden[0]
    return module


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
