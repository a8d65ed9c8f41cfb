"""Processes that are given up leave nobody waiting."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from atoll.instruments.sim.workers import workers

WAIT_S = 60.0


def test_work_that_nobody_wants_any_more_is_ended() -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt), workers(1) as pool:
        assert pool.submit(abs, -3).result(WAIT_S) == 3
        pool.submit(time.sleep, 10 * WAIT_S)
        started = set(multiprocessing.active_children()) - before
        assert started
        raise KeyboardInterrupt
    # The pool's own thread may be reaping a process in this very moment, and has not written down yet that it is dead.
    deadline_s = time.monotonic() + WAIT_S
    while any(process.is_alive() for process in started):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
