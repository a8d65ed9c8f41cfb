"""What a person should know and may not have seen: learners that rounds do not wait for, thin links, warnings."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core import SECOND_NS
from atoll.observe import events

SPELLS_MAX = 1000
THIN_MAX = 1000
WARNINGS_MAX = 200
ADAPTED_MAX = 1000
"""Lists are cut at these lengths; a warning that is said again is counted with the first of its words."""


@dataclass(slots=True)
class Spell:
    """A stretch in which rounds neither waited for an active learner nor counted it."""

    learner: str
    start_ns: int
    reason: str
    end_ns: int | None = None
    merged: int = 0
    """Its contributions that were merged all the same."""


@dataclass(slots=True)
class Warning:
    t_ns: int
    source: str
    text: str
    count: int = 1


class NoticeBook:
    """`thin` holds the newest word on each link that is too thin now, by learner and direction; `thin_ever` on each
    that was."""

    def __init__(self) -> None:
        self.spells: list[Spell] = []
        self.thin: dict[tuple[str, str], events.LinkThin] = {}
        self.thin_ever: dict[tuple[str, str], events.LinkThin] = {}
        self.warnings: list[Warning] = []
        self.adapted: list[tuple[int, events.Adapted]] = []
        """What was decided about what is sent, and when."""
        self.sends: dict[str, events.Adapted] = {}
        """The newest of them of each learner that sends something else than the settings say, and of the run."""
        self.rhythm: dict[str, str] = {}
        """Of the run, where that is decided: "period" and "overlap" in steps."""
        self._open: dict[str, Spell] = {}
        self._warned: dict[tuple[str, str], Warning] = {}

    def apply(self, t_ns: int, event: events.Event) -> None:
        if isinstance(event, events.Committed):
            for learner in event.contributors if self._open else ():
                if learner in self._open:
                    self._open[learner].merged += 1
        elif isinstance(event, events.MemberAside):
            self._set_aside(t_ns, event)
        elif isinstance(event, events.Adapted):
            self._adapt(t_ns, event)
        elif isinstance(event, events.LinkThin):
            self._link(event)
        elif isinstance(event, events.LearnerPushed):
            self._moved((event.learner, "up"), event.bytes, event.push_ns)
        elif isinstance(event, events.LearnerFetched):
            self._moved((event.learner, "down"), event.bytes, event.fetch_ns)
        elif isinstance(event, events.Warned):
            self._warn(t_ns, event)
        elif isinstance(event, events.ProcessExited):
            self._gone(t_ns, event.id)
        elif isinstance(event, events.LearnerStarted | events.LearnerFinished) or (
            isinstance(event, events.MemberChanged) and event.state in ("away", "lost", "left")
        ):
            self._gone(t_ns, event.learner)
        elif isinstance(event, events.SyncerStarted):
            self.new_launch(t_ns)  # this syncer has set nobody aside yet

    def new_launch(self, end_ns: int) -> None:
        """Whoever set learners aside is gone."""
        for learner in list(self._open):
            self._end(end_ns, learner)
        self.sends.clear()
        self.rhythm.clear()

    def spell(self, learner: str) -> Spell | None:
        """The one that goes on."""
        return self._open.get(learner)

    def _set_aside(self, t_ns: int, event: events.MemberAside) -> None:
        if not event.aside:
            self._end(t_ns, event.learner)
        elif event.learner in self._open:
            self._open[event.learner].reason = event.reason
        elif len(self.spells) < SPELLS_MAX:
            self._open[event.learner] = Spell(event.learner, t_ns, event.reason)
            self.spells.append(self._open[event.learner])

    def _adapt(self, t_ns: int, event: events.Adapted) -> None:
        if len(self.adapted) < ADAPTED_MAX:
            self.adapted.append((t_ns, event))
        if event.what != "nothing" and (event.subject in self.sends or len(self.sends) < THIN_MAX):
            self.sends[event.subject] = event
        if event.subject == "run" and event.what != "nothing":
            self.rhythm[event.what] = event.after

    def _link(self, event: events.LinkThin) -> None:
        key = (event.learner, event.direction)
        if event.gets_bytes_s >= event.needs_bytes_s:
            self.thin.pop(key, None)
        elif key in self.thin_ever or len(self.thin_ever) < THIN_MAX:
            self.thin[key] = self.thin_ever[key] = event

    def _moved(self, key: tuple[str, str], size: int, took_ns: int) -> None:
        """A transfer as fast as the run needs: nobody says that a link is wide enough again, but this shows it."""
        thin = self.thin.get(key)
        if thin is not None and took_ns > 0 and size * SECOND_NS / took_ns >= thin.needs_bytes_s:
            del self.thin[key]

    def _gone(self, t_ns: int, learner: str) -> None:
        """Rounds do not wait for whoever is not there, for that reason alone."""
        self._end(t_ns, learner)
        for direction in ("up", "down"):
            self.thin.pop((learner, direction), None)

    def _end(self, t_ns: int, learner: str) -> None:
        spell = self._open.pop(learner, None)
        if spell is not None:
            spell.end_ns = max(t_ns, spell.start_ns)

    def _warn(self, t_ns: int, event: events.Warned) -> None:
        key = (event.source, event.text)
        if key in self._warned:
            self._warned[key].count += 1
        elif len(self.warnings) < WARNINGS_MAX:
            self._warned[key] = Warning(t_ns, event.source, event.text)
            self.warnings.append(self._warned[key])
