"""Where a model's tensors live: the seam between a learner's machine room and a framework.

The machine room (shell, arrays, vault) works on flat fp32 arrays in host memory, one per fragment. `Parameters` says
how these come out of a model and go back into it. Plain torch modules are `TorchParameters`; whoever brings another
framework writes a class with these methods and gives it to `ParametersLearner`.

    training thread   read, write, add, mix, save, restore: at a step boundary, and never waiting for a device
    any thread        stage, as_kept, release, and `values` of what was read

There is no framework in this file, nor in those that use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.core import Layout, TensorSpec

F32 = NDArray[np.float32]
MakeValues: TypeAlias = Callable[[F32 | None], F32]
"""Puts values into the memory that it is given and returns it; given None, it returns them in memory of its own."""
StagedT = TypeVar("StagedT")
"""Values of one fragment where the parameters live, in the implementation's own form."""


class Snapshot(Protocol):
    """A copy of one fragment's parameters, as they were at a step boundary."""

    def values(self) -> F32:
        """The copy, once it is complete: flat, zero where the fragment is padded. May block for a transfer, so only
        background threads ask. It does not change until it is released."""


class Parameters(Protocol[StagedT]):
    """The trainable tensors of a model, by fragment of a layout."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Name, shape, type and merge mode of each tensor: the same in every learner of a run, whatever its
        framework."""

    def lay_out(self, layout: Layout) -> None:
        """Called once, when the run's layout of `specs` is known, before anything below."""

    def read(self, fragment: int) -> Snapshot:
        """Copy a fragment as it is now. The copy may arrive on the host later; training goes on meanwhile."""

    def release(self, snapshot: Snapshot) -> None:
        """Nobody needs this snapshot any more: its memory may serve another one of the same fragment."""

    def stage(self, fragment: int, make: MakeValues) -> StagedT:
        """Bring values to where the parameters live, ahead of their use. RuntimeError where there is no memory for them
        just now: then they are staged again when they are needed."""

    def write(self, fragment: int, staged: StagedT) -> None:
        """parameters = staged."""

    def add(self, fragment: int, staged: StagedT) -> None:
        """parameters = parameters + staged, in fp32, rounded once to what the parameters are kept in."""

    def mix(self, fragment: int, staged: StagedT, alpha: float) -> None:
        """parameters = alpha * parameters + (1 - alpha) * staged."""

    def as_kept(self, fragment: int, theta: F32) -> F32:
        """fp32 values as these parameters can hold them, in fp32 (bf16 parameters: rounded to bf16): `theta` itself
        where that changes nothing. `theta` is never changed."""

    def save(self) -> Any:
        """A copy of all parameters, for `restore` alone."""

    def restore(self, saved: Any) -> None:
        """Put back what `save` gave, to the bit."""


def into(values: F32, out: F32 | None) -> F32:
    """`values` as a MakeValues gives them."""
    if out is None:
        return values
    out[:] = values
    return out


def adopt(parameters: Parameters[StagedT], fragment: int, staged: StagedT, *, rule: str, alpha: float) -> None:
    """Training thread: bring a fragment to an adopted version, by the rule of its Adopt effect."""
    if rule == "rebase":
        parameters.add(fragment, staged)
    elif rule == "mix":
        parameters.mix(fragment, staged, alpha)
    else:
        parameters.write(fragment, staged)
