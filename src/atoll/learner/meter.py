"""Where a learner's time and tokens go, told as LearnerSteps events."""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from typing import SupportsIndex

from atoll.core import LearnerMachine
from atoll.errors import ConfigError
from atoll.observe import Writer, events

EVENT_EVERY_NS = 250_000_000
"""At most about four LearnerSteps a second: fine enough for a live view, small enough for days of training."""
TOKENS_PER_STEP_MAX = 2**40
"""A thousand times the largest batches; four million such steps still fit the wire's counters (2**62)."""

PACE_STEPS = 8
"""Steps whose mean is the pace: a period, by default. Every fragment is looked at once in it."""


def count_tokens(tokens: SupportsIndex) -> int:
    """The tokens of one step as a plain number; anything that cannot be one is refused before it is counted."""
    try:
        count = operator.index(tokens)
    except (TypeError, RuntimeError, ValueError):  # frameworks say what it is not in their own ways
        count = 0
    truth = isinstance(tokens, bool) or str(getattr(tokens, "dtype", "")) == "torch.bool"
    if truth or not 1 <= count <= TOKENS_PER_STEP_MAX:
        told = f"{tokens!r:.100}" if count <= TOKENS_PER_STEP_MAX else "more"
        raise ConfigError(f"step(tokens=...) needs the tokens of this step, at least 1 and at most 2**40; not {told}")
    return count


class StepMeter:
    """Adds up the parts of each step. Compute is the time between two calls of `learner.step`."""

    def __init__(self, writer: Writer, machine: LearnerMachine) -> None:
        self._writer = writer
        self._machine = machine
        self._left_ns = time.perf_counter_ns()
        self._began_ns = self._told_ns = self._left_ns
        self._lasted_ns: deque[int] = deque(maxlen=PACE_STEPS)
        self._clear()

    def _clear(self) -> None:
        self._steps = self._tokens = 0
        self._compute_ns = self._inside_ns = self._stall_ns = self._adopt_ns = self._snapshot_ns = 0
        self._losses = 0.0
        self._losses_count = 0

    def enter(self) -> int:
        """`step` was called: returns the learner's pace in nanoseconds, without what it stood still for others.

        It is a mean from call to call, and not the time outside of one. Where a device computes after the script has
        gone on (JAX), the script comes to the next call at once; some call of each period waits for the device."""
        self._entered_ns = time.perf_counter_ns()
        self._compute_ns += self._entered_ns - self._left_ns
        self._lasted_ns.append(self._entered_ns - self._began_ns)
        return sum(self._lasted_ns) // len(self._lasted_ns)

    def resume(self) -> None:
        """The time since the last step was not compute (joining, an evaluation): start counting from now."""
        self._left_ns = self._began_ns = time.perf_counter_ns()

    def leave(self, *, tokens: int, loss: float, stall_ns: int, adopt_ns: int, snapshot_ns: int) -> None:
        """`step` is about to return."""
        self._left_ns = time.perf_counter_ns()
        self._began_ns = self._entered_ns + stall_ns
        self._steps += 1
        self._tokens += tokens
        if not math.isnan(loss):
            self._losses += loss
            self._losses_count += 1
        self._inside_ns += self._left_ns - self._entered_ns
        self._stall_ns += stall_ns
        self._adopt_ns += adopt_ns
        self._snapshot_ns += snapshot_ns
        if self._left_ns - self._told_ns >= EVENT_EVERY_NS:
            self.tell()

    def tell(self) -> None:
        """Write what has been added up."""
        if self._steps == 0:
            return
        accounted = self._stall_ns + self._adopt_ns + self._snapshot_ns
        self._writer.emit(
            events.LearnerSteps(
                learner=self._machine.learner,
                generation=self._machine.generation,
                step=self._machine.step,
                steps=self._steps,
                tokens=self._tokens,
                tokens_total=self._machine.tokens,
                loss=self._losses / self._losses_count if self._losses_count else math.nan,
                compute_ns=self._compute_ns,
                stall_ns=self._stall_ns,
                adopt_ns=self._adopt_ns,
                snapshot_ns=self._snapshot_ns,
                overhead_ns=max(0, self._inside_ns - accounted),
                fragments_behind=self._machine.versions_behind,
            )
        )
        self._told_ns = time.perf_counter_ns()
        self._clear()
