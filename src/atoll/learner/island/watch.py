"""Ends a process whose island has lost a rank while it computes.

A framework's collective that waits for a rank which is gone may wait for as long as the framework likes (JAX: 100 s).
While the training thread waits there, nobody asks the connections between the ranks how the others are. So a thread
looks at them: the kernel closes what a dead process had open, and that can be seen without reading.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping

NOTICE_S = 20.0
"""From the end of a rank until the others are ended: time for the training thread to see it by itself, to say more of
it than this thread can, and to save something. A tenth of what a learner may take to leave (ATOLL_LEAVE_S)."""
LOOK_MS = 500
"""How long one look takes, and so how late `rest` is noticed."""
GONE = getattr(select, "POLLRDHUP", 0)
"""Where the system cannot tell (it is Linux's), the framework's own patience is what there is."""


class RankWatch:
    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        self._ranks = {peer.fileno(): rank for rank, peer in peers.items()}
        self._resting = threading.Event()
        if GONE:
            threading.Thread(target=self._watch, name="atoll-ranks", daemon=True).start()

    def rest(self) -> None:
        """The ranks part: from now on each ends when it likes. Who is gone already has not parted."""
        if not (GONE and self._gone(0)):
            self._resting.set()

    def _gone(self, wait_ms: int) -> list[int]:
        poll = select.poll()  # one for each look: two threads may not share it
        for number in self._ranks:
            poll.register(number, GONE)
        return [self._ranks[number] for number, _ in poll.poll(wait_ms)]

    def _watch(self) -> None:
        while not (gone := self._gone(LOOK_MS)):
            if self._resting.is_set():
                return
        time.sleep(NOTICE_S)
        if self._resting.is_set():
            return
        print(
            f"atoll: rank {gone[0]} of this learner has ended, and this one waits for it; so it ends, too. Start all "
            "of them again",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        os._exit(1)  # the training thread is inside the framework, where no exception reaches it
