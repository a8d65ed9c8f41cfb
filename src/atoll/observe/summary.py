"""RunState: everything that the terminal view, the report and the closing summary show, reduced from the event stream.

Pure: `apply(t_ns, event)` in time order, then read. Times are those of the events, so a simulated run looks the same.
"""

from __future__ import annotations

import math
import re
from bisect import insort
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from atoll.core import SECOND_NS, SYNCER_STOPPED
from atoll.observe import events
from atoll.observe.account import TimeAccount
from atoll.observe.comebacks import FRESH, ComebackBook, Return
from atoll.observe.decisions import DecisionBook
from atoll.observe.durability import DurabilityBook
from atoll.observe.faults import BEFORE_NS_MAX, FaultBook, FaultCost, ObservedFault, Reckoning, exit_text, fault_costs
from atoll.observe.goodput import Goodput, GoodputReducer
from atoll.observe.launches import STOP_CODES, Pause
from atoll.observe.learners import LearnerSeen, natural_key
from atoll.observe.log import LogLine, RunLog, span_text
from atoll.observe.notices import NoticeBook
from atoll.observe.reader import read_events
from atoll.observe.rounds import RoundHistory
from atoll.observe.series import Sample
from atoll.observe.speeds import recent_shares, recent_tokens_s
from atoll.observe.syncers import SyncerBook
from atoll.observe.traffic import SyncerTotals, data_parallel_bytes

