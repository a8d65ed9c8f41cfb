"""How fast a learner has been lately, from its account."""

from __future__ import annotations

from atoll.core import SECOND_NS
from atoll.observe.account import CATEGORIES, TRACKED, TimeAccount

RECENT_NS = 4 * SECOND_NS
"""Speeds and shares of the live view are over this long, or three reports when those are longer."""

_TOKENS = TRACKED.index("tokens")
_FIRST_CATEGORY = TRACKED.index(CATEGORIES[0])


def recent_tokens_s(account: TimeAccount | None, report_ns: int, now_ns: int | None) -> float:
    """Tokens per second, lately. `report_ns` is the duration of the learner's last report."""
    return _recent(account, report_ns, now_ns)[_TOKENS]


def recent_shares(account: TimeAccount | None, report_ns: int, now_ns: int | None) -> dict[str, float]:
    """The recent share of each category in the learner's time; empty before its first report."""
    if account is not None and account.mood in ("down", "recovery"):
        return {name: float(name == account.mood) for name in CATEGORIES}
    seconds = _recent(account, report_ns, now_ns)[_FIRST_CATEGORY:]
    total = sum(seconds)
    return dict(zip(CATEGORIES, (s / total for s in seconds), strict=True)) if total > 0 else {}


def _recent(account: TimeAccount | None, report_ns: int, now_ns: int | None) -> tuple[float, ...]:
    """Each tracked total per second, lately."""
    if account is None or account.track.start_ns is None or account.track.end_ns is None:
        return (0.0,) * len(TRACKED)
    span_ns = max(RECENT_NS, 3 * report_ns)
    end_ns = account.track.end_ns
    if now_ns is not None and now_ns - end_ns > span_ns:
        end_ns = now_ns
    begin_ns = max(end_ns - span_ns, account.track.start_ns)
    totals = account.track.between(begin_ns, end_ns)
    return tuple(total * SECOND_NS / max(1, end_ns - begin_ns) for total in totals)
