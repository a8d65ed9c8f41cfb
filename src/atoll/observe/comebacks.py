"""Learners that came back: from a restart (with which state), and from a lost link (with how much in one contribution).

A learner that is cut off trains on. Its first contributions after that carry all of it at once, one for each fragment,
so they weigh more than those of the others. A return keeps the one with the most steps among the first commit of each
fragment that the learner is in again.

Nobody alone knows how long a learner was cut off. It may notice a dead connection only when packets pass again, and
then have a new one within a tenth of a second; the syncer may hear nothing for a minute before it says so. So the time
lasts from the first of these that is true to the end of the last: the learner has no link (LearnerLink), the syncer
does not hear of it (MemberChanged, and for how long it had not), a partition of the chaos plan is on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.core import SECOND_NS
from atoll.observe import events
from atoll.observe.durability import Cost

RECOVERIES_MAX = 2000
RETURNS_MAX = 2000
"""Lists are cut at these lengths; the counts by rung go on."""
SILENCE_NS_MIN = 4 * SECOND_NS
"""Learners say something every 2 s: silence of twice that was more than the pause between two words."""
CUTTING, STOPPING = "partition", "freeze"
"""Faults of a chaos plan: the one cuts a learner off; what the other stops is silent and not cut off."""
FRESH = "fresh"
"""The rung of a learner that is as new as the run: it recovered nothing."""


@dataclass(frozen=True, slots=True)
class LearnerRecovery:
    t_ns: int
    learner: str
    generation: int
    step: int
    rung: str
    detail: str
    wait_ns: int
    away_ns: int
    """From the end of the process before; 0 when none is known, as for one that is new to the run."""
    exit_code: int | None
    resumed: bool
    """It came back with the whole run, which had been stopped."""


@dataclass(slots=True)
class Return:
    """A learner that was cut off. `steps` is 0 until it is in a commit again."""

    learner: str
    down_ns: int
    up_ns: int
    detail: str = ""
    commit_ns: int = 0
    fragment: int = 0
    version: int = 0
    steps: int = 0
    weight: float = 0.0
    contributors: int = 0


@dataclass(slots=True)
class _Link:
    down_ns: int | None = None
    detail: str = ""
    doubts: set[str] = field(default_factory=set)  # who says that it is cut off
    generation: int = 0
    frozen: bool = False
    back: Return | None = None
    fragments: set[int] = field(default_factory=set)  # those whose commit since the return has been seen


class ComebackBook:
    """Recoveries, returns, and what checkpoints cost, over all learners."""

    def __init__(self) -> None:
        self.recoveries: list[LearnerRecovery] = []
        """All but those of rung "fresh"."""
        self.rungs: dict[str, int] = {}
        self.last_rung: dict[str, str] = {}
        """By learner; the newest that was not fresh."""
        self.returns: list[Return] = []
        self.checkpoints: dict[str, Cost] = {}
        """By learner: what the training thread paid, and the bytes written."""
        self._links: dict[str, _Link] = {}
        self._exits: dict[str, tuple[int, int]] = {}
        self._known: set[str] = set()
        self._stopped: set[str] = set()  # learners of earlier launches that have not been seen in this one

    def apply(self, t_ns: int, event: events.Event) -> list[Return]:
        """Gives back the returns of learners that are in a commit for the first time since."""
        if isinstance(event, events.Committed):
            return self._committed(t_ns, event)
        if isinstance(event, events.LearnerLink):
            if event.up:
                self._trust(t_ns, event.learner, "learner")
            else:
                self._doubt(t_ns, event.learner, "learner", event.detail)
        elif isinstance(event, events.MemberChanged):
            self._member(t_ns, event)
        elif isinstance(event, events.FaultInjected | events.FaultEnded):
            self._fault(t_ns, event)
        elif isinstance(event, events.CheckpointWritten):
            self.checkpoints.setdefault(event.learner, Cost()).add(event.capture_ns, event.bytes)
        elif isinstance(event, events.LearnerRecovered):
            self._recovered(t_ns, event)
        elif isinstance(event, events.ProcessExited):
            if event.role == "learner":
                self._exits[event.id] = (t_ns, event.code)
                self._links.pop(event.id, None)
        elif isinstance(event, events.LearnerStarted | events.LearnerFinished):
            # Another process, or one that hangs up because it leaves: nothing of it comes back over its link.
            self._links.pop(event.learner, None)
        return []

    def new_launch(self) -> None:
        """Whatever ran is gone."""
        self._links.clear()
        self._exits.clear()
        self._stopped = set(self._known)

    def cut_off(self, end_ns: int) -> list[tuple[str, int, int]]:
        """(learner, from, to) of every time without a link; one that goes on lasts to `end_ns`."""
        times = [(one.learner, one.down_ns, one.up_ns) for one in self.returns]
        going_on = [(name, link.down_ns) for name, link in self._links.items() if link.down_ns is not None]
        return times + [(name, down_ns, end_ns) for name, down_ns in going_on if end_ns > down_ns]

    def _recovered(self, t_ns: int, event: events.LearnerRecovered) -> None:
        ended_ns, code = self._exits.pop(event.learner, (t_ns, None))
        resumed = event.learner in self._stopped and code is None
        self._known.add(event.learner)
        self._stopped.discard(event.learner)
        if event.rung == FRESH:
            return
        self.rungs[event.rung] = self.rungs.get(event.rung, 0) + 1
        self.last_rung[event.learner] = event.rung
        if len(self.recoveries) < RECOVERIES_MAX:
            entry = LearnerRecovery(
                t_ns=t_ns,
                learner=event.learner,
                generation=event.generation,
                step=event.step,
                rung=event.rung,
                detail=event.detail,
                wait_ns=event.wait_ns,
                away_ns=max(0, t_ns - ended_ns),
                exit_code=code,
                resumed=resumed,
            )
            self.recoveries.append(entry)

    def cut_off_since(self, learner: str) -> int | None:
        """Since when a learner has been cut off; None while it is not."""
        link = self._links.get(learner)
        return link.down_ns if link is not None else None

    def _member(self, t_ns: int, event: events.MemberChanged) -> None:
        link = self._links.get(event.learner)
        if event.state == "left" or (link is not None and event.generation > link.generation > 0):
            self._links.pop(event.learner, None)  # it is gone, or another process came in its place
            link = None
        elif event.state == "away":
            if event.learner not in self._exits and not (link is not None and link.frozen):
                silent_ns = event.silent_ns if event.silent_ns >= SILENCE_NS_MIN else 0
                self._doubt(t_ns - silent_ns, event.learner, "syncer", event.reason)
        elif event.state in ("joining", "active"):
            if link is not None and event.silent_ns >= SILENCE_NS_MIN:
                # It is back before the syncer had missed it: nobody else may have noticed for how long.
                self._doubt(t_ns - event.silent_ns, event.learner, "syncer", event.reason)
            self._trust(t_ns, event.learner, "syncer")
        self._links.setdefault(event.learner, _Link()).generation = event.generation

    def _fault(self, t_ns: int, event: events.FaultInjected | events.FaultEnded) -> None:
        begins = isinstance(event, events.FaultInjected)
        if event.fault == STOPPING:
            self._links.setdefault(event.target, _Link()).frozen = begins
        elif event.fault == CUTTING and begins:
            self._doubt(t_ns, event.target, "plan", event.fault)
        elif event.fault == CUTTING:
            self._trust(t_ns, event.target, "plan")

    def _doubt(self, since_ns: int, learner: str, source: str, detail: str) -> None:
        link = self._links.setdefault(learner, _Link())
        link.doubts.add(source)
        if link.down_ns is None:
            link.detail = detail
        link.down_ns = since_ns if link.down_ns is None else min(link.down_ns, since_ns)

    def _trust(self, t_ns: int, learner: str, source: str) -> None:
        link = self._links.get(learner)
        if link is None or link.down_ns is None:
            return
        link.doubts.discard(source)
        if link.doubts:
            return
        link.back = Return(learner, link.down_ns, max(t_ns, link.down_ns), link.detail)
        link.down_ns, link.fragments = None, set()
        if len(self.returns) < RETURNS_MAX:
            self.returns.append(link.back)

    def _committed(self, t_ns: int, event: events.Committed) -> list[Return]:
        first = []
        for learner, steps, weight in _shares(event):
            link = self._links.get(learner)
            if link is None or link.back is None:
                continue
            if event.fragment in link.fragments:
                link.back = None  # the second time for one fragment: everything that had gathered is in
                continue
            link.fragments.add(event.fragment)
            if not link.back.commit_ns:
                first.append(link.back)
            if steps > link.back.steps:
                link.back.commit_ns, link.back.fragment, link.back.version = t_ns, event.fragment, event.version
                link.back.steps, link.back.weight = steps, weight
                link.back.contributors = len(event.contributors)
        return first


def _shares(event: events.Committed) -> Iterator[tuple[str, int, float]]:
    """(learner, steps, weight) of each contribution; nothing where the syncer did not say (an older version's file). A
    learner with two contributions in one commit (one of them carried) counts with both."""
    if not len(event.contributors) == len(event.steps) == len(event.weights):
        return
    sums: dict[str, tuple[int, float]] = {}
    for learner, steps, weight in zip(event.contributors, event.steps, event.weights, strict=True):
        before = sums.get(learner, (0, 0.0))
        sums[learner] = (before[0] + steps, before[1] + weight)
    for learner, (steps, weight) in sums.items():
        yield learner, steps, weight
