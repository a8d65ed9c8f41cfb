"""Numbers as people write and read them: 12B parameters, 258 MB, 1.4 Gbit/s, 3.5 days."""

from __future__ import annotations

import math
import re
from typing import Any

from atoll.errors import ConfigError

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"((?:\d+(?:\.\d*)?|\.\d+)(?:e\+?\d{1,2}(?!\s*[kmgbt]))?)\s*([kmgbt]?)", re.IGNORECASE)
DIGITS_MAX = 40
"""A count is a few digits and a letter; more is some other text."""


def parse_count(name: str, value: Any) -> Any:
    """1500, "1500", "1.5k", "12B", "2T" or "7e9" as a whole number. What is no text is left for the check of ranges."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    text = value.strip().replace("_", "").replace(",", "")
    found = _COUNT.fullmatch(text) if len(text) <= DIGITS_MAX else None
    if found is None:
        raise ConfigError(f"{name} must be a number such as 1500, 300M, 12B, 7e9 or 2T; not {value[:DIGITS_MAX]!r}")
    return round(float(found[1]) * _FACTORS[found[2].lower()])


def count_text(value: float) -> str:
    """12_000_000_000 -> "12B"."""
    for factor, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def bytes_text(value: float) -> str:
    """Decimal units, as for links and disks."""
    for factor, unit in ((1e18, "EB"), (1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def rate_text(gbit_s: float) -> str:
    if not math.isfinite(gbit_s):
        return "no link"
    if gbit_s >= 1000.0:
        return f"{gbit_s:,.0f} Gbit/s"
    if gbit_s >= 0.0995:
        return f"{gbit_s:.3g} Gbit/s"
    return f"{1000.0 * gbit_s:.3g} Mbit/s" if gbit_s >= 1e-4 else f"{1e6 * gbit_s:.3g} kbit/s"


def seconds_text(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "never"
    for size, unit in ((365.25 * 86400.0, "years"), (86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if abs(seconds) >= 2.0 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if abs(seconds) >= 0.9995 or seconds == 0.0 else f"{1000.0 * seconds:.3g} ms"


def percent_text(share: float) -> str:
    return f"{100.0 * share:.3g}%" if share < 0.9995 else "100%"
