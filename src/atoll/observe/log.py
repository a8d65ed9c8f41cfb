"""The log of a run: one line for everything that a person should notice, as it happens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from atoll.core import SECOND_NS
from atoll.observe import events
from atoll.observe.comebacks import FRESH, Return

LOG_LINES_MAX = 500
PROBLEMS_SAID_MAX = 5
RUNGS = {
    "checkpoint": "its own checkpoint",
    "peer": "the optimizer state of a peer",
    "parameters": "the published parameters alone",
    FRESH: "nothing: the run is new",
}
"""What a learner goes on with, in words."""


@dataclass(frozen=True, slots=True)
class LogLine:
    t_ns: int
    text: str
    tone: str
    """bad, good, or plain"""


class RunLog:
    """The newest lines, and how many there have been."""

    def __init__(self) -> None:
        self.lines: deque[LogLine] = deque(maxlen=LOG_LINES_MAX)
        self.count = 0

    def say(self, t_ns: int, text: str, tone: str = "plain") -> None:
        if not self.lines or self.lines[-1].text != text:
            self.lines.append(LogLine(t_ns, text, tone))
            self.count += 1

    def notice(self, t_ns: int, event: events.Event) -> None:
        """Say what an event means that changes the state of nobody."""
        if isinstance(event, events.FaultInjected):
            if event.until_ns:
                detail = f": {event.detail}" if event.detail else ""
                self.say(t_ns, f"{event.target} {event.fault}{detail}", "bad")
        elif isinstance(event, events.FaultEnded):
            self.say(t_ns, f"{event.target} {event.fault} is over", "good")
        elif isinstance(event, events.FaultSkipped):
            self.say(t_ns, f"{event.fault} on {event.target} was left out: {event.reason}")
        elif isinstance(event, events.RoundAborted):
            self.say(t_ns, f"round {event.round} of fragment {event.fragment} aborted: {event.reason}", "bad")
        elif isinstance(event, events.ContributionRefused):
            self.say(t_ns, f"{event.learner} fragment {event.fragment} refused: {event.code}", "bad")
        elif isinstance(event, events.Warned):
            self.say(t_ns, f"{event.source}: {event.text}", "bad")
        elif isinstance(event, events.GoodNews):
            self.say(t_ns, f"{event.source}: {event.text}", "good")
        elif isinstance(event, events.LearnerRecovered):
            if event.rung != FRESH:
                self.say(t_ns, f"{event.learner} goes on with {rung_text(event.rung, event.detail)}", "good")
        elif isinstance(event, events.MemberAside):
            text = f"set aside: {event.reason}" if event.aside else f"counts again: {event.reason}"
            self.say(t_ns, f"{event.learner} {text}", "bad" if event.aside else "good")
        elif isinstance(event, events.LinkThin):
            thin = event.gets_bytes_s < event.needs_bytes_s
            self.say(t_ns, f"{event.learner} {thin_text(event)}", "bad" if thin else "good")
        else:
            self._notice_of_store(t_ns, event)

    def _notice_of_store(self, t_ns: int, event: events.Event) -> None:
        if isinstance(event, events.SyncerRecovered):
            lost = "no version lost" if event.exact else "learners bring back what is newer"
            tone = "good" if event.exact else "bad"
            self.say(t_ns, f"syncer recovered from {source_text(event.source)}: {lost}", tone)
            for problem in event.problems[:PROBLEMS_SAID_MAX]:
                self.say(t_ns, f"syncer found: {problem}", "bad")
        elif isinstance(event, events.FragmentHealed):
            change = f"from version {event.version_before} to {event.version}"
            self.say(t_ns, f"fragment {event.fragment} healed by {event.learner}, {change}", "good")
        elif isinstance(event, events.DurabilityChanged):
            if event.level == event.wanted:
                self.say(t_ns, f"durability is back at level {event.level}: {event.reason}", "good")
            else:
                self.say(t_ns, f"durability is {event.level} instead of {event.wanted}: {event.reason}", "bad")
        elif isinstance(event, events.SnapshotWritten):
            self.say(t_ns, f"snapshot {event.label} written")
        elif isinstance(event, events.SnapshotFailed):
            self.say(t_ns, f"snapshot failed: {event.reason}", "bad")

    def returned(self, t_ns: int, one: Return) -> None:
        """A learner that was cut off is in a commit again."""
        away = span_text(one.up_ns - one.down_ns)
        what = f"{one.steps:,} steps in one contribution, weight {one.weight:.2f}"
        self.say(t_ns, f"{one.learner} came back after {away} with {what}", "good")


def rung_text(rung: str, detail: str = "") -> str:
    """ "peer", "learner-1" -> "the optimizer state of a peer (learner-1)"."""
    return RUNGS.get(rung, rung) + (f" ({detail})" if detail else "")


def source_text(source: str) -> str:
    """The rung of the syncer's ladder, in words."""
    return "its disk" if source == "slots" else f"snapshot {source}"


def adapted_text(event: events.Adapted) -> str:
    """A decision about what is sent, and why: "H 8 -> 12: ...", "paris int4 -> int2: ..."."""
    if event.what == "nothing":
        return event.reason
    subject = {"period": "H", "overlap": "tau", "codec_down": "updates"}.get(event.what, event.subject)
    return f"{subject} {event.before} -> {event.after}: {event.reason}"


def thin_text(event: events.LinkThin) -> str:
    """ "link up too thin: needs 1.2 Mbit/s, gets 50 kbit/s"."""
    thin = "too thin" if event.gets_bytes_s < event.needs_bytes_s else "wide enough"
    needs, gets = bits_text(event.needs_bytes_s), bits_text(event.gets_bytes_s)
    return f"link {event.direction} {thin}: needs {needs}, gets {gets}"


def bits_text(bytes_s: float) -> str:
    """6250 bytes/s -> "50 kbit/s"."""
    bits_s, unit = 8.0 * bytes_s, "bit/s"
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"):
        if bits_s < 999.5 or unit == "Gbit/s":
            break
        bits_s /= 1000.0
    return f"{bits_s:.3g} {unit}" if bits_s < 999.5 else f"{bits_s:,.0f} {unit}"


def span_text(ns: float) -> str:
    """A length of time in few letters: "3.1 s", "74 s", "12 min", "3.0 h"."""
    seconds = ns / SECOND_NS
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
