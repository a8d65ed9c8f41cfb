"""Carry out a study: run what its store does not have yet, one after another, and keep each result as it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Protocol

from atoll.errors import ConfigError
from atoll.instruments.lab.spec import LabResult, LabSpec
from atoll.instruments.lab.store import ResultStore, RunRecord
from atoll.instruments.lab.study import Planned

FAILURES_IN_A_ROW_MAX = 3
"""After so many nothing will work: the device or the installation is broken, and not one run's settings."""
MINUTES_MAX = 1e6
"""Two years."""
REASON_CHARS_MAX = 500
"""Of what is kept of an exception's message."""


class Runner(Protocol):
    """`atoll.instruments.lab.run.run` with its device chosen."""

    def __call__(self, spec: LabSpec, *, progress: Callable[[int, int], None] | None = None) -> LabResult: ...


class Watcher:
    """Whom a study tells how it goes. Every method may be overridden."""

    def began(self, planned: Planned) -> None: ...
    def progressed(self, done: int, total: int) -> None: ...
    def ended(self, planned: Planned, record: RunRecord) -> None: ...
    def failed(self, planned: Planned, reason: str) -> None: ...


@dataclass(slots=True)
class StudyOutcome:
    """What became of a study's runs."""

    done: int = 0
    failed: list[tuple[Planned, str]] = field(default_factory=list)
    left: int = 0
    """Not started: the time was over, somebody interrupted, too many failed in a row, or others are at them."""
    elsewhere: int = 0
    """Of those that are left: another process is at them."""
    interrupted: bool = False


def pending(planned: Sequence[Planned], have: Mapping[str, RunRecord]) -> list[Planned]:
    """What is still to be run, each run once even if several arms want it."""
    first: dict[str, Planned] = {}
    for one in planned:
        if one.spec.key not in have:
            first.setdefault(one.spec.key, one)
    return list(first.values())


def check_minutes(minutes: float) -> None:
    if not 0.0 <= minutes <= MINUTES_MAX:
        raise ConfigError(f"minutes must be a number from 0 (no limit) to {MINUTES_MAX:g}; not {minutes!r}")


def conduct(
    planned: Sequence[Planned],
    store: ResultStore,
    runner: Runner,
    *,
    study: str = "",
    watcher: Watcher | None = None,
    minutes: float = 0.0,
    failures: Path | None = None,
) -> StudyOutcome:
    """Run what is pending. After `minutes` (0: never) nothing new is started. Ctrl-C ends it; what is finished is kept.

    A run that fails is noted and the next one begins: one impossible combination does not cost the others. Several
    processes may work through one study: what another one is at is passed over, and looked at again at the end. Those
    that have the same folder for `failures` do not repeat what has failed in one of them.
    """
    check_minutes(minutes)
    watcher = watcher or Watcher()
    queue = pending(planned, store.records())
    if queue:
        store.check()
    outcome, ends_s = StudyOutcome(left=len(queue)), monotonic() + minutes * 60.0
    in_a_row, again = 0, list[Planned]()
    try:
        for place, one in enumerate(chain(queue, again)):
            if (minutes and monotonic() >= ends_s) or in_a_row >= FAILURES_IN_A_ROW_MAX:
                break
            with store.claim(one.spec.key) as mine:
                if not mine:
                    if place < len(queue):
                        again.append(one)
                    else:
                        outcome.elsewhere += 1
                    continue
                failed_here = failures / one.spec.key if failures is not None else None
                if one.spec.key in store.records() or (failed_here is not None and failed_here.exists()):
                    outcome.left -= 1  # somebody else has just finished with it
                    continue
                reason = _run_one(one, store, runner, watcher, study)
                if reason and failed_here is not None:
                    failed_here.touch()
            outcome.left -= 1
            if reason:
                outcome.failed.append((one, reason))
                in_a_row += 1
            else:
                outcome.done += 1
                in_a_row = 0
    except KeyboardInterrupt:
        outcome.interrupted = True
    return outcome


def _run_one(one: Planned, store: ResultStore, runner: Runner, watcher: Watcher, study: str) -> str:
    """Why it failed, or nothing."""
    watcher.began(one)
    try:
        result = runner(one.spec, progress=watcher.progressed)
    except Exception as error:  # whatever a task or a device may raise: the study goes on, and says so at its end
        reason = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
        watcher.failed(one, reason)
        return reason
    record = RunRecord.of(result, study=study, label=one.label)
    store.append(record)
    watcher.ended(one, record)
    return ""


class Forecast:
    """How long runs will take: tokens over the tokens/s of the runs like them, the most alike that are known."""

    def __init__(self, known: Mapping[str, RunRecord] | None = None) -> None:
        self._rates: dict[tuple[object, ...], tuple[float, float]] = {}
        """What a run is like -> (tokens, seconds) of all such runs."""
        for record in (known or {}).values():
            if record.tokens_per_s > 0.0:
                self._add(record.spec, record.tokens, record.tokens / record.tokens_per_s)
        self._measured = False

    def learn(self, spec: LabSpec, tokens: int, seconds: float) -> None:
        """A run of this machine took so long, all included. What older runs took, elsewhere, no longer counts."""
        if not self._measured:
            self._rates.clear()
            self._measured = True
        self._add(spec.to_dict(), tokens, seconds)

    def seconds(self, spec: LabSpec) -> float | None:
        """None when nothing is known at all."""
        for likeness in _likenesses(spec.to_dict()):
            tokens, seconds = self._rates.get(likeness, (0.0, 0.0))
            if tokens > 0.0:
                return spec.tokens * seconds / tokens
        return None

    def _add(self, spec: Mapping[str, object], tokens: float, seconds: float) -> None:
        for likeness in _likenesses(spec):
            old_tokens, old_seconds = self._rates.get(likeness, (0.0, 0.0))
            self._rates[likeness] = (old_tokens + tokens, old_seconds + seconds)


def _likenesses(spec: Mapping[str, object]) -> list[tuple[object, ...]]:
    """From the most alike to anything."""
    size = (spec.get("task"), spec.get("model"), spec.get("seq"))
    return [
        (*size, spec.get("optimizer"), spec.get("method"), spec.get("learners")),
        (*size, spec.get("optimizer")),
        size,
        (),
    ]
