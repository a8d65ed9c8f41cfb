"""The types of every kernel's arguments, in a form that says nothing of numba: who loads compiled ones has none.

    i   int64                   I   array of int64
    d   float64                 D   array of float64        M   matrix of float64

Arrays are contiguous. A digit before a letter is a tuple of so many.
"""

from __future__ import annotations

from typing import Final

SIGNATURES: Final = {
    "encode": "i i i i i i i i i i",
    "decode": "i i i i i i i i",
    "rebase": "i i i i i I i",
    "inspect": "i i i i i I D i",
    "direction": "I i i i I i M I I D i",
    "accumulate": "I i i i I i M I I i i",
    "alignment": "I i i i I i I M i",
    "outer_step": "I i 7i 2d i i I M I I i M i",
    "expand": "i i i i i i i i i",
    "times_columns": "i i i i i i i i i",
    "times_rows": "i i i i i i i i i",
}


def words(name: str) -> list[tuple[int, str]]:
    """Of each argument: how many of a tuple (0: it is none), and its letter."""
    return [(int(word[:-1] or 0), word[-1]) for word in SIGNATURES[name].split()]