AWAY = ("away", "lost")
"""States of a member that the syncer does not hear of."""
SLOW_SHARE = 0.5
"""A learner below this share of the median speed is shown as slow."""
LINK_LEAD_NS = 2 * SECOND_NS
"""A learner may notice that its syncer is gone this much before the launcher does."""
LINK_DETAIL_CHARS_MAX = 80
"""What fits into a line of the log; the whole text is in the event."""
PIN_MARGIN_NS = 10 * SECOND_NS
"""A step that was going on at the beginning or end of a fault is reported at most about this much later."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    t_ns: int
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class TokenFates:
    """The fate of every token: processed = merged + pending + the sum of discarded."""

    processed: int
    merged: int
    pending: int
    discarded: dict[str, int]


class RunState:
    """The state of a run after the events applied so far."""

    def __init__(self) -> None:
        self.run: events.RunStarted | None = None
        self.layout: events.LayoutFixed | None = None
        self.finished: events.RunFinished | None = None
        self.first_ns: int | None = None
        self.last_ns = 0
        self.learners: dict[str, LearnerSeen] = {}
        self.rounds = RoundHistory()
        self.syncer = SyncerBook()
        self.durability = DurabilityBook()
        self.comebacks = ComebackBook()
        self.notices = NoticeBook()
        self.decisions = DecisionBook()
        self.evaluations: Sample[Evaluation] = Sample()
        self.last_evaluation: Evaluation | None = None
        self._log = RunLog()
        self._totals = SyncerTotals()
        self._faults = FaultBook()
        self._goodput = GoodputReducer()
        self._order: list[tuple[tuple[tuple[int, int | str], ...], str]] = []
        self._launches_seen = 1
        self._pushed_bytes = 0
        self._fetched_bytes = 0
        self._tokens = 0
        self._steps = 0

    # ------------------------------------------------------------ reducing

    def apply(self, t_ns: int, event: events.Event, source: str = "") -> None:
        """Take one event; `source` is the stem of its file. Unknown learners appear on their first sign of life."""
        if self.first_ns is None:
            self.first_ns = t_ns
        self.last_ns = max(self.last_ns, t_ns)
        self._goodput.apply(t_ns, event)
        if self._goodput.launches.count != self._launches_seen:
            self._new_launch(t_ns)
        if isinstance(event, events.LearnerSteps):
            self._on_steps(t_ns, event)
        for book in (self._faults, self.rounds, self.durability, self.notices, self.decisions):
            book.apply(t_ns, event)
        self.syncer.apply(t_ns, event, source)
        for one in self.comebacks.apply(t_ns, event):
            if not self.missed_syncer(one):
                self._log.returned(t_ns, one)
        self._totals.apply(event, source)
        if self._faults.moments_ns:
            self._pin_faults()
        if isinstance(event, events.LearnerPushed):
            self._pushed_bytes += event.bytes
            self._learner(event.learner).bytes_up += event.bytes
        elif isinstance(event, events.LearnerFetched):
            self._fetched_bytes += event.bytes
            self._learner(event.learner).bytes_down += event.bytes
        elif isinstance(event, events.RoundsFolded):
            self._on_folded(event)
        elif isinstance(event, events.ContributionReceived):
            if not (sender := self._learner(event.learner)).last_ns:  # its own events are elsewhere
                sender.bytes_up += event.bytes
        elif isinstance(event, events.LearnerEvaluated):
            # Counted here where possible, so that it lies on the same axis as the training loss.
            self.last_evaluation = Evaluation(t_ns, self._tokens or event.tokens_seen, event.eval_loss)
            self.evaluations.add(self.last_evaluation)
        elif isinstance(event, events.RunStarted):
            self.run = event
        elif isinstance(event, events.LayoutFixed):
            self.layout = event
        elif isinstance(event, events.RunFinished):
            self.finished = event
            stopped = event.reason.startswith("SIG") or event.reason == SYNCER_STOPPED
            text = f"run stopped by {event.reason}" if stopped else f"run finished: {event.reason}"
            text = text.replace(f"by {SYNCER_STOPPED}", "with its syncer")
            self._log.say(t_ns, text, "plain" if stopped else "good")
        else:
            self._on_rare(t_ns, event)

    def _on_folded(self, event: events.RoundsFolded) -> None:
        for learner, size in event.up.items():
            self._pushed_bytes += size
            self._learner(learner).bytes_up += size
        for learner, size in event.down.items():
            self._fetched_bytes += size
            self._learner(learner).bytes_down += size

    def _new_launch(self, t_ns: int) -> None:
        """The run goes on after it was stopped as a whole."""
        self._launches_seen = self._goodput.launches.count
        end_ns = self.end_ns
        self._faults.new_launch(end_ns)
        self.syncer.new_launch(end_ns)
        self.durability.new_launch(end_ns)
        self.comebacks.new_launch()
        self.notices.new_launch(end_ns)
        self.finished = None
        if self.learner_steps:
            self._log.say(t_ns, f"run resumed {span_text(t_ns - end_ns)} after its last step", "good")

    def _pin_faults(self) -> None:
        for moment_ns in self._faults.moments_ns:
            for account in self._goodput.accounts.values():
                account.track.pin(moment_ns - BEFORE_NS_MAX - PIN_MARGIN_NS, moment_ns + PIN_MARGIN_NS)
        self._faults.moments_ns.clear()

    def _learner(self, learner: str) -> LearnerSeen:
        if learner not in self.learners:
            insort(self._order, (natural_key(learner), learner))
            self.learners[learner] = LearnerSeen(learner)
            self.learners = {name: self.learners[name] for _, name in self._order}
        return self.learners[learner]

    def _on_steps(self, t_ns: int, event: events.LearnerSteps) -> None:
        self._tokens += event.tokens
        self._steps += event.steps
        self._learner(event.learner).stepped(t_ns, event, self._tokens)

    def _on_rare(self, t_ns: int, event: events.Event) -> None:
        """Membership, processes, faults: what changes a learner's state, and the lines of the log."""
        if isinstance(event, events.ProcessStarted):
            if event.role == "learner":
                self._on_started(event.id)
        elif isinstance(event, events.LearnerStarted):
            self._on_started(event.learner)
            self._learner(event.learner).site = event.site
        elif isinstance(event, events.LearnerJoined):
            self._on_joined(t_ns, event)
        elif isinstance(event, events.ProcessExited):
            self._on_exited(t_ns, event)
        elif isinstance(event, events.LearnerFinished):
            self._learner(event.learner).finished = True
        elif isinstance(event, events.MemberChanged):
            self._on_member(t_ns, event)
        elif isinstance(event, events.LearnerLink):
            self._on_link(t_ns, event)
        elif isinstance(event, events.SyncerStarted):
            self._on_syncer(t_ns)
        else:
            if isinstance(event, events.LearnerRecovered):
                if event.rung != FRESH:
                    self._learner(event.learner).rung = event.rung
                event = replace(event, detail=self.in_words(event.learner, event.detail))
            self._log.notice(t_ns, event)

    def _on_member(self, t_ns: int, event: events.MemberChanged) -> None:
        one = self._learner(event.learner)
        same = one.generations[-1:] == [event.generation]
        one.joined(event.generation)
        if event.state in AWAY:
            self._log.say(t_ns, f"{event.learner} is {event.state} ({event.reason})", "bad")
        elif event.state != "left" and one.member in AWAY and same and one.link_up:
            self._log.say(t_ns, f"{event.learner} is heard again{self._after(event.learner, t_ns)}", "good")
        one.became(t_ns, event.state)

    def _after(self, learner: str, t_ns: int) -> str:
        """ " after 25 s" for one that was cut off until now."""
        last = self.comebacks.returns[-1] if self.comebacks.returns else None
        if last is None or last.learner != learner or last.up_ns != t_ns:
            return ""
        return f" after {span_text(last.up_ns - last.down_ns)}"

    def _on_started(self, learner: str) -> None:
        one = self._learner(learner)
        one.finished = False
        self._count_restarts(one)

    def _count_restarts(self, one: LearnerSeen) -> None:
        account = self.account(one.learner)
        one.restarts = account.failures if account is not None else 0

    def _on_joined(self, t_ns: int, event: events.LearnerJoined) -> None:
        one = self._learner(event.learner)
        one.joined(event.generation)
        again = one.last_ns > 0
        one.became(t_ns, "active")
        one.generation, one.link_up = event.generation, True
        if not again:
            one.step = event.step
        verb = "rejoined" if again else "joined"
        tail = f" (generation {one.nth(event.generation)})" if again else ""
        self._log.say(t_ns, f"{event.learner} {verb} at step {event.step:,}{tail}", "good" if again else "plain")

    def _on_link(self, t_ns: int, event: events.LearnerLink) -> None:
        """Only a link that is lost in the middle and one that comes back are news."""
        one = self._learner(event.learner)
        # While there is no syncer every link is down, and that has been said.
        said = self.syncer.up is not False if not event.up else one.link_loss_said
        if event.up != one.link_up and one.member != "left" and said:
            detail = f" ({event.detail[:LINK_DETAIL_CHARS_MAX]})" if event.detail else ""
            after = self._after(event.learner, t_ns) if event.up else ""
            text = f"{event.learner} link {'up again' if event.up else 'down'}{after}{detail}"
            self._log.say(t_ns, text, "good" if event.up else "bad")
        one.link_up, one.link_loss_said = event.up, said and not event.up

    def _on_exited(self, t_ns: int, event: events.ProcessExited) -> None:
        if self.finished is not None:
            return
        if event.role == "learner":
            one = self._learner(event.id)
            through = one.finished
            one.finished = through or event.code == 0
            self._count_restarts(one)
            if through:
                return
        if event.code != 0:
            alone = event.role == "syncer" and event.code not in STOP_CODES
            tail = "; learners train on" if alone and not all(one.finished for one in self.learners.values()) else ""
            self._log.say(t_ns, f"{event.id} {exit_text(event.code)}{tail}", "bad")

    def _on_syncer(self, t_ns: int) -> None:
        last = self.syncer.restarts[-1] if self.syncer.restarts else None
        if last is not None and last.t_ns == t_ns and last.away_ns:
            text = f"syncer serves again after {span_text(last.away_ns)} (epoch {last.epoch})"
            self._log.say(t_ns, text, "good")

    # ------------------------------------------------------------ reading

    @property
    def stats(self) -> events.SyncerStats | None:
        """The newest statistics of the syncer that serves. Its bytes are its own alone: see `bytes_up`."""
        return self._totals.stats

    @property
    def log(self) -> deque[LogLine]:
        return self._log.lines

    @property
    def log_count(self) -> int:
        """Lines that there have been, also those that the log has let go."""
        return self._log.count

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def learner_steps(self) -> int:
        """Steps summed over learners."""
        return self._steps

    @property
    def parameters(self) -> int:
        if self.layout is not None:
            return self.layout.parameters
        return self.run.parameters if self.run is not None else 0

    @property
    def method(self) -> str:
        return self.run.method if self.run is not None else "decoupled"

    @property
    def start_ns(self) -> int:
        """Where the clock of the views begins: with the first step, or the first event before there is one."""
        return self._goodput.start_ns or self.first_ns or 0

    @property
    def end_ns(self) -> int:
        """The last reported step, or the last event before there is one."""
        return max(self._goodput.end_ns or self.last_ns, self.start_ns)

    @property
    def pauses(self) -> list[Pause]:
        """The times in which the run was stopped as a whole, between two launches."""
        return self._goodput.launches.pauses

    def elapsed_s(self, t_ns: float) -> float:
        """Seconds since the first step without the pauses: the clock of the views."""
        return self._goodput.launches.elapsed_ns(self.start_ns, int(t_ns)) / SECOND_NS

    def moment_ns(self, elapsed_s: float) -> float:
        """The time at which that clock showed so much."""
        return self._goodput.launches.moment_ns(self.start_ns, elapsed_s * SECOND_NS)

    def syncer_state(self, now_ns: int) -> str:
        """up, down, stopped, silent, or nothing for a run without one."""
        links_down = any(not one.link_up for one in self.learners.values())
        return self.syncer.state(now_ns, links_down)

    def missed_syncer(self, one: Return) -> bool:
        """Whether a learner was cut off because there was no syncer, and not by the loss of its own link."""
        times = self.syncer.away_times(self.end_ns)
        return any(start_ns - LINK_LEAD_NS <= one.down_ns <= end_ns for start_ns, end_ns in times)

    @property
    def syncer_away_s(self) -> float:
        """How long the run was without a syncer while it went on."""
        return self.syncer.away_ns(self.end_ns) / SECOND_NS

    @property
    def faults(self) -> list[ObservedFault]:
        return self._faults.faults

    @property
    def eval_loss(self) -> float:
        """The loss of the published model: the final one, else the last one measured."""
        if self.finished is not None and math.isfinite(self.finished.eval_loss):
            return self.finished.eval_loss
        return self.last_evaluation.loss if self.last_evaluation is not None else math.nan

    @property
    def bytes_up(self) -> int:
        return self._totals.bytes_up if self.stats is not None else self._pushed_bytes

    @property
    def bytes_down(self) -> int:
        return self._totals.bytes_down if self.stats is not None else self._fetched_bytes

    @property
    def data_parallel_bytes(self) -> int:
        """What data-parallel would have sent for the steps so far; 0 when the number of parameters is not known."""
        count = max(len(self.learners), self.run.learners if self.run is not None else 0)
        return data_parallel_bytes(self.parameters, self.learner_steps, count)

    @property
    def ledger(self) -> TokenFates:
        """From the syncer. Without one (dp, single) every processed token is in the model."""
        if self.stats is None:
            return TokenFates(self._tokens, self._tokens, 0, {})
        stats = self.stats
        return TokenFates(
            stats.tokens_processed, stats.tokens_merged, stats.tokens_pending, dict(stats.tokens_discarded)
        )

    def goodput(self) -> Goodput:
        return self._goodput.result()

    def account(self, learner: str) -> TimeAccount | None:
        return self._goodput.accounts.get(learner)

    def fault_costs(self) -> list[FaultCost]:
        return fault_costs(Reckoning(self.faults, self._goodput.accounts, self._goodput.launches, self.end_ns))

    def rates(self, now_ns: int | None = None) -> dict[str, float]:
        """Recent tokens per second of every learner."""
        return {name: recent_tokens_s(self.account(name), one.report_ns, now_ns) for name, one in self.learners.items()}

    def recent_shares(self, learner: str, now_ns: int | None = None) -> dict[str, float]:
        """The recent share of each category in the learner's time; empty before its first report."""
        return recent_shares(self.account(learner), self.learners[learner].report_ns, now_ns)

    def nth(self, learner: str, generation: int) -> int:
        """A generation as people count: 1 for the first process of a learner, 2 for the next."""
        return self._learner(learner).nth(generation)

    def in_words(self, learner: str, text: str) -> str:
        """What a learner has said of its generations, as people count them."""
        return re.sub(r"generation (\d+)", lambda found: f"generation {self.nth(learner, int(found[1]))}", text)

    @property
    def joined(self) -> int:
        """Learners that have been in the run."""
        return sum(one.member not in ("", "joining") for one in self.learners.values())

    @property
    def waits_for(self) -> int:
        """How many learners the run was started for, while it waits for some of them with its first round; else 0."""
        began = self.rounds.launched or self.rounds.commits or (self.stats is not None and self.stats.commits)
        if self.run is None or not self.syncer.up or began or self.joined >= self.run.learners:
            return 0
        return self.run.learners

    def states(self, now_ns: int | None = None) -> dict[str, str]:
        """joining, active, slow, aside (rounds do not wait for it), cut off (it trains on alone), away (nothing is
        heard of it), lost (for so long that it is not expected back), down or left, for every learner."""
        rates = self.rates(now_ns)
        usual = median([rate for rate in rates.values() if rate > 0] or [0.0])
        return {learner: self._state(one, rates[learner], usual) for learner, one in self.learners.items()}

    def _state(self, one: LearnerSeen, rate: float, usual: float) -> str:
        account = self.account(one.learner)
        if one.finished or one.member == "left" or (account is not None and account.finished_ns is not None):
            return "left"
        if account is not None and account.mood == "down":
            return "down"
        if self.finished is not None:
            return "left"  # with the run, even if nobody saw it go
        if account is not None and account.sign_ns is None:
            return "left"  # it has not been seen since the run was resumed
        if self.syncer.up is not False and (apart := self._apart(one, rate)):
            return apart  # while there is no syncer nobody is away from it
        told = account is not None and account.stepping
        if (not told and one.member != "active") or (account is not None and account.mood == "recovery"):
            return "joining"
        if self.notices.spell(one.learner) is not None:
            return "aside"
        slowed = any(f.target == one.learner and f.name == "slow" and f.end_ns is None for f in self.faults)
        return "slow" if told and (slowed or rate < SLOW_SHARE * usual) else "active"

    def _apart(self, one: LearnerSeen, rate: float) -> str:
        """How a learner is apart from the run, if it is. One that reports steps to this folder is not gone."""
        if one.member in AWAY and not rate:
            return one.member
        if one.generations and self.comebacks.cut_off_since(one.learner) is not None:
            return "cut off"
        return ""


def summarize(run_folder: str | Path) -> RunState:
    """The state of a run folder after all of its events."""
    state = RunState()
    for t_ns, source, event in read_events(run_folder):
        state.apply(t_ns, event, source)
    return state
