"""The threads of the kernels: a small pool of our own, because several Python threads call kernels at the same time.

numba's own thread layer may abort the process in that case. The compiled loops release the interpreter lock, so plain
threads do. The calling thread always takes part, so a busy pool makes a call slower but can never make it wait forever.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from atoll.errors import ConfigError
from atoll.kernels.constants import BLOCK

THREADS_MAX = 16
"""The loops are bound by memory; a socket's bandwidth is used up by fewer threads than this."""


SCRATCH_BYTES = 9 * 4 * BLOCK
"""Nine rows of one block: what the outer step, the hungriest kernel, needs."""

RangeFunction = Callable[[int, int, int], bool]
"""function(lo, hi, scratch address) -> was everything finite"""


def _cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


_lock = threading.Lock()
_threads = min(_cpus(), THREADS_MAX)
_pool: ThreadPoolExecutor | None = None
_own = threading.local()


def threads() -> int:
    """How many threads one kernel call may use, the caller included."""
    return _threads


def set_threads(count: int) -> None:
    """Let every kernel call of this process use up to `count` threads. The results do not depend on it."""
    global _threads, _pool
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= THREADS_MAX:
        raise ConfigError(f"kernel threads must be a whole number from 1 to {THREADS_MAX}; not {count!r}")
    with _lock:
        # Calls in progress hold the old pool and finish on it.
        old, _pool, _threads = _pool, None, count
    if old is not None:
        old.shutdown(wait=False)


def work_alone() -> None:
    """From now on kernel calls of the calling thread use no other thread. For one of many threads that have each a
    call of their own to make: handing pieces to others would cost all of them the interpreter's lock."""
    _own.alone = True


def run_ranges(count: int, per_task: int, function: RangeFunction) -> bool:
    """Call function over 0..count in pieces of `per_task`, on several threads; True if every call gave True."""
    tasks = -(-count // per_task)
    if count == 0:
        return True
    if tasks == 1 or _threads == 1 or getattr(_own, "alone", False):
        _memory, scratch = _scratch()
        return bool(function(0, count, scratch))
    counter = itertools.count()  # next() on it is atomic
    verdicts = [True] * tasks

    def work() -> None:
        _memory, scratch = _scratch()
        while (task := next(counter)) < tasks:
            verdicts[task] = bool(function(task * per_task, min(count, (task + 1) * per_task), scratch))

    others = _start(work, min(_threads, tasks) - 1)
    try:
        work()
    finally:
        # A piece of work that no thread has taken up yet is not needed any more. (In a forked child, whose pool has no
        # threads, this is what keeps the call from waiting forever.) The others must end before the arrays may go.
        errors = [other.exception() for other in others if not other.cancel()]
    for error in errors:
        if error is not None:
            raise error
    return all(verdicts)


def _scratch() -> tuple[NDArray[np.uint8], int]:
    """Zeroed memory and an address in it on a cache line; the address is good for as long as the memory is held."""
    memory = np.zeros(SCRATCH_BYTES + 64, np.uint8)
    return memory, -(-memory.ctypes.data // 64) * 64


def _start(work: Callable[[], None], count: int) -> list[Future[None]]:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max_workers=THREADS_MAX - 1, thread_name_prefix="atoll-kernel")
        try:
            return [_pool.submit(work) for _ in range(count)]
        except RuntimeError:  # the interpreter is shutting down: the caller does the work alone
            return []
