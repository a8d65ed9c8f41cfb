"""The rounds of a run, as the events tell them: a pure reducer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from atoll.observe import events
from atoll.observe.series import Curve, Sample

RECENT_ROUNDS = 32
OPEN_ROUNDS_MAX = 10_000
"""Rounds whose end was never seen (a torn file) are forgotten beyond this many, oldest first."""


@dataclass(slots=True)
class RoundSeen:
    """One round; times are 0 until they are known."""

    round: int
    fragment: int
    quorum: int = 0
    attempts: int = 1
    asked: list[str] = field(default_factory=list)
    launch_ns: int = 0
    close_ns: int = 0
    commit_ns: int = 0
    quorum_wait_ns: int = 0
    grace_wait_ns: int = 0
    close_reason: str = ""
    contributors: list[str] = field(default_factory=list)
    carried: int = 0
    version: int = 0
    tokens: int = 0
    update_bytes: int = 0
    rho: float = float("nan")
    received_ns: dict[str, int] = field(default_factory=dict)

    @property
    def late(self) -> list[str]:
        """Who was asked and is not in this commit."""
        return [learner for learner in self.asked if learner not in self.contributors]


@dataclass(frozen=True, slots=True)
class Mark:
    """A contribution on a learner's lane: when it arrived, and whether it made its round or was carried to the next."""

    t_ns: int
    fragment: int
    round: int
    late: bool


class RoundHistory:
    """Open rounds, the recent ones whole, a sample of all, and each learner's contributions."""

    def __init__(self) -> None:
        self.open: dict[tuple[int, int], RoundSeen] = {}
        self.recent: deque[RoundSeen] = deque(maxlen=RECENT_ROUNDS)
        self.sample: Sample[RoundSeen] = Sample()
        self.marks: dict[str, Sample[Mark]] = {}
        self.rho = Curve()  # against time in ns
        self.launched = False
        """Whether there has been a round at all."""
        self.commits = 0
        self.aborted = 0
        self.merged = 0
        self.late = 0
        self.refused: dict[str, int] = {}
        self.versions: dict[int, tuple[int, int]] = {}
        """Of each fragment: the newest version, and when it was committed."""

    def apply(self, t_ns: int, event: events.Event) -> None:
        if isinstance(event, events.RoundLaunched):
            self._launched(t_ns, event)
        elif isinstance(event, events.ContributionReceived):
            self._received(t_ns, event)
        elif isinstance(event, events.RoundClosed):
            self._closed(t_ns, event)
        elif isinstance(event, events.Committed):
            self._committed(t_ns, event)
        elif isinstance(event, events.RoundAborted):
            self.aborted += 1
        elif isinstance(event, events.ContributionRefused):
            self.refused[event.code] = self.refused.get(event.code, 0) + 1
        elif isinstance(event, events.RoundsFolded):
            self.commits += event.commits
            self.merged += event.merged
            self.late += event.late
            self.launched = self.launched or event.commits > 0
        elif isinstance(event, events.SyncerStarted):
            self.open.clear()  # they died with the syncer before

    def _round(self, fragment: int, number: int) -> RoundSeen:
        key = (fragment, number)
        if key not in self.open:
            self.open[key] = RoundSeen(number, fragment)
            if len(self.open) > OPEN_ROUNDS_MAX:
                del self.open[next(iter(self.open))]
        return self.open[key]

    def _launched(self, t_ns: int, event: events.RoundLaunched) -> None:
        self.launched = True
        entry = self._round(event.fragment, event.round)
        entry.attempts = max(entry.attempts, event.attempt)
        entry.asked, entry.quorum = event.asked, event.quorum
        entry.launch_ns = entry.launch_ns or t_ns

    def _received(self, t_ns: int, event: events.ContributionReceived) -> None:
        if event.late:
            self.late += 1
            self._mark(event.learner, Mark(t_ns, event.fragment, event.round, late=True))
        elif (event.fragment, event.round) in self.open:
            self.open[event.fragment, event.round].received_ns[event.learner] = t_ns

    def _closed(self, t_ns: int, event: events.RoundClosed) -> None:
        entry = self._round(event.fragment, event.round)
        entry.close_ns, entry.contributors, entry.carried = t_ns, event.contributors, event.carried
        entry.quorum_wait_ns, entry.grace_wait_ns = event.quorum_ns, event.grace_ns
        entry.close_reason = event.reason

    def _committed(self, t_ns: int, event: events.Committed) -> None:
        entry = self._round(event.fragment, event.round)
        del self.open[event.fragment, event.round]
        entry.commit_ns, entry.version, entry.contributors = t_ns, event.version, event.contributors
        entry.tokens, entry.update_bytes, entry.rho = event.tokens, event.update_bytes, event.rho
        for learner in event.contributors:
            # One that is merged without having arrived in this round was carried: it was marked when it came in late.
            if learner in entry.received_ns:
                self._mark(learner, Mark(entry.received_ns[learner], event.fragment, event.round, late=False))
        self.versions[event.fragment] = (event.version, t_ns)
        self.commits += 1
        self.merged += len(event.contributors)
        self.rho.add(t_ns, event.rho)
        self.recent.append(entry)
        self.sample.add(entry)

    def _mark(self, learner: str, mark: Mark) -> None:
        self.marks.setdefault(learner, Sample()).add(mark)
