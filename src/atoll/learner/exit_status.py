"""The status with which a script ends that did all it was told to and has failed nevertheless.

A learner that could not hand over its last progress says so when it leaves. What its script does after that
(evaluating, saving a file of its own) is worth as much as before, so it goes on. Only its exit status must not be 0.
"""

from __future__ import annotations

import atexit
import ctypes
import sys

_wanted: list[int] = []
"""The status, once there is one; of two reasons the first."""


def end_with(status: int) -> None:
    """From here on this process ends with that status where it would end with another one by `sys.exit` or its last
    line. An exception that nobody catches has its own."""
    if not _wanted:
        _wanted.append(status)
        atexit.register(_apply)


def forget() -> None:
    """Somebody else answers for it."""
    _wanted.clear()
    atexit.unregister(_apply)


def _apply() -> None:
    """Python knows no way to change its status at this point short of `os._exit`, which would cost whatever is still to
    be flushed. So libc's own exit does it, as the first thing when Python is through: `_exit(status)`."""
    if not _wanted or getattr(sys, "last_type", None) is not None:
        return
    libc = ctypes.CDLL(None)
    at_exit, leave = libc.__cxa_atexit, ctypes.cast(libc._exit, ctypes.c_void_p)
    at_exit.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    at_exit(leave, _wanted[0], None)
    at_exit(ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)  # the last one comes first: what C code has printed
