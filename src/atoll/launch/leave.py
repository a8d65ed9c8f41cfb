"""Asking a learner of another machine to leave, through the syncer, and waiting until it has."""

from __future__ import annotations

import asyncio
import time

from atoll.errors import LaunchError, UnreachableError
from atoll.launch.join import GONE
from atoll.wire import ClientOptions, ask_to_leave, fetch_status

POLL_S = 0.5
"""Between two looks at whether it has gone."""
AFAR_WAIT_S = 210.0
"""It finishes its step, and has 3 minutes to hand over where its link is thin: nobody stands behind it who kills."""
SILENT_LOOKS = 3
"""Looks in a row without an answer after which the syncer has ended: one may fall on a bad moment."""


def leave_from_afar(options: ClientOptions, learner: str, *, wait_s: float = AFAR_WAIT_S) -> tuple[str, bool]:
    """Ask it and wait; returns in words how it went, and whether it can have handed over. Raises LaunchError if it does
    not go."""
    state = asyncio.run(ask_to_leave(options, learner))
    if state in GONE:
        return f"was gone already ({state})", True
    if state == "away":
        return "is away; it is told when it comes back", True
    deadline_s, silent = time.monotonic() + wait_s, 0
    while time.monotonic() < deadline_s:
        try:
            state = _state(options, learner)
            if state == "lost":
                return "ended without handing over everything; what it printed last says how much, and why", False
            if state in GONE:
                return "has left", True
            silent = 0
        except UnreachableError:
            silent += 1
            if silent == SILENT_LOOKS:
                return "was asked, and the syncer has ended since: so does a run whose last learner leaves", True
        time.sleep(POLL_S)
    raise LaunchError(
        f"{learner} was asked to leave and has not within {wait_s:g} s: it leaves at the end of a step; `atoll status "
        f"{options.address}` shows it, and SIGTERM to its process asks it there"
    )


def _state(options: ClientOptions, learner: str) -> str:
    members = asyncio.run(fetch_status(options))["members"]
    return next((str(one["state"]) for one in members if one["learner"] == learner), "left")
