"""Says on a terminal or in a log what happens to a run: one line for each event of the syncer that people care for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from atoll.observe import Event, events
from atoll.syncer.replicate import STANDBY

WINDOW_S = 10.0
LINES_MAX = 20
"""Lines of one kind of event in WINDOW_S: what a person can follow. What is beyond is counted and said in one line, so
that a thousand learners that come at once do not fill a disk with their names."""
HEALED_QUIET_S = 2.0
"""Healing is told as a whole, when no fragment has come for this long."""
NAMED_MAX = 10
"""Names in one line."""


class Teller:
    """Call `hear` with every event; those that mean something to a person become a line each."""

    def __init__(
        self,
        say: Callable[[str], None],
        where: Callable[[str], str] = lambda learner: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._where = where
        """From where a learner is connected, if known."""
        self._clock = clock
        self._committed = False
        self._healed: list[events.FragmentHealed] = []
        self._healed_s = 0.0
        self._window_s: dict[str, float] = {}
        self._lines: dict[str, int] = {}

    def hear(self, event: Event) -> None:
        self._end_windows()
        if isinstance(event, events.FragmentHealed):
            self._healed.append(event)
            self._healed_s = self._clock()
            return
        if self._healed and self._clock() - self._healed_s >= HEALED_QUIET_S:
            self.finish()
        text = self._sentence(event)
        if text:
            self._line(type(event).__name__, text)

    def finish(self) -> None:
        """Say what was kept back."""
        if self._healed:
            before, after = [one.version_before for one in self._healed], [one.version for one in self._healed]
            learners = names(sorted({one.learner for one in self._healed}))
            self._say(
                f"heals: {len(self._healed)} fragments from versions {min(before)} to {max(after)}, which learners had "
                f"kept ({learners})"
            )
            self._healed = []

    # ------------------------------------------------------------ not too much of anything

    def _line(self, kind: str, text: str) -> None:
        self._window_s.setdefault(kind, self._clock())
        self._lines[kind] = self._lines.get(kind, 0) + 1
        if self._lines[kind] <= LINES_MAX:
            self._say(text)

    def _end_windows(self) -> None:
        now_s = self._clock()
        for kind in [kind for kind, since_s in self._window_s.items() if now_s - since_s >= WINDOW_S]:
            more = self._lines.pop(kind) - LINES_MAX
            del self._window_s[kind]
            if more > 0:
                self._say(f"... and {more} more of these in {WINDOW_S:g} s ({kind})")

    # ------------------------------------------------------------ sentences

    def _sentence(self, event: Event) -> str:
        match event:
            case events.MemberChanged():
                return self._member(event)
            case events.LayoutFixed(parameters, tensors, fragments):
                return f"the run begins: {parameters:,} parameters in {tensors} tensors, {fragments} fragments"
            case events.Committed(fragment, version, _, contributors) if not self._committed:
                self._committed = True
                return f"first commit: version {version} of fragment {fragment}, by {names(contributors)}"
            case events.MemberAside(learner, _, aside, reason):
                return f"{learner} is {'set aside' if aside else 'counted again'}: {reason}"
            case events.LinkThin(learner, direction, needs, gets):
                thin = "is too thin" if gets < needs else "is wide enough again"
                return (
                    f"{learner}'s link {thin}: {direction}, needs {needs / 1000:.1f} kB/s, gets {gets / 1000:.1f} kB/s"
                )
            case events.DurabilityChanged(level, wanted, reason):
                return _durability(level, wanted, reason)
            case events.SnapshotWritten(url, label, size, write_ns, versions):
                low, high = min(versions, default=0), max(versions, default=0)
                took = f"{size / 1e6:.1f} MB, {write_ns / 1e9:.1f} s"
                return f"snapshot {label} written to {url}: versions {low} to {high} ({took})"
            case events.SnapshotFailed():
                return event.reason
            case events.NormGuardReset(fragment, refused):
                return (
                    f"fragment {fragment}: {refused} outliers in a row from most learners; their scale is the new one"
                )
            case events.Warned(source, text):
                return f"warning: {text}" if source == "syncer" else f"warning from {source}: {text}"
            case _:
                return ""

    def _member(self, event: events.MemberChanged) -> str:
        who = event.learner
        if event.state == "joining":
            place = self._where(who)
            again = "" if event.reason == "joined" else f", {event.reason}"
            return f"{who} joins (generation {event.generation}{again}){f' from {place}' if place else ''}"
        if event.state == "active":
            trains = event.reason.startswith("ready")
            return f"{who} trains, {event.reason}" if trains else f"{who} is back: {event.reason}"
        words = {"away": "is away", "lost": "is lost, until it comes back", "left": "has left"}
        return f"{who} {words.get(event.state, event.state)}: {event.reason}"


def _durability(level: str, wanted: str, reason: str) -> str:
    if reason.startswith(STANDBY):
        return reason
    if level == "degraded":
        return f"disk: nothing new is durable ({reason}); training goes on, and writing is tried again"
    return f"disk: all is durable again (level {wanted}; {reason})"


def names(learners: Sequence[str]) -> str:
    more = f" and {len(learners) - NAMED_MAX} more" if len(learners) > NAMED_MAX else ""
    return (", ".join(learners[:NAMED_MAX]) or "nobody") + more
