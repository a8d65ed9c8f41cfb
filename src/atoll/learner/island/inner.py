"""The inner state of a learner of several ranks: each keeps its own part, and all continue from the same step."""

from __future__ import annotations

from atoll.core import LearnerMachine
from atoll.learner.inner_recovery import InnerRecovery
from atoll.learner.island.link import SPEAKER, RankLink
from atoll.learner.view import RunView


def recover_together(link: RankLink, inner: InnerRecovery, machine: LearnerMachine | RunView) -> str:
    """After joining, on all ranks: the name of the rung. A checkpoint is of one rank of one number of ranks; where not
    every rank has one of the same step, none is used, and the learning rate is ramped up."""
    run = link.compare(machine.run)[SPEAKER]
    if isinstance(machine, RunView):
        machine.run = run
    steps = [int(text) for text in link.compare(str(inner.found_step))]
    inner.go_back(min(steps))
    steps = [int(text) for text in link.compare(str(inner.found_step))]
    if min(steps) >= 0 and min(steps) == max(steps):
        before = inner.capture_or_none()
        restored = before is not None and inner.restore_own()
        if all(text == "1" for text in link.compare(str(int(restored)))):
            return "checkpoint"
        if restored and before is not None:
            inner.undo(before)
    inner.forget()
    if machine.step == 0:
        return "fresh"
    inner.detail = _why(inner, steps, link.size)
    inner.warm_up()
    return "parameters"


def _why(inner: InnerRecovery, steps: list[int], size: int) -> str:
    if max(steps) < 0 and inner.other_parts:
        return f"the checkpoints here are of {inner.other_parts} ranks, and this learner has {size}"
    if min(steps) < 0 <= max(steps):
        missing = [str(rank) for rank, step in enumerate(steps) if step < 0]
        return f"rank {', '.join(missing)} has no checkpoint"
    if max(steps) >= 0:
        return f"the ranks' checkpoints are of different steps, or do not fit: {sorted(set(steps))}"
    return "no checkpoint of this learner was found"
