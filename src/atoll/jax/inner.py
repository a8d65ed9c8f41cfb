"""The optimizer state of a JAX learner over deaths: its own checkpoint, or a peer's. How it is kept: `checkpoints`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from atoll.core import LearnerMachine
from atoll.errors import ConfigError, PayloadError
from atoll.jax.checkpoints import FILE, PackedPart, PartSet, find_sets, pack, parts_in, rows_of, unpack, write
from atoll.jax.parameters import Tree
from atoll.jax.spread import part_here
from atoll.learner import WARMUP_STEPS, RunView, Stateful, folder_name
from atoll.observe import Writer, events

CLOSE_S = 15.0
"""How long the last checkpoint may take when a learner leaves."""


class JaxInner:
    """`atoll.learner`'s InnerState for a pytree. `state` is what the training loop has now; None: there is none."""

    def __init__(
        self,
        state: Tree | None,
        folder: Path | None,
        every_s: float,
        machine: LearnerMachine | RunView,
        news: Writer,
        part: str = "",
        mesh: Mesh | None = None,
    ) -> None:
        """`part`: of a learner of several processes, the name of this one's; `mesh` is theirs."""
        self._mesh = mesh
        self.state = state
        self.shared = state is not None and not part
        self.given = state is not None
        self.trained_before = False
        self.detail = ""
        self.warmup_left = 0
        self._machine, self._news = machine, news
        self._every_s = every_s if folder is not None else 0.0
        self._home = folder / "learners" / folder_name(machine.learner) if folder is not None else None
        self._path = self._home / part / FILE if self._home is not None else None
        self._extras: dict[str, Stateful] = {}
        self._extras_found: dict[str, Any] = {}
        self._next_s = float("inf")
        self._writing: threading.Thread | None = None

    # ------------------------------------------------------------ starting

    def look(self) -> bool:
        found = any(self._home.glob(f"**/{FILE}")) if self._home is not None and self._every_s > 0 else False
        return not found and self.shared

    def sets(self) -> list[PartSet]:
        """What all processes of this learner have left together, newest first. After joining."""
        return find_sets(self._home, self._machine.run) if self._home is not None and self._every_s > 0 else []

    def own(self) -> dict[tuple[int, int], PackedPart]:
        """What this process has left, as one of so many, by generation and step."""
        return parts_in(self._path.parent, self._machine.run) if self._path is not None and self._every_s > 0 else {}

    def restore_own(self) -> bool:
        sets = self.sets()
        if not sets and self._path is not None and self._path.exists():
            self.detail = "the checkpoint here is of another run, or cannot be read"
        return any(self.restore(one.parts) for one in sets)

    def restore(self, parts: Sequence[PackedPart]) -> bool:
        """Continue from what these processes left. What differs between them (a loader's place) is taken where each
        has its own again."""
        try:
            if self.state is not None:
                self.state = unpack(parts, self.state, self._mesh)
        except PayloadError as error:
            self.detail = f"the checkpoint in {self._home} does not fit: {error}"
            self._warn(self.detail)
            return False
        about = parts[0].about
        told = [dict(part.about.get("extras") or {}) for part in parts]
        self._extras_found = {n: v for n, v in told[0].items() if all(one.get(n) == v for one in told)}
        self.trained_before = bool(about.get("tokens"))
        self.detail = f"of step {about.get('step')}" + (f", of {len(parts)} processes" if len(parts) > 1 else "")
        return True

    def forget(self, state: Tree | None) -> None:
        """What was found is not used after all."""
        self.state, self._extras_found = state, {}
        self.trained_before, self.detail = False, ""

    def take_peer(self, blob: bytes, peer: str) -> bool:
        try:
            self.state = unpack([PackedPart.of_bytes(blob)], self.state)
        except PayloadError as error:
            self.detail = f"the inner state of {peer} does not fit: {error}"
            return False
        self.detail = f"of learner {peer}"
        return True

    def warm_up(self) -> None:
        self.warmup_left = WARMUP_STEPS

    def begin(self) -> None:
        if self._every_s > 0:
            self._next_s = time.monotonic() + self._every_s

    def keep(self, name: str, extra: Stateful) -> None:
        if name in self._extras and self._extras[name] is not extra:
            raise ConfigError(f"two things are to be kept as {name!r}; give each its own name")
        self._extras[name] = extra
        if name in self._extras_found:
            extra.load_state_dict(self._extras_found.pop(name))

    # ------------------------------------------------------------ while training

    def stepped(self, now: bool | None = None) -> int:
        self.warmup_left = max(0, self.warmup_left - 1)
        if not (self.due if now is None else now):
            return 0
        if self._writing is not None:
            self._writing.join(CLOSE_S)  # where several processes keep one step, one of them may be behind
        self._next_s = time.monotonic() + self._every_s
        return self._checkpoint()

    @property
    def due(self) -> bool:
        """It is time for a checkpoint, and the one before is written."""
        return time.monotonic() >= self._next_s and (self._writing is None or not self._writing.is_alive())

    def _checkpoint(self) -> int:
        began_ns = time.perf_counter_ns()
        copy, about = (
            self._copy(),
            {
                **self._about(),
                "leaves": rows_of(self.state),
                "extras": {n: e.state_dict() for n, e in self._extras.items()},
            },
        )
        took_ns = time.perf_counter_ns() - began_ns
        self._writing = threading.Thread(target=self._write, args=(copy, about, took_ns), daemon=True)
        self._writing.start()
        return took_ns

    def _copy(self) -> Tree:
        """On the device, at this step: the next one may be given this state's memory."""
        return jax.tree_util.tree_map(lambda leaf: jnp.copy(part_here(leaf)), self.state)

    def _about(self) -> dict[str, Any]:
        machine = self._machine
        about = {"run": machine.run, "learner": machine.learner, "generation": machine.generation}
        return {**about, "step": machine.step, "tokens": machine.tokens}

    def _write(self, state: Tree, about: dict[str, Any], capture_ns: int) -> None:
        assert self._path is not None
        began_ns = time.perf_counter_ns()
        try:
            blob = pack(state, about)
            write(self._path, blob)
        except (OSError, TypeError, ValueError) as error:  # training goes on; a state dict may hold what JSON does not
            self._warn(f"no checkpoint of this learner's inner state: {error}")
            return
        took_ns = time.perf_counter_ns() - began_ns
        self._news.emit(
            events.CheckpointWritten(str(about["learner"]), int(about["step"]), len(blob), capture_ns, took_ns)
        )

    def give(self) -> Callable[[], NDArray[np.uint8]]:
        state, about = self._copy(), self._about()
        return lambda: np.frombuffer(pack(state, about), np.uint8)

    def heal(self) -> None:
        """What is not finite starts anew, at zero."""

        def healed(leaf: Any) -> Any:
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                return leaf
            return jnp.where(jnp.isfinite(leaf), leaf, jnp.zeros_like(leaf))

        self.state = jax.tree_util.tree_map(healed, self.state)

    def close(self, last: bool) -> Path | None:
        if self._writing is not None:
            self._writing.join(CLOSE_S)
        if last and self._every_s > 0:
            self._checkpoint()
            assert self._writing is not None
            self._writing.join(CLOSE_S)
        return self._path.parent if self._path is not None and self._path.exists() else None

    def _warn(self, text: str) -> None:
        self._news.emit(events.Warned(self._machine.learner, text))
