"""Goodput: one pure reducer over the event stream, the same for a live, an old and a simulated run.

Goodput = seconds of learner compute whose tokens were merged or are pending / seconds allocated (design, section 8).

The window of a launch opens where its first LearnerSteps began (the event's time minus its own duration) and closes
with its last LearnerSteps of any learner: starting up before and evaluating after are not training. A run that was
stopped and resumed has one window per launch; the pauses between them (see `launches`), whether seconds or days, are
neither allocated nor down.

A learner id is a slot. In each launch a slot is allocated for the whole window, except that one whose first sign of
life (ProcessStarted, LearnerStarted, LearnerJoined or LearnerSteps) comes after the window opened is a late join and
allocated from that sign on, and that one without a sign is not allocated at all. A slot that says LearnerFinished, or
whose process exits with status 0 (or by SIGTERM before its first step), is given back then, and allocated again from
its next sign of life.

Every allocated nanosecond of a slot is in exactly one of these, so that they add up to what was allocated:

    compute, stall, adopt, snapshot, overhead    what LearnerSteps reports
    down        from the last report before a process ended (ProcessExited, or a LearnerStarted of a successor) until
                the next process starts: what a killed process had not reported yet is lost with it
    recovery    from there until the first step of the new process begins
    evaluate    a stretch without reports in which a LearnerEvaluated falls: testing the published model, not training
    idle        allocated and up but reporting nothing: starting, or an unfinished last step

Copying a checkpoint out is not training. It happens inside `learner.step`, so LearnerSteps holds it already, as
snapshot; where the reports hold less of snapshot and overhead than the checkpoints took, they held the difference as
compute, and it is moved to overhead.

The useful share of a learner's compute is 1 - discarded tokens / processed tokens. Discarded are (a) its own
LearnerDiscarded, which are per fragment and count by the fragment's share of the parameters (LayoutFixed; without one,
evenly over the fragments seen); (b) what the last SyncerStats counts as discarded beyond the sum of (a), such as
progress lost with a process that was killed: shared out over the learners that failed, by number of failures; if none
failed, over all by tokens. Runs without a syncer (dp, single) discard nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.core import SECOND_NS
from atoll.observe import events
from atoll.observe.account import CATEGORIES, TimeAccount
from atoll.observe.launches import STOP_CODES, LaunchBook, report_begin_ns


@dataclass(frozen=True, slots=True)
class LearnerGoodput:
    """Where the allocated time of one slot went. `seconds` has every category and adds up to `allocated_s`."""

    learner: str
    allocated_s: float
    seconds: dict[str, float]
    tokens_processed: int
    tokens_discarded: float
    failures: int
    checkpoint_s: float = 0.0
    """Copying checkpoints out, in the training thread; part of snapshot and overhead."""

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


class GoodputReducer:
    """Feed events in time order with `apply`; `result` can be asked at any time."""

    def __init__(self) -> None:
        self.accounts: dict[str, TimeAccount] = {}
        self.launches = LaunchBook()
        self.start_ns: int | None = None
        self.end_ns: int | None = None
        self._opened_ns: int | None = None  # where the window of this launch opened
        self._fragment_shares: list[float] = []
        self._pids: dict[str, int] = {}  # of the newest process of each learner
        self._children: dict[str, int] = {}  # the same as its launcher knows it: perhaps a shell around it
        self._silent: set[str] = set()  # learners whose launched process has not spoken yet
        self._tokens_discarded = 0
        self._over = False

    def apply(self, t_ns: int, event: events.Event) -> None:
        if self.launches.apply(t_ns, event):
            self._new_launch()
        if isinstance(event, events.LearnerSteps):
            self._steps(t_ns, event)
        elif isinstance(event, events.ProcessStarted):
            if event.role == "learner":
                self._children[event.id] = event.pid
                self._silent.add(event.id)
                self._process_started(t_ns, event.id, event.pid)
        elif isinstance(event, events.LearnerStarted):
            self._says_started(t_ns, event)
        elif isinstance(event, events.ProcessExited):
            self._process_exited(t_ns, event)
        elif isinstance(event, events.LearnerJoined):
            self._account(t_ns, event.learner).seen(t_ns, self._opened_ns)
        elif isinstance(event, events.LearnerEvaluated):
            account = self._account(t_ns, event.learner)
            if account.mood == "idle":
                account.mood = "evaluate"
        elif isinstance(event, events.LearnerFinished):
            self._account(t_ns, event.learner).finished(t_ns)
        elif isinstance(event, events.RunFinished):
            self._over = True  # the launcher ends what is left; those are not failures
            for account in self.accounts.values():
                account.excuse(self.end_ns or t_ns)
        else:
            self._count(t_ns, event)

    def _count(self, t_ns: int, event: events.Event) -> None:
        """Events that change sums but nobody's state."""
        if isinstance(event, events.LearnerDiscarded):
            discarded = self._account(t_ns, event.learner).discarded
            discarded[event.fragment] = discarded.get(event.fragment, 0.0) + event.tokens
        elif isinstance(event, events.CheckpointWritten):
            self._account(t_ns, event.learner).captured_ns += max(0, event.capture_ns)
        elif isinstance(event, events.LayoutFixed) and event.parameters > 0:
            self._fragment_shares = [count / event.parameters for count in event.fragment_parameters]
        elif isinstance(event, events.RunStarted) and not self._fragment_shares and event.fragments > 0:
            self._fragment_shares = [1.0 / event.fragments] * event.fragments
        elif isinstance(event, events.SyncerStats):
            self._tokens_discarded = sum(event.tokens_discarded.values())

    def _new_launch(self) -> None:
        for account in self.accounts.values():
            account.stopped(self.end_ns)
        self._opened_ns = None
        self._over = False
        for known in (self._pids, self._children, self._silent):
            known.clear()

    def _account(self, t_ns: int, learner: str) -> TimeAccount:
        if learner not in self.accounts:
            self.accounts[learner] = TimeAccount()
            self.accounts[learner].seen(t_ns, self._opened_ns)
        return self.accounts[learner]

    def _steps(self, t_ns: int, event: events.LearnerSteps) -> None:
        begin_ns = report_begin_ns(t_ns, event)
        if self._opened_ns is None:
            # Never before what an earlier launch has reported: its window is closed.
            self._opened_ns = max(begin_ns, self.end_ns or begin_ns)
            self.start_ns = self._opened_ns if self.start_ns is None else self.start_ns
            for account in self.accounts.values():
                account.open(self._opened_ns)
        account = self._account(begin_ns, event.learner)
        account.seen(begin_ns, self._opened_ns)
        account.report(t_ns, event)
        self.end_ns = max(t_ns, self.end_ns or t_ns)

    def _says_started(self, t_ns: int, event: events.LearnerStarted) -> None:
        if event.learner in self._silent:
            self._pids[event.learner] = event.pid  # its launcher has said so already, with the pid that it knows
        self._silent.discard(event.learner)
        self._process_started(t_ns, event.learner, event.pid)

    def _process_started(self, t_ns: int, learner: str, pid: int) -> None:
        """The launcher and the process itself both say that it started: the first of the two counts."""
        new = learner not in self.accounts
        account = self._account(t_ns, learner)
        if self._pids.get(learner) == pid:
            return
        self._pids[learner] = pid
        if not account.seen(t_ns, self._opened_ns) and not new:
            account.process_started(t_ns)

    def _process_exited(self, t_ns: int, event: events.ProcessExited) -> None:
        # The exit of a predecessor may be noticed only after its successor has begun; it is over, and counted, already.
        known = self._children.get(event.id, self._pids.get(event.id, event.pid)) == event.pid
        self._silent.discard(event.id)
        if event.role == "learner" and event.id in self.accounts and known:
            account = self.accounts[event.id]
            if account.sign_ns is None:
                return  # of an earlier launch, which is over as a whole
            if event.code == 0 or (event.code in STOP_CODES and not account.stepping):
                account.finished(t_ns)  # also one that was asked to leave before its first step
            elif account.finished_ns is None and not self._over:
                account.failed(t_ns, event.code)

    def result(self) -> Goodput:
        """Where the time went up to the last report. Events may go on being applied afterwards."""
        if self.start_ns is None or self.end_ns is None:
            return Goodput(0.0, {})
        discards = self._discarded_tokens()
        learners = {}
        for learner, account in sorted(self.accounts.items()):
            if any(account.charged_ns.values()) or (account.cursor_ns is not None and account.cursor_ns < self.end_ns):
                learners[learner] = self._close(learner, account, discards[learner])
        return Goodput(self.launches.elapsed_ns(self.start_ns, self.end_ns) / SECOND_NS, learners)

    def _close(self, learner: str, account: TimeAccount, tokens_discarded: float) -> LearnerGoodput:
        assert self.end_ns is not None
        seconds = {name: ns / SECOND_NS for name, ns in account.closed_by(self.end_ns).items()}
        return LearnerGoodput(
            learner=learner,
            allocated_s=sum(seconds.values()),
            seconds=seconds,
            tokens_processed=account.tokens,
            tokens_discarded=tokens_discarded,
            failures=account.failures,
            checkpoint_s=account.captured_ns / SECOND_NS,
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


def measure_goodput(stream: Iterable[tuple[int, str, events.Event]]) -> Goodput:
    """The goodput of a stream as `read_events` gives it."""
    reducer = GoodputReducer()
    for t_ns, _, event in stream:
        reducer.apply(t_ns, event)
    return reducer.result()
