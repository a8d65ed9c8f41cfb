"""The learner: Atoll inside a PyTorch training loop, in three lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.learner.learner import Learner
    from atoll.learner.load import load_model

__all__ = ["EXIT_NOT_HANDED_OVER", "Learner", "load_model"]

EXIT_NOT_HANDED_OVER = 4
"""Exit status of a learner that was told to leave (SIGTERM) and could not hand over its last progress in time."""


def __getattr__(name: str) -> Any:
    if name == "Learner":
        from atoll.learner.learner import Learner

        return Learner
    if name == "load_model":
        from atoll.learner.load import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
