"""What a run sends, decided from what was measured: codec and period follow the links (setting `adaptive`).

    network     a learner whose link is busy most of the time sends fewer bits. If rounds still do not fit into their
                period, more steps hide them; then the period grows. When there is room again, all of it goes back.
    learning    rounds come more often while the run begins: `pacing.ramp`
    on          both

Every decision is (subject, what, before, after, reason), and an event. Same numbers, same decision: nothing here reads
a clock or draws a number. Three things keep it from flapping. After a decision only what was asked for since counts. A
step towards more bits waits for several calm windows. And each subject has a budget of changes (`change_budget`).
Numbers that cannot be (a step of no length, NaN, a clock that jumps) lead to no decision, which is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.core.change_budget import ChangeBudget
from atoll.core.codec_ladder import ladder_of
from atoll.core.config import CODECS, SECOND_NS, SyncConfig
from atoll.core.events import Adapted
from atoll.core.link_ladder import CALM_WINDOWS, LinkPlace, next_rung
from atoll.core.link_use import LinkMeasured, LinkWatch
from atoll.core.round_use import AdoptionTimes, RoundsMeasured

WINDOW_NS_MIN = 3 * SECOND_NS
WINDOW_NS_MAX = 600 * SECOND_NS
"""One that was longer was no measurement: the process was stopped, or its clock has jumped."""
WINDOW_PERIODS = 2
FULL = 0.9
"""Of a period: rounds that need more do not fit."""
ROOMY = 0.6
FITS = 0.8
"""Of a period: what rounds should need of a longer one."""
OVERLAP_MAX = 8


@dataclass(frozen=True, slots=True)
class RunMeasured:
    """What a decision about the whole run goes by."""

    step_ns: float
    round_ns: float | None
    """From a launch to the publication; None: too few are known since the last decision."""
    fragments: int
    adopt_ns: float = 0.0
    """From a publication to its adoption by the learner in the middle, without the wait for the end of a step."""

    def wrong(self) -> str:
        """What in it cannot be; empty: nothing."""
        for name, value in (("a step", self.step_ns), ("a round", self.round_ns)):
            if value is not None and (not math.isfinite(value) or value <= 0.0):
                return f"{name} took {value:g} ns"
        return "" if math.isfinite(self.adopt_ns) and self.adopt_ns >= 0.0 else f"a fetch took {self.adopt_ns:g} ns"

    def needs_ns(self, period: int, overlap: int) -> float:
        """What all rounds of one period take, and all fetches of what comes of them; the longer of the two."""
        rounds = (self.round_ns or 0.0) * self.fragments / in_flight(self.fragments, period, overlap)
        return max(rounds, self.adopt_ns * self.fragments)


def in_flight(fragments: int, period: int, overlap: int) -> int:
    """Rounds that may run at once (`SyncConfig.rounds_in_flight_max`)."""
    return max(1, -(-fragments // period), -(-overlap * fragments // period))


class AdaptiveController:
    """Owned by the RoundScheduler, which asks it at every launch."""

    def __init__(self, config: SyncConfig) -> None:
        self.config = config
        self.on = config.adaptive in ("on", "network")
        self.period, self.overlap = config.sync_every, config.overlap
        self.links = LinkWatch()
        self.rounds = RoundsMeasured()
        self.adoptions = AdoptionTimes()
        self._ladder = ladder_of(config)
        self._of: dict[str, LinkPlace] = {}
        self._budget = ChangeBudget()
        self._looked_ns: int | None = None
        self._calm = 0
        self._said = ""
        self._kept: list[Adapted] = []
        """What an earlier syncer had decided, until it is said again."""

    # ------------------------------------------------------------ what was decided

    def codec(self, learner: str) -> str:
        """What this learner is asked to encode in; empty: as it was told when it joined."""
        link = self._of.get(learner)
        return link.codec if self.on and link is not None else ""

    @property
    def in_flight_max(self) -> int:
        """Rounds that may run at once, with what was decided."""
        return in_flight(self.config.fragments, self.period, self.overlap)

    def gone(self, learner: str) -> None:
        """What was measured of it is over. Its place on the ladder is kept: its link will be the same."""
        self.links.gone(learner)
        self.adoptions.gone(learner)

    def forget(self, learner: str) -> None:
        self.gone(learner)
        self._of.pop(learner, None)
        self._budget.forget(learner)

    def row(self, changes: Sequence[Adapted] = ()) -> dict[str, Any]:
        """For the tape: what holds now, and what was decided last."""
        codecs = {learner: link.codec for learner, link in self._of.items() if link.codec != self.config.codec_up}
        why = [f"{c.subject} {c.what} {c.before} -> {c.after}: {c.reason}" for c in changes]
        return {"period": self.period, "overlap": self.overlap, "codecs": codecs, "decided": why}

    @property
    def decided(self) -> bool:
        """Something is not as the settings say."""
        row = self.row()
        return bool(row["codecs"]) or (self.period, self.overlap) != (self.config.sync_every, self.config.overlap)

    def restore(self, row: Mapping[str, Any], clock: int) -> None:
        """Go on with what an earlier syncer had decided, as far as the settings still allow for it."""
        if not self.on:
            return
        kept = f"as before the syncer's restart, at step {clock}"
        for what, low, high in (
            ("period", self.config.sync_every, self.config.period_max),
            ("overlap", self.config.overlap, max(OVERLAP_MAX, self.config.overlap)),
        ):
            value, before = row.get(what), getattr(self, what)
            if isinstance(value, int) and low <= value <= high and value != before:
                setattr(self, what, value)
                self._kept.append(Adapted("run", what, str(before), str(value), kept, clock))
        names = [name for name, _ in self._ladder]
        for learner, codec in dict(row.get("codecs", {})).items():
            if codec in names:
                self._of[learner] = LinkPlace(self._ladder, names.index(codec))
                self._kept.append(Adapted(learner, "codec_up", self.config.codec_up, codec, kept, clock))

    # ------------------------------------------------------------ what is measured

    def published(self, fragment: int, version: int, launched_ns: int, now_ns: int) -> None:
        """A round that was launched then has come to a version."""
        if self.on:
            self.rounds.done(launched_ns, now_ns)
            self.adoptions.published(fragment, version, now_ns)

    def adopted(self, learner: str, bases: Sequence[int], now_ns: int) -> None:
        """A learner reports other versions than before."""
        if self.on:
            self.adoptions.adopted(learner, bases, now_ns)

    def measured(self, step_ns: float) -> RunMeasured:
        """What is known of the run now."""
        adopt_ns = max(0.0, self.adoptions.usual_ns() - step_ns)
        return RunMeasured(step_ns, self.rounds.usual_ns(), self.config.fragments, adopt_ns)

    # ------------------------------------------------------------ deciding

    def look(
        self, now_ns: int, clock: int, run: RunMeasured, learners: Iterable[tuple[str, frozenset[str]]]
    ) -> list[Adapted]:
        """Once per window: what changes. `learners` are those that are asked, with the codecs that each knows."""
        if not self.on:
            return []
        if self._looked_ns is None:
            self._looked_ns, kept = now_ns, self._kept
            return kept
        wrong = run.wrong()
        window_ns = now_ns - self._looked_ns
        if not wrong and 0 <= window_ns < self._window_ns(run):
            return []
        if not wrong and not 0 <= window_ns <= WINDOW_NS_MAX + self._window_ns(run):
            wrong = f"{window_ns / 1e9:,.0f} s have passed at once"
        self._looked_ns = now_ns
        measured = [(learner, knows, self._uplink(learner, run, now_ns)) for learner, knows in learners]
        if wrong:
            return self._no_decision(clock, wrong)
        self._said = ""
        if run.adopt_ns * run.fragments > FULL * self.period * run.step_ns:
            # Requests wait behind updates, too: what answers take says nothing about uplinks then.
            longer = self._longer(run, now_ns, clock)
            if longer is not None:
                return [longer]
        every_ns = self.period * run.step_ns / run.fragments
        changes = [
            change
            for learner, knows, link in measured
            if link is not None and (change := self._judge(learner, knows, link, every_ns, now_ns, clock)) is not None
        ]
        change = self._judge_run(run, now_ns, clock)
        return [*changes, change] if change is not None else changes

    def _uplink(self, learner: str, run: RunMeasured, now_ns: int) -> LinkMeasured | None:
        measured, adopt_ns = self.links.take(learner, now_ns), self.adoptions.of_ns(learner) - run.step_ns
        return measured if measured is None or not adopt_ns > 0.0 else measured.without(adopt_ns)

    def _window_ns(self, run: RunMeasured) -> float:
        return min(float(WINDOW_NS_MAX), max(float(WINDOW_NS_MIN), WINDOW_PERIODS * self.period * run.step_ns))

    def _no_decision(self, clock: int, wrong: str) -> list[Adapted]:
        """Said once for each cause."""
        if wrong == self._said:
            return []
        self._said = wrong
        return [Adapted("run", "nothing", "", "", f"no decision: {wrong}", clock)]

    def _judge(
        self, learner: str, knows: frozenset[str], measured: LinkMeasured, every_ns: float, now_ns: int, clock: int
    ) -> Adapted | None:
        link = self._of.get(learner)
        if link is None:
            usable = tuple(rung for rung in self._ladder if CODECS.family(rung[0]) in knows)
            names = [name for name, _ in usable]
            if self.config.codec_up not in names:
                return None  # its build is older than the choice, or does not know the run's own codec
            link = self._of[learner] = LinkPlace(usable, names.index(self.config.codec_up))
        before = link.codec
        rung, why = next_rung(link, measured, every_ns, now_ns)
        if rung == link.rung or not self._budget.may(learner, "codec_up", now_ns, more=rung < link.rung):
            return None
        link.moved(rung)
        self.links.begin_anew(learner, now_ns)
        self.rounds.begin_anew(now_ns)
        return Adapted(learner, "codec_up", before, link.codec, why, clock)

    def _judge_run(self, run: RunMeasured, now_ns: int, clock: int) -> Adapted | None:
        """Fewer bits come first: while somebody can still send less, the run's rhythm stays."""
        if run.round_ns is None:
            return None
        needs_ns, has_ns = run.needs_ns(self.period, self.overlap), self.period * run.step_ns
        if needs_ns <= FULL * has_ns:
            return self._back(run, now_ns, clock)
        self._calm = 0
        if any(link.thin(now_ns) for link in self._of.values()):
            return None
        hidden = 0 < self.overlap < min(OVERLAP_MAX, self.period // 2) and run.fragments > self.in_flight_max
        if hidden and run.round_ns > self.overlap * run.step_ns:
            return self._change("overlap", self.overlap + 1, self._why(run), now_ns, clock)
        return self._longer(run, now_ns, clock)

    def _longer(self, run: RunMeasured, now_ns: int, clock: int) -> Adapted | None:
        """The period into which rounds and fetches fit."""
        self._calm = 0
        fitting = math.ceil(run.needs_ns(self.period, self.overlap) / (FITS * run.step_ns))
        longer = min(self.config.period_max, max(self.period + 1, fitting))
        return self._change("period", longer, self._why(run), now_ns, clock)

    def _why(self, run: RunMeasured) -> str:
        """Who it is that rounds wait for: the slowest of those who answer within one, or nobody."""
        needs_ns, has_ns = run.needs_ns(self.period, self.overlap), self.period * run.step_ns
        needs = f"all rounds need {needs_ns / 1e6:,.0f} ms of a period of {has_ns / 1e6:,.0f}"
        if needs_ns == run.adopt_ns * run.fragments:
            return f"{needs}: fetching a version takes {run.adopt_ns / 1e6:,.0f} ms"
        round_ns = run.round_ns or 0.0
        within = [(link.each_ns, name) for name, link in self._of.items() if link.each_ns <= 1.1 * round_ns]
        each_ns, name = max(within, default=(0.0, ""))
        if each_ns < 0.5 * round_ns:
            return needs
        return f"{needs}: {name} needs {each_ns / 1e6:,.0f} ms for each answer"

    def _back(self, run: RunMeasured, now_ns: int, clock: int) -> Adapted | None:
        """Towards the settings, where there is room for it."""
        shorter = next(
            (
                period
                for period in range(self.config.sync_every, self.period)
                if run.needs_ns(period, self.overlap) < ROOMY * period * run.step_ns
            ),
            self.period,
        )
        needs_ns, has_ns = run.needs_ns(shorter, self.overlap), shorter * run.step_ns
        away = self.overlap > self.config.overlap and needs_ns < ROOMY * has_ns
        self._calm = self._calm + 1 if shorter < self.period or away else 0
        if self._calm < CALM_WINDOWS:
            return None
        self._calm = 0
        why = f"all rounds need {needs_ns / 1e6:,.0f} ms of {has_ns / 1e6:,.0f}"
        if shorter < self.period:
            return self._change("period", shorter, why, now_ns, clock)
        return self._change("overlap", self.overlap - 1, why, now_ns, clock)

    def _change(self, what: str, after: int, why: str, now_ns: int, clock: int) -> Adapted | None:
        before = self.period if what == "period" else self.overlap
        if after == before or not self._budget.may("run", what, now_ns, more=after < before):
            return None
        if what == "period":
            self.period = after
        else:
            self.overlap = after
        self.rounds.begin_anew(now_ns)
        self.adoptions.begin_anew()
        return Adapted("run", what, str(before), str(after), why, clock)
