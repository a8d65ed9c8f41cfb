"""Goodput: one pure reducer over the event stream, the same for a live, an old and a simulated run.

Goodput = seconds of learner compute whose tokens were merged or are pending / seconds allocated (design, section 8).

The window opens where the first LearnerSteps of the run began (its time minus its own duration) and closes with the
last LearnerSteps of any learner: starting up before and evaluating after are not training. A learner id is a slot. A
slot is allocated for the whole window, except that one whose first sign of life (ProcessStarted, LearnerStarted or
LearnerSteps) comes after the window opened is a late join and allocated from that sign on, and one that says
LearnerFinished, or whose process exits with status 0, gives its slot back then.

Every allocated nanosecond of a slot is in exactly one of these, so that they add up to what was allocated:

    compute, stall, adopt, snapshot, overhead    what LearnerSteps reports
    down        from the last report before a process ended (ProcessExited, or a LearnerStarted of a successor) until
                the next process starts: what a killed process had not reported yet is lost with it
    recovery    from there until the first step of the new process begins
    evaluate    a stretch without reports in which a LearnerEvaluated falls: testing the published model, not training
    idle        allocated and up but reporting nothing: starting at the beginning, or an unfinished last step

The useful share of a learner's compute is 1 - discarded tokens / processed tokens. Discarded are (a) its own
LearnerDiscarded, which are per fragment and count by the fragment's share of the parameters (LayoutFixed; without one,
evenly over the fragments seen); (b) what the last SyncerStats counts as discarded beyond the sum of (a), such as
progress lost with a process that was killed: shared out over the learners that failed, by number of failures; if none
failed, over all by tokens. Runs without a syncer (dp, single) discard nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.core.config import SECOND_NS
from atoll.observe.events import (
    Event,
    LayoutFixed,
    LearnerDiscarded,
    LearnerEvaluated,
    LearnerFinished,
    LearnerJoined,
    LearnerStarted,
    LearnerSteps,
    ProcessExited,
    ProcessStarted,
    RunFinished,
    RunStarted,
    SyncerStats,
)
from atoll.observe.series import Track

REPORTED = ("compute", "stall", "adopt", "snapshot", "overhead")
CATEGORIES = (*REPORTED, "evaluate", "recovery", "down", "idle")
TRACKED = ("steps", "tokens", *CATEGORIES)
"""The columns of an account's track: running totals against time, categories in nanoseconds."""


@dataclass(frozen=True, slots=True)
class LearnerGoodput:
    """Where the allocated time of one slot went. `seconds` has every category and adds up to `allocated_s`."""

    learner: str
    allocated_s: float
    seconds: dict[str, float]
    tokens_processed: int
    tokens_discarded: float
    failures: int

    @property
    def shares(self) -> dict[str, float]:
        """The categories as shares of the allocated time."""
        return {name: s / self.allocated_s if self.allocated_s > 0 else 0.0 for name, s in self.seconds.items()}

    @property
    def useful_s(self) -> float:
        if self.tokens_processed <= 0:
            return self.seconds["compute"]
        return self.seconds["compute"] * max(0.0, 1.0 - self.tokens_discarded / self.tokens_processed)


@dataclass(frozen=True, slots=True)
class Goodput:
    window_s: float
    learners: dict[str, LearnerGoodput]

    @property
    def allocated_s(self) -> float:
        return sum(one.allocated_s for one in self.learners.values())

    @property
    def share(self) -> float:
        """The goodput of the run, from 0 to 1; 0 before the first step."""
        allocated_s = self.allocated_s
        return sum(one.useful_s for one in self.learners.values()) / allocated_s if allocated_s > 0 else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """The categories summed over learners."""
        return {c: sum(one.seconds[c] for one in self.learners.values()) for c in CATEGORIES}


