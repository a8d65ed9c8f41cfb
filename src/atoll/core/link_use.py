"""How long each learner's link takes for what it is asked for: the measurement behind `adaptive`.

A link is in use while a request to its learner is unanswered. How long that is for each answer says how much room there
is, whatever makes it long (bytes, delay, packets that are lost) and whatever carries the bytes. Answers of several
fragments share the link: one takes from its request on, or from the answer before it, whichever was later. A learner
that computes slowly answers at once, with what it has or with nothing; so a slow machine is not mistaken for a thin
link. Only the syncer's clock is read.

After a decision only what was asked since counts (`begin_anew`): what is under way is still encoded as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

UPLINK_SHARE_MIN = 0.25
"""Of the time of an answer, whatever its learner's downlink takes."""


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

    def without(self, adopt_ns: float) -> LinkMeasured:
        """What is left of it for the uplink, where adopting takes so long: a learner that has given twice waits for
        what became of it before it gives again."""
        left = max(UPLINK_SHARE_MIN, 1.0 - adopt_ns / self.each_ns) if self.each_ns else 1.0
        return replace(self, busy_ns=int(left * self.busy_ns), waiting_ns=int(left * self.waiting_ns))


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
        if not use.asked or any(asked.first <= use.fresh_round for asked in use.asked.values()):
            return 0
        return max(0, now_ns - max(min(asked.since_ns for asked in use.asked.values()), use.answered_ns))
