"""Atoll: train one model on many unreliable, unequal, far-apart machines.

import atoll
with atoll.Learner(model, optimizer) as learner:
    for batch in data:
        ...; optimizer.step(); learner.step(tokens=batch.numel())
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from atoll.core import SyncConfig
from atoll.errors import (
    AtollError,
    ConfigError,
    CorpusError,
    FencedError,
    LaunchError,
    LayoutError,
    LocalProtocolError,
    PayloadError,
    ProtocolError,
    RefusedError,
    RemoteProtocolError,
    StoreError,
    UnreachableError,
)

if TYPE_CHECKING:
    from atoll import data
    from atoll.learner import Learner, load_model
    from atoll.plugins import register_codec, register_merge, register_outer, register_pacing

__version__ = "0.5.0"

__all__ = [
    "AtollError",
    "ConfigError",
    "CorpusError",
    "FencedError",
    "LaunchError",
    "LayoutError",
    "Learner",
    "LocalProtocolError",
    "PayloadError",
    "ProtocolError",
    "RefusedError",
    "RemoteProtocolError",
    "StoreError",
    "SyncConfig",
    "UnreachableError",
    "__version__",
    "data",
    "load_model",
    "register_codec",
    "register_merge",
    "register_outer",
    "register_pacing",
]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Importing makes thousands of objects, and none that could go. In a process that has loaded PyTorch a search for
    cycles among all of them takes a third of the time of this import."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def __getattr__(name: str) -> Any:
    if name in ("Learner", "load_model"):  # torch is an extra: imported only by those who train
        try:
            with _uncollected():
                return getattr(import_module("atoll.learner"), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(f"atoll.{name} needs PyTorch: pip install 'atoll[torch]'") from error
    if name.startswith("register_") and name in __all__:
        return getattr(import_module("atoll.plugins"), name)
    if name == "data":
        return import_module("atoll.data")
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
