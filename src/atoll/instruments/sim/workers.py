"""Processes for work that can be spread over cores, and their end when somebody has had enough."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes. Whatever they are doing when the block is left early (Ctrl-C, a limit of time) is given up."""
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    # Ctrl-C reaches every process of the terminal; it is the parent's to deal with.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=signal.signal, initargs=ignore)
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
