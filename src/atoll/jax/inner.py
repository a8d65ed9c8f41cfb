"""The optimizer state of a JAX learner over deaths: its own checkpoint, or a peer's.

A state is a pytree, such as optax makes. It is kept as the bytes of its leaves (safetensors) with their paths, shapes
and types; what is read back must have the same. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from atoll.core import LearnerMachine
from atoll.errors import ConfigError, PayloadError
from atoll.jax.parameters import Tree, path_name
from atoll.jax.spread import cut_again, cut_of, is_spread, part_here
from atoll.learner import WARMUP_STEPS, RunView, Stateful, folder_name
from atoll.observe import Writer, events

FILE = "inner-jax.safetensors"
ABOUT = "about"
"""The entry that holds a JSON text: the run, the step, the leaves and the extras."""
CLOSE_S = 15.0
"""How long the last checkpoint may take when a learner leaves."""


def rows_of(state: Tree) -> list[list[Any]]:
    """Path, shape and type of each leaf; of one that is cut over processes also which part of it is here."""
    rows: list[list[Any]] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = path_name(path)
        row = [name, list(jnp.shape(leaf)), str(jnp.result_type(leaf))]
        cut = cut_of(name, leaf) if is_spread(leaf) else None
        rows.append([*row, {"spec": cut.spec, "ranges": cut.ranges}] if cut is not None else row)
    return rows


def pack(state: Tree, about: dict[str, Any]) -> bytes:
    """A state as bytes. Blocks for the device. `leaves` in `about` are the rows of what it is a part of."""
    arrays = [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(state)]
    text = json.dumps({"leaves": rows_of(state), **about}).encode()
    entries = {f"{i:06d}": np.frombuffer(array.tobytes(), np.uint8) for i, array in enumerate(arrays)}
    return bytes(save({**entries, ABOUT: np.frombuffer(text, np.uint8)}))


def about_of(blob: bytes) -> dict[str, Any]:
    return _parse(blob)[1]


def unpack(blob: bytes, like: Tree, mesh: Mesh | None = None) -> Tree:
    """The state, with the structure of `like`. PayloadError if it does not fit. `mesh` is of all processes: leaves that
    were cut over them are cut again as they were, which need not be how a fresh state begins."""
    entries, about = _parse(blob)
    found, structure = jax.tree_util.tree_flatten_with_path(like)
    told = about.get("leaves")
    if not isinstance(told, list) or [row[:3] for row in told] != [row[:3] for row in rows_of(like)]:
        raise PayloadError("it is of another optimizer, or of another model")
    leaves = []
    for i, ((path, leaf), row) in enumerate(zip(found, told, strict=True)):
        data = entries.get(f"{i:06d}")
        dtype = np.dtype(jnp.result_type(leaf))
        if (len(row) > 3 or is_spread(leaf)) and (mesh is None or len(row) != 4):
            raise PayloadError("it is of another mesh of processes")
        cut = cut_again(path_name(path), jnp.shape(leaf), mesh, row[3]) if mesh is not None and len(row) > 3 else None
        shape = cut.shape if cut is not None else jnp.shape(leaf)
        if data is None or data.nbytes != dtype.itemsize * int(np.prod(shape)):
            raise PayloadError(f"its leaf {i} has a wrong size")
        values = np.frombuffer(data.tobytes(), dtype).reshape(shape)
        if cut is not None:
            leaves.append(cut.whole(jax.device_put(values, cut.sharding)))
        else:
            leaves.append(jax.device_put(values, leaf.sharding) if isinstance(leaf, jax.Array) else values)
    return jax.tree_util.tree_unflatten(structure, leaves)


def _parse(blob: bytes) -> tuple[dict[str, NDArray[np.uint8]], dict[str, Any]]:
    try:
        entries = load(blob)
        about = json.loads(entries.pop(ABOUT).tobytes())
    except (SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise PayloadError(f"it cannot be read: {error}") from None
    if not isinstance(about, dict):
        raise PayloadError("it does not say what it is")
    return entries, about


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
        self._path = folder / "learners" / folder_name(machine.learner) / part / FILE if folder is not None else None
        self._found: bytes | None = None
        self._extras: dict[str, Stateful] = {}
        self._extras_found: dict[str, Any] = {}
        self._next_s = float("inf")
        self._writing: threading.Thread | None = None

    # ------------------------------------------------------------ starting

    def look(self) -> bool:
        if self._path is not None and self._every_s > 0:
            try:
                self._found = self._path.read_bytes()
            except OSError:
                self._found = None
        return self._found is None and self.shared

    @property
    def found_step(self) -> str:
        """Of which run and step the checkpoint is that was found; empty if there is none, or none that can be read."""
        try:
            about = about_of(self._found) if self._found is not None else {}
        except PayloadError:
            return ""
        return json.dumps([about.get("run"), about.get("step")]) if about else ""

    def restore_own(self) -> bool:
        blob, self._found = self._found, None
        if blob is None:
            return False
        try:
            about = about_of(blob)
            if about.get("run") != self._machine.run:
                self.detail = "the checkpoint here is of another run"
                return False
            if self.state is not None:
                self.state = unpack(blob, self.state, self._mesh)
        except PayloadError as error:
            self._warn(f"the checkpoint in {self._path} does not fit: {error}")
            return False
        self._extras_found = dict(about.get("extras", {}))
        self.trained_before = bool(about.get("tokens"))
        self.detail = f"of step {about.get('step')}"
        return True

    def forget(self, state: Tree | None) -> None:
        """What was found is not used after all."""
        self.state, self._found, self._extras_found = state, None, {}
        self.trained_before, self.detail = False, ""

    def take_peer(self, blob: bytes, peer: str) -> bool:
        try:
            self.state = unpack(blob, self.state)
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
        return {"run": machine.run, "learner": machine.learner, "step": machine.step, "tokens": machine.tokens}

    def _write(self, state: Tree, about: dict[str, Any], capture_ns: int) -> None:
        assert self._path is not None
        began_ns = time.perf_counter_ns()
        try:
            blob = pack(state, about)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
            with temporary.open("wb") as file:
                file.write(blob)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
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
