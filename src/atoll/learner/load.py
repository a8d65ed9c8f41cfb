"""`atoll.load_model`: a model file that Atoll wrote, into a module, or an error that says what does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from atoll.errors import ConfigError, PayloadError
from atoll.learner.checks import refuse_sharded
from atoll.learner.names import WRAPPERS, named_buffers, named_parameters

NAMES_TOLD = 3
"""Names that an error lists: enough to see what they have in common."""


class Unmatched(NamedTuple):
    """What `load_model` left as it was."""

    missing: tuple[str, ...]
    """Parameters and buffers of the module that the file does not hold: frozen ones, and buffers, as a rule."""
    unexpected: tuple[str, ...]
    """Tensors of the file that the module does not have; none unless `strict` is off."""


def load_model(path: str | Path, module: nn.Module, *, strict: bool = True) -> Unmatched:
    """Load RUN/model.safetensors, or what `atoll export` wrote, into `module`: compiled, wrapped or plain, in whatever
    dtype and on whatever device it is. Returns what was left as it was.

    Raises ConfigError, with the module untouched, when a shape differs, when nothing in the file fits, and (unless
    `strict` is False) when a trainable parameter is not in the file or something in the file is not in the module."""
    from safetensors import SafetensorError, safe_open

    if not isinstance(module, nn.Module):
        raise ConfigError(f"load_model takes a file and then a torch.nn.Module, not a {type(module).__name__}")
    if Path(path).is_dir():
        raise ConfigError(f"{path} is a folder; give the model.safetensors in it, or what `atoll export {path}` wrote")
    refuse_sharded(module)
    places = _places(module)
    bare = {_bare(name): place for name, place in places.items()}
    try:
        with safe_open(Path(path), framework="pt") as file:
            found = {name: places.get(name, bare.get(_bare(name))) for name in file.keys()}  # noqa: SIM118 (no mapping)
            unmatched = _unmatched(module, places, found)
            _check(path, module, found, unmatched, strict)
            for name, place in found.items():
                _fits(path, name, file.get_slice(name).get_shape(), place)
            with torch.no_grad():
                for name, place in found.items():
                    if place is not None:
                        place.copy_(file.get_tensor(name).reshape(place.shape))
    except SafetensorError as error:
        raise PayloadError(
            f"{path} is no whole safetensors file ({error}); write it again with `atoll export`"
        ) from None
    return unmatched


def _places(module: nn.Module) -> dict[str, torch.Tensor]:
    """Where values can go, by plain name; tied parameters under each of their names."""
    buffers = {name: buffer for name, buffer, _ in named_buffers(module)}
    return {**buffers, **dict(named_parameters(module, tied=True))}


def _bare(name: str) -> str:
    """Older releases left segments of wrappers in the names of a model's parameters: up to 0.4 those of a compiled or
    data-parallel one, up to 0.5 those of activation checkpointing."""
    return ".".join(segment for segment in name.split(".") if segment not in ("module", *WRAPPERS))


def _unmatched(
    module: nn.Module, places: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor | None]
) -> Unmatched:
    loaded = {id(place) for place in found.values()}
    names = {id(place): name for name, place in reversed(list(places.items()))}  # a tied one under its first name
    missing = tuple(name for name, place in places.items() if id(place) not in loaded and names[id(place)] == name)
    return Unmatched(missing, tuple(name for name, place in found.items() if place is None))


def _check(
    path: str | Path, module: nn.Module, found: Mapping[str, torch.Tensor | None], unmatched: Unmatched, strict: bool
) -> None:
    remedy = "give the model that was trained"
    trainable = {name for name, parameter in named_parameters(module) if parameter.requires_grad}
    missing = [name for name in unmatched.missing if name in trainable]
    if all(place is None for place in found.values()):
        raise ConfigError(
            f"nothing in {path} fits this {type(module).__name__}: the file has {_some(found)}, the module "
            f"{_some(unmatched.missing)}; {remedy}"
        )
    if strict and missing:
        raise ConfigError(
            f"{path} lacks {_some(missing)} of this {type(module).__name__}; {remedy}, or pass strict=False to keep "
            "what they are"
        )
    if strict and unmatched.unexpected:
        raise ConfigError(
            f"{path} has {_some(unmatched.unexpected)}, which this {type(module).__name__} does not have; {remedy}, "
            "or pass strict=False to leave them out"
        )


def _fits(path: str | Path, name: str, shape: list[int], place: torch.Tensor | None) -> None:
    if place is None or list(place.shape) == shape or (not place.dim() and shape == [1]):  # scalars are kept as [1]
        return
    raise ConfigError(
        f"{name!r} is shaped {shape} in {path} and {list(place.shape)} in the module; give the model that was trained"
    )


def _some(names: Iterable[Any]) -> str:
    names = list(names)
    more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
    return (", ".join(repr(str(name)) for name in names[:NAMES_TOLD]) or "nothing") + more
