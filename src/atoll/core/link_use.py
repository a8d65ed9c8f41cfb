"""How long each learner's link takes for what it is asked for: the measurement behind `adaptive`.

A link is in use while a request to its learner is unanswered. How long that is for each answer says how much room there
is, whatever makes it long (bytes, delay, packets that are lost) and whatever carries the bytes. Answers of several
fragments share the link: one takes from its request on, or from the answer before it, whichever was later. A learner
that computes slowly answers at once, with what it has or with nothing; so a slow machine is not mistaken for a thin
link. One that was merged gives nothing new before it has adopted that version; until then its uplink is idle. Only the
syncer's clock is read.

After a decision only what was asked since counts (`begin_anew`): what is under way is still encoded as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """One learner's link since it was last looked at."""

    busy_ns: int
    """In use for the answers below."""
    answers: int
    """That were asked for since the last decision, and have bytes."""
    waiting_ns: int = 0
    """For how long the link has been in use for an answer that is not there yet."""
    before_ns: int = 0
    """The longest that an answer from before the last decision took."""
    skipped: int = 0
    """Requests that another one has overtaken, and answers without bytes."""

    @property
    def skips(self) -> bool:
        """It is missing in a third of the rounds or more: when asked, it is not done with the last one."""
        return self.skipped > 0 and 2 * self.skipped >= self.answers

    @property
    def each_ns(self) -> float:
        """Time of one answer: the mean, or what the next one takes already. 0: nothing was measured."""
        return max(self.busy_ns / self.answers if self.answers else 0.0, float(self.waiting_ns))


@dataclass(slots=True)
class _Asked:
    round: int
    """The newest round that wants the fragment."""
    first: int
    """The oldest one that has no answer,"""
    since_ns: int
    """which was asked for then."""


@dataclass(slots=True)
class _Use:
    answered_ns: int = 0
    """When the last answer came."""
    fresh_round: int = 0
    """Answers to rounds up to this one were asked for before the last decision,"""
    fresh_ns: int = 0
    """which was then."""
    round_last: int = 0
    asked: dict[int, _Asked] = field(default_factory=dict)
    """By fragment."""
    owed: dict[int, int] = field(default_factory=dict)
    """By fragment, the version that it must adopt before it can answer."""
    busy_ns: int = 0
    answers: int = 0
    before_ns: int = 0
    skipped: int = 0


class LinkWatch:
    """Told of every request and answer. Time that runs backwards counts as none."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def asked(self, learner: str, fragment: int, round_number: int, now_ns: int) -> None:
        use = self._uses.setdefault(learner, _Use())
        use.round_last = max(use.round_last, round_number)
        known = use.asked.get(fragment)
        if known is None:
            use.asked[fragment] = _Asked(round_number, round_number, now_ns)
        else:
            known.round, known.since_ns = round_number, min(known.since_ns, now_ns)
            use.skipped += 1

    def answered(self, learner: str, fragment: int, round_number: int, size: int, now_ns: int) -> None:
        """An answer to this round, or to an older one than the newest: then that is still to come."""
        use = self._uses.get(learner)
        if use is None:
            return
        use.answered_ns, use.fresh_ns = min(use.answered_ns, now_ns), min(use.fresh_ns, now_ns)
        known = use.asked.get(fragment)
        if known is not None and size:
            self._count(use, known, round_number, now_ns)
        use.skipped += not size
        if known is not None and round_number >= known.round:
            del use.asked[fragment]
        elif known is not None:
            known.first, known.since_ns = known.round, now_ns
        use.answered_ns = now_ns

    def merged(self, learner: str, fragment: int, version: int) -> None:
        """What it gave is in this version."""
        use = self._uses.get(learner)
        if use is not None:
            use.owed[fragment] = version

    def adopted(self, learner: str, bases: Sequence[int], now_ns: int) -> None:
        """It has these versions: what it was asked for meanwhile begins only now."""
        use = self._uses.get(learner)
        for fragment, version in list(use.owed.items()) if use is not None else ():
            if use is not None and fragment < len(bases) and bases[fragment] >= version:
                del use.owed[fragment]
                if fragment in use.asked:
                    use.asked[fragment].since_ns = max(use.asked[fragment].since_ns, now_ns)

    def _count(self, use: _Use, asked: _Asked, round_number: int, now_ns: int) -> None:
        since_ns = max(asked.since_ns, use.answered_ns)
        if round_number > use.fresh_round:
            use.answers += 1
            use.busy_ns += max(0, now_ns - max(since_ns, use.fresh_ns))
        else:
            use.before_ns = max(use.before_ns, now_ns - since_ns)

    def begin_anew(self, learner: str, now_ns: int) -> None:
        """From now on it is asked for something else."""
        use = self._uses.get(learner)
        if use is not None:
            use.fresh_round, use.fresh_ns = use.round_last, now_ns
            use.busy_ns = use.answers = use.before_ns = use.skipped = 0

    def gone(self, learner: str) -> None:
        self._uses.pop(learner, None)

    def take(self, learner: str, now_ns: int) -> LinkMeasured | None:
        """What was measured since the last time; None of a learner that was asked for nothing yet."""
        use = self._uses.get(learner)
        if use is None:
            return None
        measured = LinkMeasured(use.busy_ns, use.answers, self._waiting_ns(use, now_ns), use.before_ns, use.skipped)
        use.busy_ns = use.answers = use.before_ns = use.skipped = 0
        return measured

    def _waiting_ns(self, use: _Use, now_ns: int) -> int:
        """0 while something from before the last decision may still be under way."""
        asked = [one for fragment, one in use.asked.items() if fragment not in use.owed]
        if not asked or any(one.first <= use.fresh_round for one in asked):
            return 0
        return max(0, now_ns - max(min(one.since_ns for one in asked), use.answered_ns))
