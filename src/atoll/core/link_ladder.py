"""In how many bits a learner contributes: its place on a ladder of codecs, by what its link takes for an answer.

A link on which answers do not come as often as they are wanted takes the first rung on which they would. If that
brought nothing (its answers take as long: it is slow for another reason than bytes), it goes back and stays for a
while. Where there is room for more bits in several windows in a row, it takes the richest rung that fits well.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.codec_ladder import Rung
from atoll.core.config import SECOND_NS
from atoll.core.link_use import LinkMeasured

BUSY_HIGH = 0.93
"""A link that is in use for a larger share of the time does not carry what is wanted of it."""
BUSY_LOW = 0.4
"""And it may send more if it would then be in use for less than this share."""
ANSWER_NS_MIN = 20_000_000
"""An answer that comes sooner is not slow because of its bits."""
CALM_WINDOWS = 3
HELPED = 1.1
"""Fewer bits are worth their loss if answers take so much less time."""
THINNED_OUT = 1.3
"""Where they take so much more, the link has changed meanwhile, and nothing is known of the bits."""
ANSWERS_MIN = 3
"""Answers after which it is known what fewer bits were worth."""
IN_VAIN_NS = 600 * SECOND_NS
"""For so long fewer bits are not tried again."""


@dataclass(slots=True)
class LinkPlace:
    """One learner's place on the ladder."""

    ladder: tuple[Rung, ...]
    rung: int = 0
    calm: int = 0
    """Windows in a row with room for more bits."""
    came_from: int = 0
    before_ns: float = 0.0
    """What an answer took before the last step down, while it is not known what that was worth; 0: it is."""
    busy_ns: int = 0
    answers: int = 0
    """Since then."""
    in_vain_ns: int = -(2**63)
    """Until when fewer bits are not tried: they did not help."""
    floor: int = -1
    """The rung with the fewest bits that it may take now; -1: the last one."""
    busy: bool = False
    each_ns: float = 0.0
    """What an answer took in the last window in which there was one."""

    @property
    def codec(self) -> str:
        return self.ladder[self.rung][0]

    def bits(self, rung: int) -> float:
        """Of that rung, as a share of the present one's."""
        return self.ladder[rung][1] / self.ladder[self.rung][1]

    @property
    def lowest(self) -> int:
        last = len(self.ladder) - 1
        return last if self.floor < 0 else max(self.rung, min(self.floor, last))

    @property
    def foreseen_ns(self) -> float:
        """What an answer should take after the last step down, while it is not known what it does."""
        return self.before_ns / self.bits(self.came_from)

    def share(self, rung: int, every_ns: float) -> float:
        """Of the time that there is for an answer, what one would take on that rung; 0: nothing is known."""
        return self.each_ns * self.bits(rung) / every_ns

    def thin(self, now_ns: int) -> bool:
        """It is busy, and may still send less, or does not know yet what that brought."""
        return self.busy and (self.before_ns > 0.0 or (now_ns >= self.in_vain_ns and self.rung < self.lowest))

    def try_again(self) -> None:
        """What was measured since the last step down does not count."""
        self.busy_ns = self.answers = 0

    def moved(self, rung: int) -> None:
        """The next answers are encoded as this rung says."""
        fewer = rung > self.rung
        self.came_from, self.before_ns = self.rung, self.each_ns if fewer else 0.0
        self.rung, self.calm, self.busy_ns, self.answers = rung, 0, 0, 0


def next_rung(link: LinkPlace, measured: LinkMeasured, time_ns: float, now_ns: int) -> tuple[int, str]:
    """Where on the ladder a link belongs after this window, and why, if there is so much time for an answer. Changes
    what the link remembers, not its rung."""
    if link.before_ns:
        link.before_ns = max(link.before_ns, float(measured.before_ns))
    if measured.each_ns <= 0.0:
        return link.rung, ""
    link.each_ns = measured.each_ns
    share = measured.each_ns / time_ns
    link.busy = share > BUSY_HIGH and measured.each_ns >= ANSWER_NS_MIN
    if link.busy:
        link.calm = 0
        return _fewer(link, measured, share, time_ns, now_ns)
    if measured.answers:
        link.before_ns = 0.0
    return _more(link, share) if measured.answers else (link.rung, "")


def _fewer(link: LinkPlace, measured: LinkMeasured, share: float, time_ns: float, now_ns: int) -> tuple[int, str]:
    helped = _has_helped(link, measured)
    if helped is False:
        link.in_vain_ns = now_ns + IN_VAIN_NS
        return link.came_from, f"fewer bits did not help: still {_takes(measured, time_ns)}"
    last = link.lowest
    if helped is None or now_ns < link.in_vain_ns or link.rung == last:
        return link.rung, ""
    fits = (rung for rung in range(link.rung + 1, last) if share * link.bits(rung) <= BUSY_HIGH)
    return next(fits, last), _takes(measured, time_ns)


def _has_helped(link: LinkPlace, measured: LinkMeasured) -> bool | None:
    """Whether answers take less time since the last step down; None: there are too few to tell. True if there was
    none."""
    if not link.before_ns:
        return True
    link.busy_ns += measured.busy_ns
    link.answers += measured.answers
    if link.answers < ANSWERS_MIN:
        return None
    # The first answers may have waited behind updates that were encoded as before: the last ones are believed, too.
    each_ns, before_ns = min(link.busy_ns / link.answers, measured.each_ns), link.before_ns
    link.before_ns = 0.0
    return HELPED * each_ns <= before_ns or each_ns > THINNED_OUT * before_ns


def _more(link: LinkPlace, share: float) -> tuple[int, str]:
    richer = next((rung for rung in range(link.rung) if share * link.bits(rung) < BUSY_LOW), link.rung)
    link.calm = link.calm + 1 if richer < link.rung else 0
    if link.calm < CALM_WINDOWS:
        return link.rung, ""
    return richer, f"its link has room: {share:.0%} in use, {share * link.bits(richer):.0%} with more bits"


def _takes(measured: LinkMeasured, time_ns: float) -> str:
    wanted = f"and there are {time_ns / 1e6:,.0f}"
    if not measured.answers:
        return f"no answer for {measured.waiting_ns / 1e9:.1f} s, {wanted} ms for one"
    return f"it takes {measured.each_ns / 1e6:,.0f} ms for each answer, {wanted} for it"
