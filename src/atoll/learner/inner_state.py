"""A framework's inner state (optimizer, schedules, random numbers) as a learner sees it."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.errors import ConfigError

CHECKPOINT_EVERY_S = 60.0
"""A death costs at most this much of optimizer state and data position; parameters are merged far more often."""
WARMUP_STEPS = 20
"""Steps of the ramp after a cold start: AdamW's second moment (beta 0.95 to 0.99) has seen enough gradients then."""
BUFFERS = "atoll.buffers"
"""Under this name a model's own statistics are among the extras of a checkpoint (`buffers`)."""
BUNDLE = b"atoll.inner.rank"
"""With this the states of all ranks of a learner begin, where they travel as one."""
NAME_CHARS_MAX = 100
"""Of a learner's id in the folder's name, as in the names of event files."""


def bundle_head(sizes: Sequence[int]) -> bytes:
    """What stands in front of the states of several ranks, of these sizes (`inner.bundle`)."""
    return BUNDLE + struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes)


def folder_name(learner: str) -> str:
    """Of a learner's checkpoints, in the run's `learners`."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", learner)[:NAME_CHARS_MAX]
    if name != learner or not name or name.startswith("."):
        name = f"{name.lstrip('.')}-{xxhash.xxh3_64_hexdigest(learner.encode('utf-8', 'backslashreplace'))[:8]}"
    return name


class Stateful(Protocol):
    """A schedule, a data position, a gradient scaler: anything that can say and take back its state."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class InnerState(Protocol):
    """Keeps the inner state of one learner over deaths. All of it is called on the training thread."""

    shared: bool
    """There is an optimizer state that learners can give each other."""
    trained_before: bool
    """An earlier process of this id trained, and this one continues from its checkpoint."""
    detail: str
    """Why not a better rung."""

    def look(self) -> bool:
        """Before joining: is there a checkpoint of this learner? True if there is none and a peer's would do."""

    def restore_own(self) -> bool:
        """After joining: put the own checkpoint back, if it is of this run."""

    def take_peer(self, blob: bytes, peer: str) -> bool:
        """Put a peer's optimizer state into this learner's optimizer."""

    def warm_up(self) -> None:
        """No inner state to be had: begin gently."""

    def begin(self) -> None:
        """The learner is in: keep checkpoints from here on."""

    def keep(self, name: str, extra: Stateful) -> None:
        """Add something to the checkpoint; what the checkpoint at the start held of it is put back now."""

    def stepped(self, now: bool | None = None) -> int:
        """At a step boundary: take a checkpoint if it is time (or if `now` says so); returns the nanoseconds that
        took."""

    def give(self) -> Callable[[], NDArray[np.uint8]]:
        """What a joiner needs of it: the optimizer's state alone. It is copied now; calling the result packs it."""

    def heal(self) -> None:
        """Parameters that had gone wrong were replaced by published ones: what is not finite here starts anew."""

    def close(self, last: bool) -> Path | None:
        """Write a last checkpoint, if the run goes on without this process, and end. Returns where checkpoints are."""


class NoInnerState:
    """Of a learner whose inner loop has no state, or looks after it itself."""

    shared = False
    trained_before = False
    detail = ""

    def look(self) -> bool:
        return False

    def restore_own(self) -> bool:
        return False

    def take_peer(self, blob: bytes, peer: str) -> bool:
        return False

    def warm_up(self) -> None: ...
    def begin(self) -> None: ...
    def keep(self, name: str, extra: Stateful) -> None:
        raise ConfigError(f"this learner keeps no inner state, so it cannot keep {name!r}; make it with `inner`")

    def stepped(self, now: bool | None = None) -> int:
        return 0

    def give(self) -> Callable[[], NDArray[np.uint8]]:
        return lambda: np.empty(0, np.uint8)

    def heal(self) -> None: ...
    def close(self, last: bool) -> Path | None:
        return None
