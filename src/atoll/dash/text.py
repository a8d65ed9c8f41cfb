"""Numbers as people read them."""

from __future__ import annotations

import math


def count_text(value: float) -> str:
    """1234567 -> "1.23M"."""
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T", "P"), "")


def bytes_text(value: float) -> str:
    """1234567 -> "1.23 MB" (powers of 1000, as link speeds are)."""
    return _scaled(value, 1000.0, ("B", "kB", "MB", "GB", "TB", "PB"), " ")


def _scaled(value: float, base: float, units: tuple[str, ...], gap: str) -> str:
    if not math.isfinite(value):
        return "-"
    unit = 0
    while abs(value) >= base and unit < len(units) - 1:
        value /= base
        unit += 1
    if unit == 0:
        text = f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    else:
        text = f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return f"{text}{gap}{units[unit]}" if units[unit] else text


def clock_text(seconds: float) -> str:
    """75 -> "01:15"; 3700 -> "1:01:40"."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60:02d}:{rest % 60:02d}"


def duration_text(seconds: float) -> str:
    """0.25 -> "0.25 s"; 75 -> "75.0 s"; 700 -> "11.7 min"."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def loss_text(loss: float) -> str:
    return f"{loss:.3f}" if math.isfinite(loss) else "-"


def percent_text(share: float) -> str:
    """0.9615 -> "96.2%"."""
    return f"{100 * share:.1f}%" if math.isfinite(share) else "-"


def ratio_text(ratio: float) -> str:
    """71.8 -> "72x"; 1.84 -> "1.8x"."""
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"
