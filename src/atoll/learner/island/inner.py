"""The inner state of a learner of several ranks: each keeps its own part, and all continue from the same step.

Ranks that are started again as they were take the files that each of them left. Where the ranks, or their mesh, are
others, each cuts its part out of the files of all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from atoll.core import LearnerMachine
from atoll.learner.checkpoint_sets import CheckpointSet
from atoll.learner.inner_recovery import InnerRecovery
from atoll.learner.island.link import SPEAKER, RankLink
from atoll.learner.island.peer_state import Came, take_together
from atoll.learner.view import RunView

WHY_CHARS_MAX = 500


def recover_together(
    link: RankLink,
    inner: InnerRecovery,
    machine: LearnerMachine | RunView,
    came: Callable[[], Came | None] | None = None,
) -> str:
    """After joining, on all ranks: the name of the rung. Where not every rank can continue from checkpoints of the same
    step, none does; nor from a peer's state, if one cannot take its part. Then the learning rate is ramped up. `came`
    is the peer's state at the rank that has asked for it."""
    step, run = link.compare(f"{machine.step} {machine.run}")[SPEAKER].split(" ", 1)
    if isinstance(machine, RunView):
        machine.run = run
    if _restored(link, inner):
        return "checkpoint"
    why = [text for text in link.compare(inner.detail[:WHY_CHARS_MAX]) if text]
    inner.forget()
    if step == "0":
        return "fresh"
    inner.detail = why[0] if why else ""
    if take_together(link, inner, came):
        return "peer"
    inner.warm_up()
    return "parameters"


def _restored(link: RankLink, inner: InnerRecovery) -> bool:
    sets = inner.sets()
    if len(set(link.compare(json.dumps([one.key for one in sets])))) > 1:
        sets = []  # not all ranks see the same folder: each has what it left itself, or nothing
    own = _own_key(link, inner)
    while sets and sets[0].key[:2] > own:
        if _from_set(link, inner, sets.pop(0)):
            return True
    if own[1] >= 0 and _all_or_none(link, inner, inner.restore_found):
        return True
    return any(_from_set(link, inner, one) for one in sets)


def _own_key(link: RankLink, inner: InnerRecovery) -> tuple[int, int]:
    """Generation and step of checkpoints that every rank has left itself; (-1, -1) if there are none."""
    inner.go_back(min(int(text) for text in link.compare(str(inner.found_step))))
    keys = [tuple(json.loads(text)) for text in link.compare(json.dumps(inner.found_key))]
    if len(set(keys)) == 1:
        return inner.found_key
    missing = [str(rank) for rank, key in enumerate(keys) if key[1] < 0]
    inner.detail = "the ranks' checkpoints are of different steps"
    if missing:
        inner.detail = f"rank {', '.join(missing)} has no checkpoint"
    return (-1, -1)


def _from_set(link: RankLink, inner: InnerRecovery, one: CheckpointSet) -> bool:
    """The files' checksums are looked at by all ranks, each some of them."""
    damaged = one.damaged(range(link.rank, one.size, link.size))
    if told := [text for text in link.compare(damaged[:WHY_CHARS_MAX]) if text]:
        inner.detail = told[0]
        return False
    return _all_or_none(link, inner, lambda: inner.restore_set(one, checked=True))


def _all_or_none(link: RankLink, inner: InnerRecovery, restore: Callable[[], bool]) -> bool:
    before = inner.capture_or_none()
    restored = before is not None and restore()
    if all(text == "1" for text in link.compare(str(int(restored)))):
        return True
    if restored and before is not None:
        inner.undo(before)
        inner.detail = ""
    return False