class Account:
    """The time of one slot, charged up to `cursor_ns` and no further."""

    def __init__(self, first_sign_ns: int) -> None:
        self.first_sign_ns = first_sign_ns
        self.cursor_ns: int | None = None
        self.charged_ns: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
        self.mood = "idle"  # what time that nobody reports is charged to
        self.steps = 0
        self.tokens = 0
        self.failures = 0
        self.finished_ns: int | None = None
        self.discarded: dict[int, float] = {}
        self.track = Track(len(TRACKED))
        self._unreported: list[tuple[str, int]] = []  # charges since the last report

    def charge_until(self, t_ns: int, category: str) -> None:
        if self.cursor_ns is None or t_ns <= self.cursor_ns:
            return
        self._mark()
        self.charged_ns[category] += t_ns - self.cursor_ns
        self._unreported.append((category, t_ns - self.cursor_ns))
        self.cursor_ns = t_ns
        self._mark()

    def _mark(self) -> None:
        if self.cursor_ns is not None:
            self.track.add(self.cursor_ns, (self.steps, self.tokens, *self.charged_ns.values()))

    def report(self, t_ns: int, event: LearnerSteps) -> None:
        parts = [(name, max(0, getattr(event, f"{name}_ns"))) for name in REPORTED]
        duration_ns = sum(ns for _, ns in parts)
        self._mark()
        self.charge_until(t_ns - duration_ns, self.mood)
        if self.cursor_ns is not None and t_ns > self.cursor_ns and duration_ns > 0:
            # A report longer than the time that is left (clock jitter) is scaled to fit, so that sums stay exact.
            scale = (t_ns - self.cursor_ns) / duration_ns
            for name, ns in parts:
                self.charged_ns[name] += ns * scale
            self.cursor_ns = t_ns
        self.mood = "idle"
        self.finished_ns = None
        self.steps += event.steps
        self.tokens += event.tokens
        self._unreported.clear()
        self._mark()

    def failed(self, t_ns: int) -> None:
        self.charge_until(t_ns, "down")
        if self.mood != "down":
            self.failures += 1
        self.mood = "down"

    def finished(self, t_ns: int) -> None:
        if self.finished_ns is None:
            self.charge_until(t_ns, self.mood)
            self.finished_ns = t_ns

    def charged_by(self, end_ns: int) -> dict[str, float]:
        """The categories at the end of the window, which may be later than the last charge, or earlier than it: a death
        that is noticed after the last report of the run does not lengthen the run."""
        charged_ns = dict(self.charged_ns)
        if self.cursor_ns is None:
            return charged_ns
        if self.finished_ns is None:
            charged_ns[self.mood] += max(0, end_ns - self.cursor_ns)
        excess_ns = self.cursor_ns - end_ns
        for category, ns in reversed(self._unreported):
            if excess_ns <= 0:
                break
            charged_ns[category] -= min(ns, excess_ns)
            excess_ns -= ns
        return charged_ns

    def process_started(self, t_ns: int) -> None:
        if self.finished_ns is not None:
            return
        if self.steps == 0:  # it has nothing to recover: starting, perhaps once more, after a crash at import
            self.charge_until(t_ns, self.mood)
            self.mood = "idle"
            return
        if self.mood not in ("down", "recovery"):  # its predecessor ended without anybody saying so
            self.failed(t_ns)
        self.charge_until(t_ns, self.mood)
        self.mood = "recovery"


