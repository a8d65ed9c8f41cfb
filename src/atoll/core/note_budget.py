"""How much one learner can make the syncer write down.

Every refusal, warning and change of a member is an event on disk and a line for a person, and whoever has the run's
token can cause as many as it can send messages. So each learner has an amount of them that fills up with time, and so
have warnings, which name no learner. What is beyond is counted and said later in one line.
"""

from __future__ import annotations

from atoll.core.config import SECOND_NS
from atoll.core.events import ContributionRefused, CoreEvent, MemberChanged, NormGuardReset, Warned

NOTES_BURST = 1000
"""Events of one kind and learner at once: every fragment of a large run refused, and some more."""
NOTE_NS = SECOND_NS // 5
"""One more of them after this time: five a second are 50 MB of events a day."""
KEYS_MAX = 10_000
"""Learners and kinds that are watched at a time; beyond that those of new ones share one amount."""


class NoteBudget:
    """Events go to disk. Without a bound one learner that is refused a thousand times a second would fill it."""

    def __init__(self) -> None:
        self._left: dict[tuple[str, str], tuple[float, int]] = {}
        self._left_out: dict[tuple[str, str], int] = {}

    def take(self, event: CoreEvent, now_ns: int) -> list[CoreEvent]:
        """What is to be written down now: this event, or nothing; and before it how many were left out."""
        if not isinstance(event, ContributionRefused | MemberChanged | NormGuardReset | Warned):
            return [event]
        key = (type(event).__name__, event.learner if isinstance(event, ContributionRefused | MemberChanged) else "")
        if key not in self._left and len(self._left) >= KEYS_MAX:
            key = (key[0], "")
        left, at_ns = self._left.get(key, (float(NOTES_BURST), now_ns))
        left = min(float(NOTES_BURST), left + (now_ns - at_ns) / NOTE_NS)
        if left < 1.0:
            self._left[key] = (left, now_ns)
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return []
        self._left[key] = (left - 1.0, now_ns)
        return [*self._told(key), event]

    def _told(self, key: tuple[str, str]) -> list[CoreEvent]:
        count = self._left_out.pop(key, 0)
        of = f" of learner {key[1]!r}" if key[1] else ""
        return [Warned("syncer", f"{count} more events{of} ({key[0]}) came too fast and are not told")] if count else []
