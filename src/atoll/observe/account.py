"""The account of one slot: every allocated nanosecond of a learner is charged to one category, by `goodput`'s rules."""

from __future__ import annotations

from atoll.observe.events import LearnerSteps
from atoll.observe.launches import REPORTED, stopped_with_run
from atoll.observe.series import Track

GAPS_MAX = 1000
"""Absences kept per learner, for pictures; the sums need none of them."""
CATEGORIES = (*REPORTED, "evaluate", "recovery", "down", "idle")
TRACKED = ("steps", "tokens", *CATEGORIES)
"""The columns of an account's track: running totals against time, categories in nanoseconds."""


class TimeAccount:
    """The time of one slot, charged up to `cursor_ns` and no further. Without a cursor nothing is charged: the window
    is not open, or the slot is given back."""

    def __init__(self) -> None:
        self.sign_ns: int | None = None  # first sign of life since the slot was last given back
        self.cursor_ns: int | None = None
        self.charged_ns: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
        self.mood = "idle"  # what time that nobody reports is charged to
        self.steps = 0
        self.tokens = 0
        self.failures = 0
        self.captured_ns = 0
        self.finished_ns: int | None = None
        self.gaps: list[tuple[int, int]] = []
        """From when to when the slot was given back; the time since `absent_ns` is not among them yet."""
        self.left_ns: int | None = None
        self.discarded: dict[int, float] = {}
        self.track = Track(len(TRACKED))
        self.stepping = False  # whether it has reported since its last sign
        self._unreported: list[tuple[str, int]] = []  # charges since the last report; "" for time that was given back
        self._ended: tuple[int, int] | None = None  # when its last process failed, and its status

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

    def seen(self, t_ns: int, opened_ns: int | None) -> bool:
        """A sign of life: a slot that is not allocated is from here on, or from when the window opens; True then."""
        if self.sign_ns is not None and self.finished_ns is None:
            return False
        self.left_ns = self.absent_ns
        self.sign_ns, self.finished_ns, self.mood, self.stepping = t_ns, None, "idle", False
        if opened_ns is not None:
            self.open(opened_ns)
        return True

    def open(self, opened_ns: int) -> None:
        """The window is open: the slot is allocated, if there was a sign of it."""
        if self.sign_ns is None or self.finished_ns is not None:
            return
        begin_ns = max(opened_ns, self.sign_ns, self.cursor_ns or 0)
        if self.left_ns is not None and begin_ns > self.left_ns and len(self.gaps) < GAPS_MAX:
            self.gaps.append((self.left_ns, begin_ns))
        if self.cursor_ns is not None:
            self._unreported.append(("", begin_ns - self.cursor_ns))
        self.cursor_ns, self.left_ns = begin_ns, None
        self._mark()

    @property
    def absent_ns(self) -> int | None:
        """Since when the slot has been given back; None while it is allocated, or before it ever was."""
        return self.left_ns if self.finished_ns is None else self.finished_ns

    def given_back_at(self, t_ns: int) -> bool:
        """Whether the learner had left at that time."""
        gone = self.absent_ns is not None and self.absent_ns <= t_ns
        return gone or any(start_ns <= t_ns < end_ns for start_ns, end_ns in self.gaps)

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
        self.mood, self.stepping = "idle", True
        self.steps += event.steps
        self.tokens += event.tokens
        self._unreported.clear()
        self._mark()

    def failed(self, t_ns: int, code: int = 0) -> None:
        self.charge_until(t_ns, "down")
        if self.mood != "down":
            self.failures += 1
        self.mood = "down"
        self._ended = (t_ns, code)

    def excuse(self, last_step_ns: int) -> None:
        """The run is over: if the launcher ended the process, it did not fail."""
        if self.mood != "down" or self._ended is None:
            return
        ended_ns, code = self._ended
        if stopped_with_run(code, ended_ns, last_step_ns):
            self.failures -= 1
            self._ended = None

    def finished(self, t_ns: int) -> None:
        if self.finished_ns is None:
            self.charge_until(t_ns, self.mood)
            self.finished_ns = t_ns

    def stopped(self, end_ns: int | None) -> None:
        """The launch is over: what was charged after its window closed is taken back, and the slot with it."""
        if self.cursor_ns is not None and end_ns is not None:
            self.charged_ns = self._charged_by(end_ns)
            self.left_ns = min(end_ns, self.finished_ns or end_ns)
            self.cursor_ns = max(self.cursor_ns, end_ns)
            self._mark()
        self._unreported.clear()
        self.cursor_ns = self.sign_ns = self.finished_ns = self._ended = None
        self.mood = "idle"

    def _charged_by(self, end_ns: int) -> dict[str, float]:
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
            if category:
                charged_ns[category] -= min(ns, excess_ns)
            excess_ns -= ns
        return charged_ns

    def closed_by(self, end_ns: int) -> dict[str, float]:
        """Where the time went up to the end of the window, with all checkpoints outside of compute."""
        charged_ns = self._charged_by(end_ns)
        held_ns = charged_ns["snapshot"] + charged_ns["overhead"]
        moved_ns = min(max(0.0, self.captured_ns - held_ns), charged_ns["compute"])
        charged_ns["overhead"] += moved_ns
        charged_ns["compute"] -= moved_ns
        return charged_ns

    def process_started(self, t_ns: int) -> None:
        if self.steps == 0 or self.cursor_ns is None:
            # It has nothing to recover: starting, perhaps once more, after a crash at import.
            self.charge_until(t_ns, self.mood)
            self.mood = "idle"
            return
        if self.mood not in ("down", "recovery"):  # its predecessor ended without anybody saying so
            self.failed(t_ns)
        self.charge_until(t_ns, self.mood)
        self.mood = "recovery"
