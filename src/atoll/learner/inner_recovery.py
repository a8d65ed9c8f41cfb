"""A learner's inner state over deaths: its own checkpoint, a peer's state, or none and a short warm-up.

The rungs, best first; which one was used is an event and is in the report:

    checkpoint   RUN/learners/<id>/ holds this learner's optimizer state, schedules, random numbers and data position
    peer         a healthy learner's optimizer state, handed on by the syncer
    parameters   published parameters alone; the learning rate is ramped up over a few steps
    fresh        the run itself is new

The checkpoint is tied to the base versions it was taken at. Parameters are never taken from it: published ones are
newer, and what was trained since and not merged is what a death costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.core import LearnerMachine
from atoll.errors import AtollError, ConfigError, PayloadError
from atoll.learner.checkpoint import CheckpointFile, CheckpointWriter, WriteStats
from atoll.learner.checkpoint_sets import CheckpointSet, find_sets
from atoll.learner.checks import heal_optimizer
from atoll.learner.inner import (
    Captured,
    InnerAbout,
    Names,
    OptimizerLike,
    Places,
    capture,
    common_extras,
    keep_extras,
    load_saved,
    optimizer_only,
    pack,
    packed_optimizer,
    places_of,
    read_target,
    reshard,
    restore,
    restore_optimizer_only,
    target_bytes,
    target_of,
    unbundle,
)
from atoll.learner.inner_state import BUFFERS, WARMUP_STEPS, Stateful
from atoll.learner.view import RunView
from atoll.learner.warmup import InnerWarmup
from atoll.observe import Writer, events

CAPTURE_SHARE_MAX = 0.005
"""Checkpoints become rarer where copying the state would take a larger share of the training time than this."""
CLOSE_S = 15.0
"""How long the last checkpoint may take when a learner leaves."""


class InnerRecovery:
    """Owned by the Learner; everything but the writes happens on the training thread."""

    def __init__(
        self,
        optimizer: OptimizerLike | None,
        extras: Mapping[str, Stateful],
        folder: Path | None,
        every_s: float,
        machine: LearnerMachine | RunView,
        writer: Writer,
        part: str = "",
        names: Names = dict,
    ) -> None:
        """`part`: which of a learner's processes this is, where it has several; each keeps its part of the state.
        `names`: what the model calls its parameters, so that another mesh finds them again."""
        self.shared = optimizer is not None
        self._names = names
        self._placed: tuple[tuple[int, ...], Places | None] = ((), None)
        self._folder = folder
        self._optimizer = optimizer
        self._extras = dict(extras)
        self._machine = machine
        self._events = writer
        self._every_s = every_s if folder is not None else 0.0
        self._file = CheckpointFile(folder, machine.learner, part) if folder is not None and every_s > 0 else None
        self._writer: CheckpointWriter | None = None
        self._found: Captured | None = None
        self._warmup: InnerWarmup | None = None
        self._next_s = 0.0
        self._capture_ns = 0
        self.trained_before = False
        """An earlier process of this id trained, and this one continues from its checkpoint."""
        self.detail = ""
        """Why not a better rung."""

    # ------------------------------------------------------------ starting

    def look(self) -> bool:
        """Before joining: is there a checkpoint of this learner? True if there is none and a peer's would do."""
        if self._file is not None:
            self._found, problems = self._file.load()
            for problem in problems:
                self._warn(problem)
        return self._found is None and self.shared and not self._sets(None)

    @property
    def found_step(self) -> int:
        """The step of the checkpoint that was found; -1 if there is none of this run."""
        return self.found_key[1]

    @property
    def found_key(self) -> tuple[int, int]:
        """Its generation and step."""
        found = self._found
        if found is None or found.about.run != self._machine.run:
            return (-1, -1)
        return (found.about.generation, found.about.step)

    def go_back(self, step: int) -> None:
        """Other processes of this learner have an older checkpoint: take the one of that step, if there is one."""
        if self._file is not None and self.found_step != step:
            self._found, _ = self._file.load(run=self._machine.run, step=step)

    def sets(self) -> list[CheckpointSet]:
        """What all processes of this learner have left together in this run, as however many; newest first."""
        return self._sets(self._machine.run)

    def _sets(self, run: str | None) -> list[CheckpointSet]:
        if self._file is None or self._folder is None:
            return []
        return find_sets(self._folder, self._machine.learner, run)

    def forget(self) -> None:
        """Not all processes of this learner can continue from a checkpoint, so none does."""
        self._found = None

    def restore_own(self) -> bool:
        """After joining: put the own checkpoint back, if it is of this run; or what this learner left when it had
        several processes."""
        sets = self.sets()
        while sets and sets[0].key[:2] > self.found_key:
            if self.restore_set(sets.pop(0)):
                return True
        if self.restore_found():
            return True
        return any(one.size > 1 and self.restore_set(one) for one in sets)

    def restore_set(self, one: CheckpointSet, *, checked: bool = False) -> bool:
        """Cut this process's state anew from what another number of ranks, or another mesh, has left. The learner's
        random numbers stay as they are: other processes drew from them."""
        try:
            problem = "" if checked else one.damaged(range(one.size))
            if problem:
                raise PayloadError(problem)
            opened = one.open()
            if self._optimizer is not None:
                load_saved(reshard(opened, target_of(self._optimizer, self._names)), self._optimizer)
            extras, differ = common_extras(opened, merged=BUFFERS)
            kept = keep_extras(extras, opened[0].about)
        except (AtollError, OSError, ValueError) as error:
            self.detail = f"the checkpoint of step {one.step}, which {one.size} ranks wrote, does not fit: {error}"
            self._warn(self.detail)
            return False
        self._say_lost([*restore(kept, None, self._extras, rng=False), *(f"{n}: the ranks had others" for n in differ)])
        self._found = kept
        self.trained_before = kept.about.tokens > 0
        self.detail = f"of step {one.step}, generation {one.generation}, which {one.size} ranks wrote"
        return True

    def _say_lost(self, lost: list[str]) -> None:
        for text in lost:
            if not text.endswith("no such extra was given"):  # it may be kept later
                self._warn(f"not restored from the checkpoint: {text}")

    def restore_found(self) -> bool:
        """Put the checkpoint that this very process left back, if it is of this run."""
        found, machine = self._found, self._machine
        if found is None:
            return False
        if found.about.run != machine.run:
            self.detail = "the checkpoint here is of another run"
            self._found = None
            return False
        try:
            lost = restore(found, self._optimizer, self._extras, rng=True)
        except PayloadError as error:
            self._warn(f"the checkpoint of step {found.about.step} does not fit: {error}")
            self._found = None
            return False
        self._say_lost(lost)
        self._found = _extras_of(found)
        self.trained_before = found.about.tokens > 0
        self.detail = f"of step {found.about.step}, generation {found.about.generation}"
        return True

    def capture_or_none(self) -> Captured | None:
        """What there is before anything is restored; None where that cannot be kept."""
        try:
            return self.capture()
        except ConfigError:
            return None

    def undo(self, before: Captured) -> None:
        """Another process of this learner could not restore its part: be as before `restore_own`."""
        restore(before, self._optimizer, self._extras, rng=True)
        self.trained_before = False

    def wanted(self) -> bytes:
        """What a rank that cuts a peer's state must know of this one."""
        if self._optimizer is None:
            raise PayloadError("there is no optimizer here")
        return target_bytes(target_of(self._optimizer, self._names))

    def cut_for(self, blob: bytes, wanted: bytes) -> NDArray[np.uint8]:
        """A peer's state as the process that wants this can take it."""
        parts = unbundle(blob)
        return packed_optimizer(reshard(parts, read_target(wanted)), parts[0].about)

    def take_peer(self, blob: bytes | NDArray[np.uint8], peer: str) -> bool:
        """Put a peer's optimizer state into this learner's optimizer."""
        assert self._optimizer is not None
        try:
            parts = unbundle(blob)
            received = parts[0]
            if len(parts) > 1:
                saved = reshard(parts, target_of(self._optimizer, self._names))
                received = optimizer_only(saved, received.about)
            restore_optimizer_only(received, self._optimizer)
        except PayloadError as error:
            self.detail = f"the inner state of {peer} does not fit: {error}"
            return False
        self.detail = f"of learner {peer} at its step {received.about.step}"
        return True

    def warm_up(self) -> None:
        """No inner state to be had: ramp the learning rate up."""
        if self._optimizer is not None:
            self._warmup = InnerWarmup(self._optimizer, WARMUP_STEPS)

    def begin(self) -> None:
        """The learner is in: keep checkpoints from here on."""
        if self._file is not None:
            self._writer = CheckpointWriter(self._file, self._warn, written=self._written)
            self._next_s = time.monotonic() + self._every_s

    def keep(self, name: str, extra: Stateful) -> None:
        """Add something to the checkpoint; what the checkpoint at the start held of it is put back now."""
        if name in self._extras and self._extras[name] is not extra:
            raise ConfigError(f"two things are to be kept as {name!r}; give each its own name")
        self._extras[name] = extra
        if self._found is not None and name in self._found.structure["extras"]:
            lost = restore(self._found, None, {name: extra}, rng=False)
            for text in lost:
                if text.startswith(f"{name}:"):
                    self._warn(f"not restored from the checkpoint: {text}")

    # ------------------------------------------------------------ while training

    @property
    def due(self) -> bool:
        """It is time for a checkpoint."""
        return self._writer is not None and time.monotonic() >= self._next_s and not self._writer.busy

    def stepped(self, now: bool | None = None) -> int:
        """At a step boundary: take a checkpoint if it is time; returns the nanoseconds that took. `now`: processes of
        one learner take theirs at the same boundary, whatever their clocks say."""
        if self._writer is None or not (self.due if now is None else now):
            return 0
        return self._take(self._writer)

    def _take(self, writer: CheckpointWriter) -> int:
        began_ns = time.perf_counter_ns()
        try:
            writer.offer(self.capture(writer.spare()))
        except ConfigError as error:  # something that cannot be written without pickle: say it once and stop trying
            self._warn(f"no checkpoints of this learner's inner state: {error}")
            self._writer = None
        self._capture_ns = time.perf_counter_ns() - began_ns
        pause_s = max(self._every_s, self._capture_ns / 1e9 / CAPTURE_SHARE_MAX)
        self._next_s = time.monotonic() + pause_s
        return self._capture_ns

    def capture(self, reuse: Captured | None = None) -> Captured:
        """A copy of the inner state as it is now."""
        return capture(self._optimizer, self._extras, self._about(), reuse=reuse, places=self._places())

    def give(self) -> Callable[[], NDArray[np.uint8]]:
        """What a joiner needs of it: the optimizer's state alone. It is copied now; calling the result packs it."""
        return partial(pack, capture(self._optimizer, {}, self._about(), rng=False, places=self._places()))

    def _about(self) -> InnerAbout:
        machine = self._machine
        return InnerAbout(machine.learner, machine.run, machine.generation, machine.step, machine.bases, machine.tokens)

    def _places(self) -> Places | None:
        """Found once for the same parameters: meshes do not change."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        ids = tuple(id(parameter) for group in groups for parameter in group["params"])
        if self._placed[0] != ids:
            self._placed = (ids, places_of(self._optimizer, self._names))
        return self._placed[1]

    def heal(self) -> None:
        """Optimizer state that is not finite starts anew; the rest is kept."""
        heal_optimizer(self._optimizer)

    # ------------------------------------------------------------ leaving

    def close(self, last: bool) -> Path | None:
        """Write a last checkpoint, if the run goes on without this process, and end. Returns where checkpoints are."""
        if self._warmup is not None:
            self._warmup.remove()
        if self._writer is not None:
            if last:
                self._take(self._writer)
            if self._writer is not None and not self._writer.close(CLOSE_S):
                self._warn(f"the last checkpoint was not written within {CLOSE_S:g} s")
        return self._file.folder if self._file is not None and self._file.folder.exists() else None

    def _written(self, about: InnerAbout, stats: WriteStats) -> None:
        took = (self._capture_ns, stats.write_ns)
        self._events.emit(events.CheckpointWritten(about.learner, about.step, stats.bytes, *took))

    def _warn(self, text: str) -> None:
        self._events.emit(events.Warned(self._machine.learner, text))


def _extras_of(captured: Captured) -> Captured:
    """The part of a checkpoint that may still be asked for, without the optimizer's memory."""
    structure = {**captured.structure, "optimizer": None, "rng": None}
    tensors = {name: tensor for name, tensor in captured.tensors.items() if name.startswith("extras.")}
    return Captured(tensors, structure, captured.about)
