"""RunState: everything that the terminal view, the report and the closing summary show, reduced from the event stream.

Pure: `apply(t_ns, event)` in time order, then read. Times are those of the events, so a simulated run looks the same.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from atoll.core.config import SECOND_NS
from atoll.observe.events import (
    ContributionRefused,
    Event,
    FaultEnded,
    FaultInjected,
    LayoutFixed,
    LearnerEvaluated,
    LearnerFetched,
    LearnerFinished,
    LearnerJoined,
    LearnerLink,
    LearnerPushed,
    LearnerStarted,
    LearnerSteps,
    MemberChanged,
    ProcessExited,
    ProcessStarted,
    RoundAborted,
    RunFinished,
    RunStarted,
    SyncerStats,
    Warned,
)
from atoll.observe.faults import BEFORE_NS_MAX, Fault, FaultBook, FaultCost, exit_text, fault_costs
from atoll.observe.goodput import CATEGORIES, TRACKED, Account, Goodput, GoodputReducer
from atoll.observe.reader import read_events
from atoll.observe.rounds import RoundBook
from atoll.observe.series import Curve, Sample
from atoll.observe.traffic import data_parallel_bytes

RECENT_NS = 4 * SECOND_NS
"""Speeds and shares of the live view are over this long, or three reports when those are longer."""
SLOW_SHARE = 0.5
"""A learner below this share of the median speed is shown as slow."""
LOG_LINES_MAX = 500
PIN_MARGIN_NS = 10 * SECOND_NS
"""A step that was going on at the beginning or end of a fault is reported at most about this much later."""

_TOKENS = TRACKED.index("tokens")
_FIRST_CATEGORY = TRACKED.index(CATEGORIES[0])


@dataclass(slots=True)
class LearnerState:
    """The newest that is known of one learner, and its loss curves."""

    learner: str
    generation: int = 0
    step: int = 0
    restarts: int = 0
    loss: float = math.nan
    behind: int = 0
    member: str = ""
    link_up: bool = True
    finished: bool = False
    report_ns: int = 0
    """Duration of its last report."""
    last_ns: int = 0
    """When it last reported steps."""
    loss_by_tokens: Curve = field(default_factory=Curve)
    loss_by_time: Curve = field(default_factory=Curve)


@dataclass(frozen=True, slots=True)
class Evaluation:
    t_ns: int
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class LogLine:
    t_ns: int
    text: str
    tone: str
    """bad, good, or plain"""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The fate of every token: processed = merged + pending + the sum of discarded."""

    processed: int
    merged: int
    pending: int
    discarded: dict[str, int]


