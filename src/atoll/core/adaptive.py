"""What a run sends, decided from what was measured: codecs and period follow the links (setting `adaptive`).

    network     a learner whose link is busy most of the time sends fewer bits; where most downlinks are, updates have
                fewer. If rounds still do not fit into their period, more steps hide them; then the period grows. When
                there is room again, all of it goes back.
    learning    rounds come more often while the run begins: `pacing.ramp`
    on          both

Codecs that leave values out are for the few: a longer period costs the run less than what all of them would leave out.

Every decision is (subject, what, before, after, reason), and an event. Same numbers, same decision: nothing here reads
a clock or draws a number. Three things keep it from flapping. After a decision only what was asked for since counts. A
step towards more bits waits for several calm windows. And each subject has a budget of changes (`change_budget`).
Numbers that cannot be (a step of no length, NaN, a clock that jumps) lead to no decision, which is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from atoll.core.change_budget import ChangeBudget
from atoll.core.codec_ladder import DENSE_BITS_MIN, ladder_down, ladder_of, last_dense
from atoll.core.config import CODECS, SECOND_NS, SyncConfig
from atoll.core.events import Adapted
from atoll.core.link_ladder import ANSWERS_MIN, BUSY_HIGH, CALM_WINDOWS, LinkPlace, next_rung
from atoll.core.link_use import LinkMeasured, LinkWatch
from atoll.core.policy import median
from atoll.core.round_use import AdoptionTimes, RoundsMeasured
from atoll.core.run_rhythm import (
    FULL,
    OVERLAP_MAX,
    ROOMY,
    SPARSE_PERIODS,
    RunMeasured,
    in_flight,
    longer_period,
    shorter_period,
)

WINDOW_NS_MIN = 3 * SECOND_NS
WINDOW_NS_MAX = 600 * SECOND_NS
"""One that was longer was no measurement: the process was stopped, or its clock has jumped."""
WINDOW_PERIODS = 2
SPARSE_SHARE = 1.25
"""Of the time in which an answer with every value is wanted, what one takes where values are left out. Below, it comes
a little late, which costs less."""
WINDOWS_MIN = 2
"""In a row, in which most learners skip rounds, before something is done about it."""
PART_MIN = 0.2
"""Of a period: what takes less is no part of the reason."""
TIME_SHARE_MIN = 0.25
"""Of the time between two answers that are wanted, what one has at least, however long the other way takes."""

Place = tuple[str, LinkPlace, LinkMeasured]
"""A learner, where it is on the ladder, and what was measured of its link."""


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
        self._down = LinkPlace(ladder_down(config))
        """Of updates: one place for the run, because an update is encoded once for all."""
        self._most_are_thin = False
        self._skipping = 0
        """Windows in a row in which most learners skip rounds."""
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
    def codec_down(self) -> str:
        """What updates are encoded in."""
        return self._down.codec

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
        now = {"period": self.period, "overlap": self.overlap, "codec_down": self.codec_down}
        return {**now, "codecs": codecs, "decided": why}

    @property
    def decided(self) -> bool:
        """Something is not as the settings say."""
        config = self.config
        now, settings = (self.period, self.overlap, self.codec_down), (config.sync_every, config.overlap)
        return bool(self.row()["codecs"]) or now != (*settings, config.codec_down)

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
        down = [name for name, _ in self._down.ladder]
        if row.get("codec_down") in down[1:]:
            self._down.rung = down.index(row["codec_down"])
            self._kept.append(Adapted("run", "codec_down", down[0], self.codec_down, kept, clock))
        names = [name for name, _ in self._ladder]
        for learner, codec in dict(row.get("codecs", {})).items():
            if codec in names:
                self._of[learner] = LinkPlace(self._ladder, names.index(codec))
                self._kept.append(Adapted(learner, "codec_up", self.config.codec_up, codec, kept, clock))

    # ------------------------------------------------------------ what is measured

    def asked(self, learner: str, fragment: int, round_number: int, now_ns: int) -> None:
        """This learner was asked for a fragment. With the first request the first window begins."""
        if self.on:
            self.links.asked(learner, fragment, round_number, now_ns)
            if self._looked_ns is None:
                self._looked_ns = now_ns

    def published(self, fragment: int, version: int, launched_ns: int, now_ns: int) -> None:
        """A round that was launched then has come to a version."""
        if self.on:
            self.rounds.done(launched_ns, now_ns)
            self.adoptions.published(fragment, version, now_ns)

    def merged(self, learner: str, fragment: int, version: int) -> None:
        """What this learner gave is in a version."""
        if self.on:
            self.links.merged(learner, fragment, version)

    def adopted(self, learner: str, bases: Sequence[int], now_ns: int) -> None:
        """A learner reports other versions than before."""
        if self.on:
            self.links.adopted(learner, bases, now_ns)
            self.adoptions.adopted(learner, bases, now_ns)

    def measured(self, step_ns: float) -> RunMeasured:
        """What is known of the run now."""
        adopt_ns = max(0.0, self.adoptions.usual_ns() - step_ns)
        return RunMeasured(step_ns, self.rounds.usual_ns(), self.config.fragments, adopt_ns)

    # ------------------------------------------------------------ deciding

    def look(
        self,
        now_ns: int,
        clock: int,
        run: RunMeasured,
        learners: Iterable[tuple[str, frozenset[str]]],
        *,
        any_update: bool = True,
    ) -> list[Adapted]:
        """Once per window: what changes. `learners` are those that are asked, with the codecs that each knows.
        `any_update`: all of them read updates in whatever codec they come."""
        if not self.on:
            return []
        kept, self._kept = self._kept, []
        if self._looked_ns is None:
            self._looked_ns = now_ns
        wrong = run.wrong()
        window_ns = now_ns - self._looked_ns
        if not wrong and 0 <= window_ns < self._window_ns(run):
            return kept
        if not wrong and not 0 <= window_ns <= WINDOW_NS_MAX + self._window_ns(run):
            wrong = f"{window_ns / 1e9:,.0f} s have passed at once"
        self._looked_ns = now_ns
        measured = [(learner, knows, self.links.take(learner, now_ns)) for learner, knows in learners]
        if wrong:
            return kept + self._no_decision(clock, wrong)
        self._said = ""
        known = [link for _, _, link in measured if link is not None]
        self._skipping = self._skipping + 1 if 2 * sum(link.skips for link in known) > len(known) else 0
        # Requests wait behind updates, too: where those take long, what answers take says nothing about uplinks.
        changes = self._judge_down(run, any_update, now_ns, clock)
        if not changes:
            placed = [self._place(*one) for one in measured]
            places = [place for place in placed if place is not None]
            changes = self._judge_links(places, run, any_update, now_ns, clock)
        if changes:
            self._skipping = 0
        return kept + changes

    def _window_ns(self, run: RunMeasured) -> float:
        periods_ns = WINDOW_PERIODS * self.config.sync_every * run.step_ns
        return min(float(WINDOW_NS_MAX), max(float(WINDOW_NS_MIN), periods_ns))

    def _no_decision(self, clock: int, wrong: str) -> list[Adapted]:
        """Said once for each cause."""
        if wrong == self._said:
            return []
        self._said = wrong
        return [Adapted("run", "nothing", "", "", f"no decision: {wrong}", clock)]

    # ------------------------------------------------------------ downlinks

    def _judge_down(self, run: RunMeasured, any_update: bool, now_ns: int, clock: int) -> list[Adapted]:
        """Updates that most fetch too slowly get fewer bits; and if they still would not fit, a longer period."""
        down = self._down
        if not run.adopt_ns:
            return []
        down.floor = -1 if any_update else down.rung
        time_ns = self._time_ns(run, (run.round_ns or 0.0) + run.step_ns)
        if self._skipping >= WINDOWS_MIN and run.adopt_ns >= PART_MIN * self._has_ns(run):
            time_ns = min(time_ns, run.adopt_ns)
        measured = LinkMeasured(int(ANSWERS_MIN * run.adopt_ns), ANSWERS_MIN)
        (rung, why), before, changes = next_rung(down, measured, time_ns, now_ns), down.rung, list[Adapted]()
        if rung != before and self._may_code("run", "codec_down", now_ns, more=rung < before):
            changes.append(self._down_to(rung, _of_updates(why, rung > before, run.adopt_ns, time_ns), now_ns, clock))
            if rung > before:  # what fewer bits should bring
                run = replace(run, adopt_ns=run.adopt_ns / down.bits(before))
        if run.adopt_ns * run.fragments > FULL * self._has_ns(run):
            longer = self._longer(run, run.adopt_ns * run.fragments, now_ns, clock)
            changes += [longer] if longer is not None else []
        return changes

    def _down_to(self, rung: int, why: str, now_ns: int, clock: int) -> Adapted:
        """From now on uplinks show what they are worth: before, requests and answers waited behind updates."""
        before = self._down.codec
        self._down.moved(rung)
        self.adoptions.begin_anew()
        for learner, link in self._of.items():
            self.links.begin_anew(learner, now_ns)
            link.try_again()
        return Adapted("run", "codec_down", before, self._down.codec, why, clock)

    def _time_ns(self, run: RunMeasured, other_ns: float) -> float:
        """For one way of a fragment: as often as one is wanted, and both ways within one period. A learner whose
        contribution is not answered when the next one is due has half as many."""
        every_ns = self._has_ns(run) / run.fragments
        return max(TIME_SHARE_MIN * every_ns, min(every_ns, self._has_ns(run) - other_ns))

    def _may_code(self, subject: str, what: str, now_ns: int, *, more: bool) -> bool:
        """Back goes in the reverse order: the period first. In a long one every link seems to have room."""
        in_order = not more or self.period <= self.config.sync_every
        return in_order and self._budget.may(subject, what, now_ns, more=more)

    # ------------------------------------------------------------ uplinks

    def _place(self, learner: str, knows: frozenset[str], measured: LinkMeasured | None) -> Place | None:
        """None of a learner of which nothing is known, whose build is older than the choice, or does not know the run's
        own codec."""
        link = self._of.get(learner)
        if measured is None:
            return None
        if link is None:
            usable = tuple(rung for rung in self._ladder if CODECS.family(rung[0]) in knows)
            names = [name for name, _ in usable]
            if self.config.codec_up not in names:
                return None
            link = self._of[learner] = LinkPlace(usable, names.index(self.config.codec_up))
        link.each_ns = measured.each_ns or link.each_ns
        return learner, link, measured

    def _judge_links(
        self, places: Sequence[Place], run: RunMeasured, any_update: bool, now_ns: int, clock: int
    ) -> list[Adapted]:
        self._set_floors(places, self._has_ns(run) / run.fragments)
        judged = [(place[1], self._judge(*place, run, now_ns, clock)) for place in places]
        changes = [change for _, change in judged if change is not None]
        if changes and self._most_are_thin:
            fewer = [link for link, change in judged if change is not None and link.before_ns]
            return changes + self._all_are_thin(fewer, run, any_update, now_ns, clock)
        change = self._judge_run(run, now_ns, clock)
        return [*changes, change] if change is not None else changes

    def _all_are_thin(
        self, fewer: Sequence[LinkPlace], run: RunMeasured, any_update: bool, now_ns: int, clock: int
    ) -> list[Adapted]:
        """What fewer bits for most uplinks will not do is known already, and downlinks mostly are no better."""
        changes, down = list[Adapted](), self._down
        needs_ns = run.fragments * median(sorted(link.foreseen_ns for link in fewer))
        unknown = fewer and any_update and not run.adopt_ns and down.rung + 1 < len(down.ladder)
        if unknown and self._budget.may("run", "codec_down", now_ns, more=False):
            changes.append(self._down_to(len(down.ladder) - 1, "most uplinks are thin", now_ns, clock))
        if needs_ns > FULL * self._has_ns(run):
            longer = self._longer(run, needs_ns, now_ns, clock)
            changes += [longer] if longer is not None else []
        return changes

    def _set_floors(self, places: Sequence[Place], every_ns: float) -> None:
        """How few bits a link may have. Values are left out only where all of them do not fit; and where that is so for
        most links, the period grows first."""
        dense = [last_dense(link.ladder) for _, link, _ in places]
        busy = sum(
            link.share(min(link.rung, rung), every_ns) > BUSY_HIGH
            for rung, (_, link, _) in zip(dense, places, strict=True)
        )
        self._most_are_thin = 2 * busy > len(places)
        spared = self._most_are_thin and self.period < self._period_most()
        for rung, (_, link, _) in zip(dense, places, strict=True):
            fits = spared or link.share(rung, every_ns) <= SPARSE_SHARE
            link.floor = rung if fits and link.ladder[0][1] >= DENSE_BITS_MIN else -1

    def _period_most(self) -> int:
        """Up to where the period grows while links could still send fewer bits."""
        sparse = any(link.rung < len(link.ladder) - 1 for link in self._of.values())
        most = SPARSE_PERIODS * self.config.sync_every if self._most_are_thin and sparse else self.config.period_max
        return max(self.period, min(most, self.config.period_max))

    def _judge(
        self, learner: str, link: LinkPlace, measured: LinkMeasured, run: RunMeasured, now_ns: int, clock: int
    ) -> Adapted | None:
        adopt_ns = self.adoptions.of_ns(learner) if link.floor >= 0 else 0.0  # a thin one is glad of every answer
        before, time_ns = link.codec, self._time_ns(run, adopt_ns)
        missing = self._skipping >= WINDOWS_MIN and link.each_ns >= PART_MIN * self._has_ns(run)
        if missing and link.floor >= 0:
            time_ns = min(time_ns, link.each_ns)
        rung, why = next_rung(link, measured, time_ns, now_ns)
        if rung == link.rung or not self._may_code(learner, "codec_up", now_ns, more=rung < link.rung):
            return None
        link.moved(rung)
        self.links.begin_anew(learner, now_ns)
        self.rounds.begin_anew(now_ns)
        return Adapted(learner, "codec_up", before, link.codec, why, clock)

    # ------------------------------------------------------------ the run's rhythm

    def _has_ns(self, run: RunMeasured) -> float:
        return self.period * run.step_ns

    def _judge_run(self, run: RunMeasured, now_ns: int, clock: int) -> Adapted | None:
        """Fewer bits come first: while somebody can still send less, the run's rhythm stays."""
        if run.round_ns is None:
            return None
        needs_ns = run.needs_ns(self.period, self.overlap)
        if needs_ns <= FULL * self._has_ns(run):
            return self._back(run, now_ns, clock)
        self._calm = 0
        if any(link.thin(now_ns) for link in self._of.values()):
            return None
        hidden = 0 < self.overlap < min(OVERLAP_MAX, self.period // 2) and run.fragments > self.in_flight_max
        if hidden and run.round_ns > self.overlap * run.step_ns:
            return self._change("overlap", self.overlap + 1, self._why(run, needs_ns), now_ns, clock)
        return self._longer(run, needs_ns, now_ns, clock)

    def _longer(self, run: RunMeasured, needs_ns: float, now_ns: int, clock: int) -> Adapted | None:
        """The period into which so much fits."""
        self._calm = 0
        fetching = needs_ns == run.adopt_ns * run.fragments
        most = self.config.period_max if fetching else self._period_most()
        longer = longer_period(self.period, needs_ns, run.step_ns, most)
        return self._change("period", longer, self._why(run, needs_ns), now_ns, clock)

    def _why(self, run: RunMeasured, needs_ns: float) -> str:
        """Who it is that rounds wait for: the slowest of those who answer within one, or nobody."""
        needs = f"all rounds need {needs_ns / 1e6:,.0f} ms of a period of {self._has_ns(run) / 1e6:,.0f}"
        if needs_ns == run.adopt_ns * run.fragments:
            return f"{needs}: fetching a version takes {run.adopt_ns / 1e6:,.0f} ms"
        round_ns = run.round_ns or 0.0
        within = [(link.each_ns, name) for name, link in self._of.items() if link.each_ns <= 1.1 * round_ns]
        each_ns, name = max(within, default=(0.0, ""))
        if each_ns < 0.5 * round_ns or not each_ns:
            return needs
        return f"{needs}: {name} needs {each_ns / 1e6:,.0f} ms for each answer"

    def _back(self, run: RunMeasured, now_ns: int, clock: int) -> Adapted | None:
        """Towards the settings, where there is room for it."""
        shorter = shorter_period(self.period, run, self.config, self.overlap)
        needs_ns, has_ns = run.needs_ns(shorter, self.overlap), shorter * run.step_ns
        away = self.overlap > self.config.overlap and needs_ns < ROOMY * has_ns
        self._calm = self._calm + 1 if shorter < self.period or away else 0
        why = f"all rounds need {needs_ns / 1e6:,.0f} ms of {has_ns / 1e6:,.0f}"
        if shorter < self.period:  # at once: one that is too short slips, and costs less than one that is too long
            return self._change("period", shorter, why, now_ns, clock)
        if self._calm < CALM_WINDOWS:
            return None
        self._calm = 0
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


def _of_updates(why: str, fewer: bool, adopt_ns: float, time_ns: float) -> str:
    """The reason for another codec of updates: that of a link, in the words of fetches."""
    takes = f"takes {adopt_ns / 1e6:,.0f} ms, and there are {time_ns / 1e6:,.0f} for it"
    if fewer:
        return f"fetching a version {takes}"
    if "did not help" in why:
        return f"fewer bits did not help: fetching a version still {takes}"
    return why.replace("its link has", "most downlinks have")
