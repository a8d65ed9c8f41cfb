"""What a run sends, decided from what was measured: codec and period follow the links (setting `adaptive`).

    network     a learner whose link is busy most of the time sends fewer bits. If rounds still do not fit into their
                period, more steps hide them; then the period grows. When there is room again, all of it goes back.
    learning    rounds come more often while the run begins: `pacing.ramp`
    on          both

Every decision is (subject, what, before, after, reason), and an event. Same numbers, same decision: nothing here reads
a clock, draws a number or remembers more than is said below. Two things keep it from flapping. A step
towards more bits waits for several calm windows; and each subject has a bucket of changes, so that none changes more
than CHANGES_BURST + 3600 s / CHANGE_EVERY_NS times within an hour, whatever is measured. Numbers that cannot be
(a step of no length, NaN, a clock that jumps) lead to no decision, which is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from atoll.core.config import SECOND_NS, SyncConfig
from atoll.core.events import Adapted
from atoll.core.link_use import LinkMeasured, LinkWatch

LADDER = (
    ("fp32", 32.0),
    ("bf16", 16.0),
    ("int8", 8.125),
    ("int4", 4.125),
    ("int2", 2.125),
    ("topk:10%", 1.094),
    ("topk:3%", 0.375),
)
"""Codecs of contributions from the most bits per parameter to the fewest. A run begins at its `codec_up`."""
WINDOW_NS_MIN = 3 * SECOND_NS
WINDOW_NS_MAX = 600 * SECOND_NS
"""One that was longer was no measurement: the process was stopped, or its clock has jumped."""
WINDOW_PERIODS = 2
BUSY_HIGH = 0.8
"""A link that is in use for a larger share has no room for a bad minute."""
BUSY_LOW = 0.4
"""And it may send more if it would then be in use for less than this share."""
ANSWER_NS_MIN = 20_000_000
"""An answer that comes sooner is not slow because of its bits."""
CALM_WINDOWS = 3
HELPED = 1.1
"""Fewer bits are worth their loss if answers come so much more often, or the link is so much less busy."""
ANSWERS_MIN = 3
JUDGED_WINDOWS = 10
"""Answers, or windows, after which it is known what fewer bits were worth."""
FULL = 0.9
"""Of a period: rounds that need more do not fit."""
ROOMY = 0.6
PERIOD_FACTOR = 1.5
OVERLAP_MAX = 8
CHANGES_BURST = 4
CHANGE_EVERY_NS = 300 * SECOND_NS
NOTHING = LinkMeasured(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class RunMeasured:
    """What a decision about the whole run goes by."""

    step_ns: float
    round_ns: float
    """From a launch to the publication, as a running mean."""
    fragments: int

    def wrong(self) -> str:
        """What in it cannot be; empty: nothing."""
        for name, value in (("a step", self.step_ns), ("a round", self.round_ns)):
            if not math.isfinite(value) or value <= 0.0:
                return f"{name} took {value:g} ns"
        return ""


@dataclass(slots=True)
class Bucket:
    """How often a subject may still change."""

    left: float = CHANGES_BURST
    since_ns: int = 0

    def take(self, now_ns: int) -> bool:
        self.left = min(CHANGES_BURST, self.left + max(0, now_ns - self.since_ns) / CHANGE_EVERY_NS)
        self.since_ns = now_ns
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True


@dataclass(slots=True)
class LinkPlace:
    """One learner's place on the ladder."""

    ladder: tuple[tuple[str, float], ...]
    rung: int = 0
    calm: int = 0
    """Windows in a row with room for more bits."""
    before: LinkMeasured | None = None
    """What was measured before the last step down, while it is not known what that was worth."""
    after: LinkMeasured = NOTHING
    """And what since."""
    in_vain: bool = False
    """Fewer bits did not help it."""
    busy: bool = False

    @property
    def codec(self) -> str:
        return self.ladder[self.rung][0]

    @property
    def thin(self) -> bool:
        """It is busy, and could still send less."""
        return self.busy and not self.in_vain and self.rung + 1 < len(self.ladder)


def ladder_of(config: SyncConfig) -> tuple[tuple[str, float], ...]:
    """The codecs that a learner of this run may be asked for; only the run's own where that is not on the ladder."""
    names = [name for name, _ in LADDER]
    start = names.index(config.codec_up) if config.codec_up in names else len(names)
    adapts = config.adaptive in ("on", "network")
    return LADDER[start:] if adapts and start < len(names) else ((config.codec_up, 0.0),)


