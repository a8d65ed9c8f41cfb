"""The learner: Atoll inside a PyTorch training loop, in three lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.learner.learner import Learner

__all__ = ["Learner"]


def __getattr__(name: str) -> Any:
    if name == "Learner":
        from atoll.learner.learner import Learner

        return Learner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