class GoodputReducer:
    """Feed events in time order with `apply`; `result` can be asked at any time."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.start_ns: int | None = None
        self.end_ns: int | None = None
        self._fragment_shares: list[float] = []
        self._pids: dict[str, int] = {}
        self._tokens_discarded = 0
        self._over = False

    def apply(self, t_ns: int, event: Event) -> None:
        if isinstance(event, LearnerSteps):
            self._steps(t_ns, event)
        elif isinstance(event, ProcessStarted):
            if event.role == "learner":
                self._process_started(t_ns, event.id, event.pid)
        elif isinstance(event, LearnerStarted):
            self._process_started(t_ns, event.learner, event.pid)
        elif isinstance(event, ProcessExited):
            self._process_exited(t_ns, event)
        elif isinstance(event, LearnerJoined):
            self._account(t_ns, event.learner)
        elif isinstance(event, LearnerEvaluated):
            account = self._account(t_ns, event.learner)
            if account.mood == "idle":
                account.mood = "evaluate"
        elif isinstance(event, LearnerFinished):
            self._account(t_ns, event.learner).finished(t_ns)
        elif isinstance(event, LearnerDiscarded):
            discarded = self._account(t_ns, event.learner).discarded
            discarded[event.fragment] = discarded.get(event.fragment, 0.0) + event.tokens
        elif isinstance(event, LayoutFixed) and event.parameters > 0:
            self._fragment_shares = [count / event.parameters for count in event.fragment_parameters]
        elif isinstance(event, RunStarted) and not self._fragment_shares and event.fragments > 0:
            self._fragment_shares = [1.0 / event.fragments] * event.fragments
        elif isinstance(event, RunFinished):
            self._over = True  # the launcher ends what is left; those are not failures
        elif isinstance(event, SyncerStats):
            self._tokens_discarded = sum(event.tokens_discarded.values())

    def _account(self, t_ns: int, learner: str) -> Account:
        if learner not in self.accounts:
            account = self.accounts[learner] = Account(t_ns)
            if self.start_ns is not None:
                account.cursor_ns = max(self.start_ns, t_ns)
        return self.accounts[learner]

    def _steps(self, t_ns: int, event: LearnerSteps) -> None:
        begin_ns = t_ns - sum(max(0, getattr(event, f"{name}_ns")) for name in REPORTED)
        if self.start_ns is None:
            self.start_ns = begin_ns
            for account in self.accounts.values():
                account.cursor_ns = max(begin_ns, account.first_sign_ns)
        self._account(begin_ns, event.learner).report(t_ns, event)
        self.end_ns = max(t_ns, self.end_ns or t_ns)

    def _process_started(self, t_ns: int, learner: str, pid: int) -> None:
        """The launcher and the process itself both say that it started: the first of the two counts."""
        account = self._account(t_ns, learner)
        if self._pids.get(learner) != pid:
            self._pids[learner] = pid
            account.process_started(t_ns)

    def _process_exited(self, t_ns: int, event: ProcessExited) -> None:
        # The exit of a predecessor may be noticed only after its successor has begun; it is over, and counted, already.
        known = self._pids.get(event.id, event.pid) == event.pid
        if event.role == "learner" and event.id in self.accounts and known:
            account = self.accounts[event.id]
            if event.code == 0:
                account.finished(t_ns)
            elif account.finished_ns is None and not self._over:
                account.failed(t_ns)

    def result(self) -> Goodput:
        """Where the time went up to the last report. Events may go on being applied afterwards."""
        if self.start_ns is None or self.end_ns is None:
            return Goodput(0.0, {})
        discards = self._discarded_tokens()
        learners = {}
        for learner, account in sorted(self.accounts.items()):
            if account.cursor_ns is None or account.first_sign_ns >= self.end_ns:
                continue
            learners[learner] = self._close(learner, account, discards[learner])
        return Goodput((self.end_ns - self.start_ns) / SECOND_NS, learners)

    def _close(self, learner: str, account: Account, tokens_discarded: float) -> LearnerGoodput:
        assert self.end_ns is not None
        seconds = {name: ns / SECOND_NS for name, ns in account.charged_by(self.end_ns).items()}
        return LearnerGoodput(
            learner=learner,
            allocated_s=sum(seconds.values()),
            seconds=seconds,
            tokens_processed=account.tokens,
            tokens_discarded=tokens_discarded,
            failures=account.failures,
        )

    def _discarded_tokens(self) -> dict[str, float]:
        shares = self._fragment_shares
        if not shares:
            count = 1 + max((p for a in self.accounts.values() for p in a.discarded), default=0)
            shares = [1.0 / count] * count
        own = {
            learner: sum(tokens * (shares[p] if 0 <= p < len(shares) else 0.0) for p, tokens in a.discarded.items())
            for learner, a in self.accounts.items()
        }
        rest = max(0.0, self._tokens_discarded - sum(own.values()))
        weights: dict[str, float] = {learner: a.failures for learner, a in self.accounts.items()}
        if not any(weights.values()):
            weights = {learner: a.tokens for learner, a in self.accounts.items()}
        total = sum(weights.values())
        return {learner: own[learner] + (rest * weights[learner] / total if total else 0.0) for learner in own}


def measure_goodput(events: Iterable[tuple[int, str, Event]]) -> Goodput:
    """The goodput of a stream as `read_events` gives it."""
    reducer = GoodputReducer()
    for t_ns, _, event in events:
        reducer.apply(t_ns, event)
    return reducer.result()