def next_rung(link: LinkPlace, measured: LinkMeasured) -> tuple[int, str]:
    """Where on the ladder a link belongs after this window, and why. Changes what the link remembers, not its rung."""
    share = measured.share
    link.busy = share > BUSY_HIGH and measured.busy_ns >= max(1, measured.answers) * ANSWER_NS_MIN
    if link.busy:
        link.calm = 0
        helped = _has_helped(link, measured)
        if helped is False:
            return link.rung - 1, f"fewer bits did not help: in use {share:.0%} of the time, as before"
        return (link.rung + 1, _used(share, measured)) if helped and link.thin else (link.rung, "")
    link.before = None
    if link.rung == 0:
        link.in_vain = link.in_vain and share > BUSY_LOW
        return 0, ""
    richer = share * link.ladder[link.rung - 1][1] / link.ladder[link.rung][1]
    link.calm = link.calm + 1 if richer < BUSY_LOW else 0
    if link.calm < CALM_WINDOWS:
        return link.rung, ""
    link.calm = 0
    return link.rung - 1, f"its link has room: {share:.0%} in use, {richer:.0%} with more bits"


def _has_helped(link: LinkPlace, measured: LinkMeasured) -> bool | None:
    """Whether the last step down brought more answers; None: there are too few to tell. True if there was none."""
    if link.before is None:
        return True
    link.after = link.after.plus(measured)
    if link.after.answers < ANSWERS_MIN and link.after.window_ns < JUDGED_WINDOWS * measured.window_ns:
        return None
    helped = link.after.per_second >= HELPED * link.before.per_second
    link.before = None if helped else link.before
    return helped


def _used(share: float, measured: LinkMeasured) -> str:
    if not measured.answers:
        return f"no answer in {measured.window_ns / 1e9:.1f} s"
    each = measured.busy_ns / measured.answers / 1e6
    return f"its link is in use {share:.0%} of the time, {each:,.0f} ms for each answer"


