"""How far a study is: a bar for the run, a bar for all, and the time that is left. Without a terminal, plain lines."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from atoll.instruments.cli.amounts import count, duration
from atoll.instruments.lab import Forecast, Planned, RunRecord, Watcher

if TYPE_CHECKING:
    from rich.console import Console

UPDATE_S = 0.2
SAY_EVERY_S = 20.0
"""Between two lines where there is no terminal: a log stays readable."""
SETTLED_SHARE = 0.03
"""Of a run: before this its rate still contains compilation and tells nothing."""
TITLE_CHARS = 44


class StudyProgress(Watcher):
    """Use as a context. It is told by `conduct` what happens."""

    def __init__(
        self, console: Console, queue: Sequence[Planned], forecast: Forecast, *, tell_all: bool = True
    ) -> None:
        """Without `tell_all` nothing is said of the runs to come: other processes do some of them."""
        self._tell_all = tell_all
        self._console = console
        self._queue = list(queue)
        self._forecast = forecast
        self._all_tokens = sum(one.spec.tokens for one in queue)
        self._tokens = 0
        self._ended = 0
        self._now: Planned | None = None
        self._began_s = self._shown_s = self._said_s = monotonic()
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._run: TaskID = self._bars.add_task("", total=1.0, left="", visible=False)
        self._all: TaskID = self._bars.add_task("", total=max(1, self._all_tokens), left="", visible=len(queue) > 1)

    def __enter__(self) -> StudyProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    # ------------------------------------------------------------ what happens

    def began(self, planned: Planned) -> None:
        self._now, self._began_s = planned, monotonic()
        title = f"{planned.title}, seed {planned.spec.seed}"
        shown = title if len(title) <= TITLE_CHARS else title[: TITLE_CHARS - 1] + "…"
        self._bars.reset(self._run, total=planned.spec.tokens, description=shown, left="preparing", visible=True)
        self._show(0)

    def progressed(self, done: int, total: int) -> None:
        now_s = monotonic()
        if now_s - self._shown_s < UPDATE_S:
            return
        self._shown_s = now_s
        self._show(done)
        if not self._console.is_terminal and now_s - self._said_s >= SAY_EVERY_S and self._now is not None:
            self._said_s = now_s
            run_left_s = self._run_left_s(done)
            text = f"{self._now.title}: {count(done)} of {count(total)} tokens, {self._left_text(run_left_s)}"
            if self._tell_all and len(self._queue) > 1:
                all_left = self._left_text(self._all_left_s(run_left_s, done))
                text += f"; {self._ended} of {len(self._queue)} runs done, {all_left} in all"
            self._console.print(text, style="dim", markup=False, soft_wrap=True)

    def ended(self, planned: Planned, record: RunRecord) -> None:
        took_s = monotonic() - self._began_s
        self._forecast.learn(planned.spec, record.tokens, took_s)
        self._over(planned)
        self._console.print(
            f"{self._ended} of {len(self._queue)}  {planned.title}, seed {planned.spec.seed}: loss {record.loss:.4f}, "
            f"{duration(took_s)}, {record.tokens_per_s:,.0f} tokens/s",
            markup=False,
            soft_wrap=True,
        )

    def failed(self, planned: Planned, reason: str) -> None:
        self._over(planned)
        text = f"{self._ended} of {len(self._queue)}  {planned.title}, seed {planned.spec.seed} failed: {reason}"
        self._console.print(text, style="red", markup=False, soft_wrap=True)

    # ------------------------------------------------------------ what is shown

    def _over(self, planned: Planned) -> None:
        self._ended += 1
        self._tokens += planned.spec.tokens
        self._now = None
        self._show(0)

    def _show(self, done: int) -> None:
        left_s = self._run_left_s(done)
        if self._now is not None:
            self._bars.update(self._run, completed=done, left=self._left_text(left_s) if done else "preparing")
        what = f"{self._ended} of {len(self._queue)} runs"
        self._bars.update(
            self._all,
            completed=self._tokens + done,
            description=what,
            left=self._left_text(self._all_left_s(left_s, done)),
        )

    def _run_left_s(self, done: int) -> float | None:
        """Of the run that is on: by its own rate once that has settled, else by what is known of others."""
        if self._now is None:
            return 0.0
        spec, spent_s = self._now.spec, monotonic() - self._began_s
        if done >= SETTLED_SHARE * spec.tokens:
            return spent_s * (spec.tokens / done - 1.0)
        known_s = self._forecast.seconds(spec)
        return None if known_s is None else max(0.0, known_s - spent_s)

    def _all_left_s(self, run_left_s: float | None, done: int) -> float | None:
        """Runs of which nothing is known are taken to be as fast as the one that is on."""
        if run_left_s is None:
            return None
        per_token_s = (monotonic() - self._began_s) / done if done else None
        left_s = run_left_s
        for one in self._queue[self._ended + (self._now is not None) :]:
            seconds = self._forecast.seconds(one.spec)
            if seconds is None and per_token_s is not None:
                seconds = one.spec.tokens * per_token_s
            if seconds is None:
                return None
            left_s += seconds
        return left_s

    def _left_text(self, seconds: float | None) -> str:
        return f"{duration(seconds)} left" if seconds is not None else "time left not known yet"