class RunState:
    """The state of a run after the events applied so far."""

    def __init__(self) -> None:
        self.run: RunStarted | None = None
        self.layout: LayoutFixed | None = None
        self.finished: RunFinished | None = None
        self.stats: SyncerStats | None = None
        self.first_ns: int | None = None
        self.last_ns = 0
        self.learners: dict[str, LearnerState] = {}
        self.rounds = RoundBook()
        self.evaluations: Sample[Evaluation] = Sample()
        self.last_evaluation: Evaluation | None = None
        self.log: deque[LogLine] = deque(maxlen=LOG_LINES_MAX)
        self._faults = FaultBook()
        self._goodput = GoodputReducer()
        self._pushed_bytes = 0
        self._fetched_bytes = 0
        self._tokens = 0
        self._steps = 0

    # ------------------------------------------------------------ reducing

    def apply(self, t_ns: int, event: Event) -> None:
        """Take one event. Unknown learners appear on their first sign of life."""
        if self.first_ns is None:
            self.first_ns = t_ns
        self.last_ns = max(self.last_ns, t_ns)
        self._goodput.apply(t_ns, event)
        self._faults.apply(t_ns, event)
        if self._faults.moments_ns:
            self._pin_faults()
        self.rounds.apply(t_ns, event)
        if isinstance(event, LearnerSteps):
            self._on_steps(t_ns, event)
        elif isinstance(event, SyncerStats):
            self.stats = event
        elif isinstance(event, LearnerPushed):
            self._pushed_bytes += event.bytes
        elif isinstance(event, LearnerFetched):
            self._fetched_bytes += event.bytes
        elif isinstance(event, LearnerEvaluated):
            # Counted here where possible, so that it lies on the same axis as the training loss.
            self.last_evaluation = Evaluation(t_ns, self._tokens or event.tokens_seen, event.eval_loss)
            self.evaluations.add(self.last_evaluation)
        elif isinstance(event, RunStarted):
            self.run = event
        elif isinstance(event, LayoutFixed):
            self.layout = event
        elif isinstance(event, RunFinished):
            self.finished = event
            self._say(t_ns, f"run finished: {event.reason}", "good")
        else:
            self._on_rare(t_ns, event)

    def _pin_faults(self) -> None:
        for moment_ns in self._faults.moments_ns:
            for account in self._goodput.accounts.values():
                account.track.pin(moment_ns - BEFORE_NS_MAX - PIN_MARGIN_NS, moment_ns + PIN_MARGIN_NS)
        self._faults.moments_ns.clear()

    def _learner(self, learner: str) -> LearnerState:
        if learner not in self.learners:
            self.learners[learner] = LearnerState(learner)
            self.learners = dict(sorted(self.learners.items(), key=lambda item: natural_key(item[0])))
        return self.learners[learner]

    def _on_steps(self, t_ns: int, event: LearnerSteps) -> None:
        one = self._learner(event.learner)
        self._tokens += event.tokens
        self._steps += event.steps
        one.step, one.generation, one.behind = event.step, event.generation, event.fragments_behind
        one.report_ns = event.compute_ns + event.stall_ns + event.adopt_ns + event.snapshot_ns + event.overhead_ns
        one.last_ns, one.finished = t_ns, False
        if math.isfinite(event.loss):
            one.loss = event.loss
            one.loss_by_tokens.add(self._tokens, event.loss)
            one.loss_by_time.add(t_ns, event.loss)

    def _on_rare(self, t_ns: int, event: Event) -> None:
        """Membership, processes, faults: what changes a learner's state, and the lines of the log."""
        if isinstance(event, ProcessStarted):
            if event.role == "learner":
                self._learner(event.id).finished = False
        elif isinstance(event, LearnerStarted):
            self._learner(event.learner).finished = False
        elif isinstance(event, LearnerJoined):
            self._on_joined(t_ns, event)
        elif isinstance(event, ProcessExited):
            self._on_exited(t_ns, event)
        elif isinstance(event, LearnerFinished):
            self._learner(event.learner).finished = True
        elif isinstance(event, MemberChanged):
            self._learner(event.learner).member = event.state
            if event.state in ("away", "lost"):
                self._say(t_ns, f"{event.learner} is {event.state} ({event.reason})", "bad")
        elif isinstance(event, LearnerLink):
            self._on_link(t_ns, event)
        else:
            self._on_notice(t_ns, event)

    def _on_notice(self, t_ns: int, event: Event) -> None:
        if isinstance(event, FaultInjected):
            if event.until_ns:
                detail = f": {event.detail}" if event.detail else ""
                self._say(t_ns, f"{event.target} {event.fault}{detail}", "bad")
        elif isinstance(event, FaultEnded):
            self._say(t_ns, f"{event.target} {event.fault} is over", "good")
        elif isinstance(event, RoundAborted):
            self._say(t_ns, f"round {event.round} of fragment {event.fragment} aborted: {event.reason}", "bad")
        elif isinstance(event, ContributionRefused):
            self._say(t_ns, f"{event.learner} fragment {event.fragment} refused: {event.code}", "bad")
        elif isinstance(event, Warned):
            self._say(t_ns, f"{event.source}: {event.text}", "bad")

    def _on_joined(self, t_ns: int, event: LearnerJoined) -> None:
        one = self._learner(event.learner)
        again = one.last_ns > 0
        one.generation, one.member, one.link_up = event.generation, "active", True
        if not again:
            one.step = event.step
        verb = "rejoined" if again else "joined"
        tail = f" (generation {event.generation})" if again else ""
        self._say(t_ns, f"{event.learner} {verb} at step {event.step:,}{tail}", "good" if again else "plain")

    def _on_link(self, t_ns: int, event: LearnerLink) -> None:
        """Only a link that is lost in the middle and one that comes back are news."""
        one = self._learner(event.learner)
        if event.up != one.link_up and one.member != "left":
            detail = f" ({event.detail})" if event.detail else ""
            text = f"{event.learner} link {'up again' if event.up else 'down'}{detail}"
            self._say(t_ns, text, "good" if event.up else "bad")
        one.link_up = event.up

    def _on_exited(self, t_ns: int, event: ProcessExited) -> None:
        if self.finished is not None:
            return
        if event.code == 0:
            if event.role == "learner":
                self._learner(event.id).finished = True
            return
        if event.role == "learner":
            one = self._learner(event.id)
            if one.finished:
                return
            one.restarts += 1
        self._say(t_ns, f"{event.id} {exit_text(event.code)}", "bad")

    def _say(self, t_ns: int, text: str, tone: str = "plain") -> None:
        if not self.log or self.log[-1].text != text:
            self.log.append(LogLine(t_ns, text, tone))

    # ------------------------------------------------------------ reading

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
    def faults(self) -> list[Fault]:
        return self._faults.faults

    @property
    def eval_loss(self) -> float:
        """The loss of the published model: the final one, else the last one measured."""
        if self.finished is not None and math.isfinite(self.finished.eval_loss):
            return self.finished.eval_loss
        return self.last_evaluation.loss if self.last_evaluation is not None else math.nan

    @property
    def bytes_up(self) -> int:
        return self.stats.bytes_up if self.stats is not None else self._pushed_bytes

    @property
    def bytes_down(self) -> int:
        return self.stats.bytes_down if self.stats is not None else self._fetched_bytes

    @property
    def data_parallel_bytes(self) -> int:
        """What data-parallel would have sent for the steps so far; 0 when the number of parameters is not known."""
        count = max(len(self.learners), self.run.learners if self.run is not None else 0)
        return data_parallel_bytes(self.parameters, self.learner_steps, count)

    @property
    def ledger(self) -> Ledger:
        """From the syncer. Without one (dp, single) every processed token is in the model."""
        if self.stats is None:
            return Ledger(self._tokens, self._tokens, 0, {})
        stats = self.stats
        return Ledger(stats.tokens_processed, stats.tokens_merged, stats.tokens_pending, dict(stats.tokens_discarded))

    def goodput(self) -> Goodput:
        return self._goodput.result()

    def account(self, learner: str) -> Account | None:
        return self._goodput.accounts.get(learner)

    def fault_costs(self) -> list[FaultCost]:
        return fault_costs(self.faults, self._goodput.accounts, self.end_ns)

    def rates(self, now_ns: int | None = None) -> dict[str, float]:
        """Recent tokens per second of every learner."""
        return {learner: self._recent(learner, now_ns)[_TOKENS] for learner in self.learners}

    def recent_shares(self, learner: str, now_ns: int | None = None) -> dict[str, float]:
        """The recent share of each category in the learner's time; empty before its first report."""
        account = self.account(learner)
        if account is not None and account.mood in ("down", "recovery"):
            return {name: float(name == account.mood) for name in CATEGORIES}
        seconds = self._recent(learner, now_ns)[_FIRST_CATEGORY:]
        total = sum(seconds)
        return dict(zip(CATEGORIES, (s / total for s in seconds), strict=True)) if total > 0 else {}

    def _recent(self, learner: str, now_ns: int | None) -> tuple[float, ...]:
        """Each tracked total per second, lately."""
        account, one = self.account(learner), self.learners[learner]
        if account is None or account.track.start_ns is None or account.track.end_ns is None:
            return (0.0,) * len(TRACKED)
        span_ns = max(RECENT_NS, 3 * one.report_ns)
        end_ns = account.track.end_ns
        if now_ns is not None and now_ns - end_ns > span_ns:
            end_ns = now_ns
        begin_ns = max(end_ns - span_ns, account.track.start_ns)
        totals = account.track.between(begin_ns, end_ns)
        return tuple(total * SECOND_NS / max(1, end_ns - begin_ns) for total in totals)

    def states(self, now_ns: int | None = None) -> dict[str, str]:
        """joining, active, slow, away, down or left, for every learner."""
        rates = self.rates(now_ns)
        usual = median([rate for rate in rates.values() if rate > 0] or [0.0])
        return {learner: self._state(one, rates[learner], usual) for learner, one in self.learners.items()}

    def _state(self, one: LearnerState, rate: float, usual: float) -> str:
        account = self.account(one.learner)
        if one.finished or one.member == "left":
            return "left"
        if account is not None and account.mood == "down":
            return "down"
        if account is None or account.steps == 0 or account.mood == "recovery":
            return "joining"
        if one.member in ("away", "lost") or not one.link_up:
            return "away"
        slowed = any(f.target == one.learner and f.end_ns is None and f.until_ns for f in self.faults)
        return "slow" if slowed or rate < SLOW_SHARE * usual else "active"


def natural_key(text: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts "learner-10" after "learner-2"."""
    parts: list[tuple[int, int | str]] = []
    digits = ""
    for char in [*text, ""]:
        if char.isdecimal():
            digits += char
            continue
        if digits:
            parts.append((0, int(digits)))
            digits = ""
        if char:
            parts.append((1, char))
    return tuple(parts)


def summarize(run_folder: str | Path) -> RunState:
    """The state of a run folder after all of its events."""
    state = RunState()
    for t_ns, _, event in read_events(run_folder):
        state.apply(t_ns, event)
    return state