class AdaptiveController:
    """Owned by the RoundScheduler, which asks it at every launch."""

    def __init__(self, config: SyncConfig) -> None:
        self.config = config
        self.on = config.adaptive in ("on", "network")
        self.period, self.overlap = config.sync_every, config.overlap
        self.links = LinkWatch()
        self._ladder = ladder_of(config)
        self._of: dict[str, LinkPlace] = {}
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._looked_ns: int | None = None
        self._calm = 0
        self._said = ""

    # ------------------------------------------------------------ what was decided

    def codec(self, learner: str) -> str:
        """What this learner is asked to encode in; empty: as it was told when it joined."""
        link = self._of.get(learner)
        return link.codec if self.on and link is not None else ""

    @property
    def in_flight_max(self) -> int:
        """Rounds that may run at once (`SyncConfig.rounds_in_flight_max`, with what was decided)."""
        fragments = self.config.fragments
        due = -(-fragments // self.period)
        return max(1, due, -(-self.overlap * fragments // self.period))

    def gone(self, learner: str) -> None:
        """What was measured of it is over. Its place on the ladder is kept: its link will be the same."""
        self.links.gone(learner)

    def forget(self, learner: str) -> None:
        self.gone(learner)
        self._of.pop(learner, None)
        self._buckets.pop((learner, "codec_up"), None)

    # ------------------------------------------------------------ deciding

    def look(
        self, now_ns: int, clock: int, run: RunMeasured, learners: Iterable[tuple[str, frozenset[str]]]
    ) -> list[Adapted]:
        """Once per window: what changes. `learners` are those that are asked, with the codecs that each knows."""
        if not self.on:
            return []
        if self._looked_ns is None:
            self._looked_ns = now_ns
            return []
        wrong = run.wrong()
        window_ns = now_ns - self._looked_ns
        if not wrong and 0 <= window_ns < self._window_ns(run):
            return []
        if not wrong and not 0 <= window_ns <= WINDOW_NS_MAX + self._window_ns(run):
            wrong = f"{window_ns / 1e9:,.0f} s have passed at once"
        self._looked_ns = now_ns
        measured = [(learner, knows, self.links.take(learner, now_ns)) for learner, knows in learners]
        if wrong:
            return self._no_decision(clock, wrong)
        self._said = ""
        changes = [
            change
            for learner, knows, link in measured
            if link is not None and (change := self._judge(learner, knows, link, now_ns, clock)) is not None
        ]
        change = self._judge_run(run, now_ns, clock)
        return [*changes, change] if change is not None else changes

    def _window_ns(self, run: RunMeasured) -> float:
        return min(float(WINDOW_NS_MAX), max(float(WINDOW_NS_MIN), WINDOW_PERIODS * self.period * run.step_ns))

    def _no_decision(self, clock: int, wrong: str) -> list[Adapted]:
        """Said once for each cause."""
        if wrong == self._said:
            return []
        self._said = wrong
        return [Adapted("run", "nothing", "", "", f"no decision: {wrong}", clock)]

    def _judge(
        self, learner: str, knows: frozenset[str], measured: LinkMeasured, now_ns: int, clock: int
    ) -> Adapted | None:
        link = self._of.get(learner)
        if link is None:
            usable = tuple(rung for rung in self._ladder if rung[0].partition(":")[0] in knows)
            if not usable or usable[0] != self._ladder[0]:
                return None  # its build is older than the choice, or does not know the run's own codec
            link = self._of[learner] = LinkPlace(usable)
        before = link.codec
        rung, why = next_rung(link, measured)
        if rung == link.rung or not self._may(learner, "codec_up", now_ns):
            return None
        link.in_vain = link.in_vain or (rung < link.rung and link.busy)
        link.before, link.after = measured if rung > link.rung else None, NOTHING
        link.rung = rung
        return Adapted(learner, "codec_up", before, link.codec, why, clock)

    def _judge_run(self, run: RunMeasured, now_ns: int, clock: int) -> Adapted | None:
        """Fewer bits come first: while somebody can still send less, the run's rhythm stays."""
        step_ms, round_ms = run.step_ns / 1e6, run.round_ns / 1e6
        needs_ms = round_ms * run.fragments / self.in_flight_max
        if needs_ms > FULL * self.period * step_ms:
            self._calm = 0
            if any(link.thin for link in self._of.values()):
                return None
            why = f"all rounds need {needs_ms:,.0f} ms of a period of {self.period * step_ms:,.0f}"
            hidden = 0 < self.overlap < min(OVERLAP_MAX, self.period // 2) and run.fragments > self.in_flight_max
            if hidden and round_ms > self.overlap * step_ms:
                return self._change("overlap", self.overlap + 1, why, now_ns, clock)
            longer = min(self.config.period_max, math.ceil(self.period * PERIOD_FACTOR))
            return self._change("period", longer, why, now_ns, clock)
        return self._back(run, now_ns, clock)

    def _back(self, run: RunMeasured, now_ns: int, clock: int) -> Adapted | None:
        """Towards the settings, where there is room for it."""
        step_ms, round_ms = run.step_ns / 1e6, run.round_ns / 1e6
        shorter = max(self.config.sync_every, int(self.period / PERIOD_FACTOR))
        in_flight = max(1, -(-self.overlap * run.fragments // shorter))
        needs_ms, has_ms = round_ms * run.fragments / in_flight, shorter * step_ms
        away = self.period > shorter or self.overlap > self.config.overlap
        self._calm = self._calm + 1 if away and needs_ms < ROOMY * has_ms else 0
        if self._calm < CALM_WINDOWS:
            return None
        self._calm = 0
        why = f"all rounds need {needs_ms:,.0f} ms of {has_ms:,.0f}"
        if self.period > shorter:
            return self._change("period", shorter, why, now_ns, clock)
        return self._change("overlap", self.overlap - 1, why, now_ns, clock)

    def _change(self, what: str, after: int, why: str, now_ns: int, clock: int) -> Adapted | None:
        before = self.period if what == "period" else self.overlap
        if after == before or not self._may("run", what, now_ns):
            return None
        if what == "period":
            self.period = after
        else:
            self.overlap = after
        return Adapted("run", what, str(before), str(after), why, clock)

    def _may(self, subject: str, what: str, now_ns: int) -> bool:
        bucket = self._buckets.get((subject, what))
        if bucket is None:
            bucket = self._buckets[subject, what] = Bucket(since_ns=now_ns)
        return bucket.take(now_ns)
