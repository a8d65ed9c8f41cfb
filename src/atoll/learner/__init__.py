"""The learner: Atoll inside a training loop, in three lines.

`Learner` is for PyTorch. `ParametersLearner` takes any model that comes as `Parameters`, and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.learner.island import RankCoordinator
    from atoll.learner.learner import ParametersLearner
    from atoll.learner.load import load_model
    from atoll.learner.parameters import Parameters
    from atoll.learner.torch_learner import Learner

__all__ = ["EXIT_NOT_HANDED_OVER", "Learner", "Parameters", "ParametersLearner", "RankCoordinator", "load_model"]

EXIT_NOT_HANDED_OVER = 4
"""Exit status of a learner that was told to leave (SIGTERM) and could not hand over its last progress in time."""
_HOMES = {
    "RankCoordinator": "island",
    "Learner": "torch_learner",
    "Parameters": "parameters",
    "ParametersLearner": "learner",
    "load_model": "load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
