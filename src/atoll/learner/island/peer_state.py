"""A peer's inner state for a learner of several ranks: it comes to the rank that speaks, which cuts each its part.

It is on that rank's host as a whole while it is handed out, and nothing is trained then. A state that is too large for
that does not come within the time that a joiner waits for it either.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core import INNER_WAIT_NS
from atoll.errors import AtollError, PayloadError
from atoll.learner.inner_recovery import InnerRecovery
from atoll.learner.island.link import SPEAKER, RankLink

INNER_WAIT_S = INNER_WAIT_NS / 1e9
LOOK_S = 0.1
Came = tuple[bytes, str, str]
"""Bytes, whose they are, and (without bytes) why there are none."""


def take_together(link: RankLink, inner: InnerRecovery, came: Callable[[], Came | None] | None) -> bool:
    """All ranks: whether every one has its part of a peer's state now. `came` is the speaker's, if it asked for one."""
    blob, told = _wait(link, came)
    if "peer" not in told:
        inner.detail = inner.detail or told["none"]
        return False
    before = inner.capture_or_none()
    mine, why = _share_out(link, inner, blob)
    taken = before is not None and mine is not None and inner.take_peer(mine, told["peer"])
    if all(text == "1" for text in link.compare(str(int(taken)))):
        return True
    reasons = [text for text in link.compare("" if taken else why or inner.detail) if text]
    if taken and before is not None:
        inner.undo(before)
    inner.detail = reasons[0] if reasons else "not every rank could take the peer's inner state"
    return False


def _wait(link: RankLink, came: Callable[[], Came | None] | None) -> tuple[bytes, dict[str, str]]:
    """The others hear every little while that the speaker still waits: their patience with each other is limited."""
    deadline = time.monotonic() + INNER_WAIT_S
    while True:
        found = came() if came is not None else None
        told: dict[str, Any] = {"none": "no peer was asked for its inner state"}
        if found is not None:
            told = {"peer": found[1]} if found[0] else {"none": found[2]}
        elif came is not None:
            late = time.monotonic() > deadline
            told = {"none": f"no peer's inner state came within {INNER_WAIT_S:g} s"} if late else {}
        told = json.loads(link.compare(json.dumps(told))[SPEAKER])
        if told:
            return (found[0] if found is not None else b""), told
        time.sleep(LOOK_S)


def _share_out(link: RankLink, inner: InnerRecovery, blob: bytes) -> tuple[NDArray[np.uint8] | None, str]:
    """This rank's part, or why there is none. All ranks together."""
    wanted = _attempt(lambda: np.frombuffer(inner.wanted(), np.uint8))
    sizes = [int(text) for text in link.compare(str(wanted.nbytes if isinstance(wanted, np.ndarray) else 0))]
    if isinstance(wanted, str) or not all(sizes):
        return None, wanted if isinstance(wanted, str) else ""
    asked = {rank: np.empty(size, np.uint8) for rank, size in enumerate(sizes) if rank != SPEAKER}
    link.exchange_now({}, asked) if link.rank == SPEAKER else link.exchange_now({SPEAKER: wanted}, {})
    mine: NDArray[np.uint8] | None = None
    for rank in range(link.size):
        cut: NDArray[np.uint8] | str = ""
        if link.rank == SPEAKER:
            cut = _attempt(partial(inner.cut_for, blob, bytes(asked.get(rank, wanted))))
        told = json.loads(link.compare(json.dumps(cut if isinstance(cut, str) else cut.nbytes))[SPEAKER])
        if isinstance(told, str):
            return None, told
        given = _handed(link, rank, cut, told)
        mine = given if link.rank == rank else mine
    return mine, ""


def _handed(link: RankLink, rank: int, cut: NDArray[np.uint8] | str, size: int) -> NDArray[np.uint8] | None:
    """From the speaker, which has cut it, to this rank."""
    if link.rank == SPEAKER:
        assert isinstance(cut, np.ndarray)
        if rank != SPEAKER:
            link.exchange_now({rank: cut}, {})
        return cut
    mine = np.empty(size, np.uint8)
    if link.rank == rank:
        link.exchange_now({}, {SPEAKER: mine})
    return mine


def _attempt(make: Callable[[], NDArray[np.uint8]]) -> NDArray[np.uint8] | str:
    try:
        return make()
    except (AtollError, MemoryError, ValueError) as error:
        return str(PayloadError(str(error)))[:500] or "it does not fit"
