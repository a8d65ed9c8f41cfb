"""Time in the training loop: where it went (StepMeter), how long a step takes at least, and the fault that makes a
learner slow (SlowDown)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import SupportsFloat

from atoll.observe import LearnerSteps

EMIT_EVERY_NS = 250_000_000
"""At most four events a second: enough for a live view, nothing for the disk."""
SLOW_CHECK_S = 0.2
"""How often the control file is looked for."""
SLOW_FACTOR_MAX = 1000.0
SLOW_SLEEP_S_MAX = 60.0


class StepReporter:
    """Adds up steps and says them as LearnerSteps, at most four times a second.

    The `_ns` fields add up to the time since the last event: `stall` and `overhead` as told, the rest is compute. The
    loss may be a tensor on the device: it is read only when an event is due, so that a GPU is not waited for each step.
    """

    def __init__(self, learner: str, emit: Callable[[LearnerSteps], None]) -> None:
        self.step_count = 0
        self.tokens_total = 0
        self._learner = learner
        self._emit = emit
        self._losses: list[SupportsFloat] = []
        self._tokens = self._stall_ns = self._overhead_ns = 0
        self._since_ns = time.monotonic_ns()

    def step(self, *, tokens: int, loss: SupportsFloat, stall_ns: int = 0) -> None:
        """One optimizer step is done. `stall_ns` of the time since the last one was spent waiting for others."""
        self.step_count += 1
        self.tokens_total += tokens
        self._tokens += tokens
        self._stall_ns += stall_ns
        self._losses.append(loss)
        if time.monotonic_ns() - self._since_ns >= EMIT_EVERY_NS:
            self.flush()

    def overhead(self, elapsed_ns: int) -> None:
        """Time that was neither training nor waiting, such as an evaluation."""
        self._overhead_ns += elapsed_ns

    def flush(self) -> None:
        """Say what has not been said yet."""
        if not self._losses:
            return
        loss = sum(float(x) for x in self._losses) / len(self._losses)
        now_ns = time.monotonic_ns()
        self._emit(
            LearnerSteps(
                learner=self._learner,
                generation=1,
                step=self.step_count,
                steps=len(self._losses),
                tokens=self._tokens,
                tokens_total=self.tokens_total,
                loss=loss,
                compute_ns=max(0, now_ns - self._since_ns - self._stall_ns - self._overhead_ns),
                stall_ns=self._stall_ns,
                adopt_ns=0,
                snapshot_ns=0,
                overhead_ns=self._overhead_ns,
                fragments_behind=0,
            )
        )
        self._losses.clear()
        self._tokens = self._stall_ns = self._overhead_ns = 0
        self._since_ns = now_ns


class SlowDown:
    """Makes a learner slow while a control file exists: {"factor": 4} makes every step take four times as long.

    It sleeps, rather than compute more, so that the other learners on the same cores keep their speed. Without a path,
    or without the file, it does nothing; a file that cannot be read counts as absent.

    `step_s_min` is the least that a step takes, fault or not. Learners that share cores would otherwise be faster while
    one of them is down, and a comparison of runs would not show what the loss of one costs.
    """

    def __init__(self, path: str | Path | None, *, step_s_min: float = 0.0) -> None:
        self._path = Path(path) if path else None
        self._step_s_min = step_s_min
        self._factor = 1.0
        self._look_at = 0.0

    def after_step(self, compute_s: float) -> float:
        """Sleep until the step has taken its time: what it really took, or the least, times the factor. Gives the
        seconds slept."""
        now = time.monotonic()
        if self._path is not None and now >= self._look_at:
            self._look_at = now + SLOW_CHECK_S
            self._factor = self._read(self._path)
        wanted_s = self._factor * max(compute_s, self._step_s_min)
        pause_s = min(wanted_s - compute_s, SLOW_SLEEP_S_MAX)
        if pause_s > 0:
            time.sleep(pause_s)
        return max(pause_s, 0.0)

    @staticmethod
    def _read(path: Path) -> float:
        try:
            factor = float(json.loads(path.read_text())["factor"])
        except (OSError, ValueError, KeyError, TypeError):
            return 1.0
        return min(factor, SLOW_FACTOR_MAX) if factor > 1.0 else 1.0  # not a number counts as 1
