"""Amounts as people read them."""

from __future__ import annotations


def count(value: float) -> str:
    """1.2G, 40M, 12.8k, 7."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"


def duration(seconds: float) -> str:
    """42 s, 3 min 5 s, 2 h 7 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
