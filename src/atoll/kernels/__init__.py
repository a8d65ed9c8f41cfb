"""Fused, deterministic loops over flat float32 arrays, and the threads that run them.

The results have the same bits for any number of threads. numba is imported by the first call, not by this module.
"""

from __future__ import annotations

from atoll.kernels.constants import BF16, BLOCK, FP32, INT2, INT4, INT8
from atoll.kernels.pool import set_threads, threads, work_alone
from atoll.kernels.run import (
    OuterStep,
    accumulate,
    alignment,
    decode,
    direction,
    encode,
    inspect,
    outer_step,
    rebase,
    warm_up,
)

__all__ = [
    "BF16",
    "BLOCK",
    "FP32",
    "INT2",
    "INT4",
    "INT8",
    "OuterStep",
    "accumulate",
    "alignment",
    "decode",
    "direction",
    "encode",
    "inspect",
    "outer_step",
    "rebase",
    "set_threads",
    "threads",
    "warm_up",
    "work_alone",
]
