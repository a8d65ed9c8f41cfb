"""What goes wrong inside a process on purpose.

ATOLL_PRELOAD=atoll.instruments.chaos.inside loads this module, which installs it:

    ATOLL_FAILPOINT, ATOLL_FAILPOINT_UNTIL, ATOLL_DISK_FULL_FILE     in the store (`chaos.failpoints`)
    ATOLL_POISON_FILE, ATOLL_LIE_FILE                                in what a learner sends (`chaos.poison`, `.liar`)

Storms set these for the processes that they start, tests for those that they kill.
"""

from __future__ import annotations

import os
from pathlib import Path

from atoll.instruments.chaos.failpoints import failure_plan
from atoll.store import failpoints

failpoints.install(
    failure_plan(
        os.environ.get("ATOLL_FAILPOINT", ""),
        until=os.environ.get("ATOLL_FAILPOINT_UNTIL", ""),
        full=os.environ.get("ATOLL_DISK_FULL_FILE", ""),
    )
)
if path := os.environ.get("ATOLL_POISON_FILE"):
    from atoll.instruments.chaos.poison import Poison  # only in a learner: this needs its room
    from atoll.learner import install_encode

    poison = Poison(Path(path))
    install_encode(poison.encode)
    if path := os.environ.get("ATOLL_LIE_FILE"):
        from atoll.instruments.chaos.liar import Liar
        from atoll.learner import install_falsify

        liar = Liar(Path(path), poison.encode)
        install_encode(liar.encode)
        install_falsify(liar.falsify)
