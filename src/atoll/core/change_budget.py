"""How often what a run sends may change: a bucket for each subject, so that nothing flaps whatever is measured."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.config import SECOND_NS

CHANGES_BURST = 4
CHANGE_EVERY_NS = 300 * SECOND_NS


@dataclass(slots=True)
class Bucket:
    left: float = CHANGES_BURST
    since_ns: int = 0

    def take(self, now_ns: int, keep: int) -> bool:
        self.left = min(CHANGES_BURST, self.left + max(0, now_ns - self.since_ns) / CHANGE_EVERY_NS)
        self.since_ns = now_ns
        if self.left < 1.0 + keep:
            return False
        self.left -= 1.0
        return True


class ChangeBudget:
    """None changes more than CHANGES_BURST + 3600 s / CHANGE_EVERY_NS times within an hour.

    A change that asks more of a link leaves one for the way back: where a link comes and goes every minute, what is
    sent stays what its thin minutes carry, and is not stuck with too much in one of them."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def may(self, subject: str, what: str, now_ns: int, *, more: bool) -> bool:
        """Whether this may change now, which then counts. `more`: towards more bits, or more rounds."""
        bucket = self._buckets.get((subject, what))
        if bucket is None:
            bucket = self._buckets[subject, what] = Bucket(since_ns=now_ns)
        return bucket.take(now_ns, 1 if more else 0)

    def forget(self, subject: str) -> None:
        for key in [key for key in self._buckets if key[0] == subject]:
            del self._buckets[key]
