"""The lies that a learner with the run's token can tell, by name, and what each makes of a message that goes out.

A lie is a fault of kind `lie`: `variant` is its name here, `amount` how bold it is. A process tells them in a storm
(`chaos.liar`), a simulated learner in `atoll sim fuzz` (`sim.liar`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from atoll.core import DataReport, Hello, InlinePush, Lease, Leave, Nothing, Progress, PushHeader, PushKind, Ready

WIRE_MAX = 2**62
"""Nothing larger than this is let through by `wire`, whoever sends it."""
REASON_CHARS = 4000
"""Of a reason that is as long as `wire` lets any text be."""


@dataclass(frozen=True, slots=True)
class Lie:
    doc: str
    """One sentence: what is said or done that is not so."""
    says_hello: bool = False
    """It is told in a Hello, so its learner says hello anew when it begins."""
    restarts: str = ""
    """What must befall the syncer for anybody to listen to it."""
    steals: bool = False
    """It takes another learner's id, which only keys exclude: who shares a token may be anybody."""


LIES: Mapping[str, Lie] = {
    "epoch": Lie("its Hello names an epoch that no syncer ever had", says_hello=True),
    "generation": Lie("its Hello claims a generation that it was never given", says_hello=True),
    "versions": Lie("its Hello offers versions that were never made", says_hello=True, restarts="kill rot wipe"),
    "checksums": Lie("its Hello offers true versions with wrong checksums", says_hello=True, restarts="kill rot wipe"),
    "ready": Lie("Ready names a step that nobody has reached", says_hello=True),
    "step": Lie("Progress names a step that nobody has reached"),
    "counters": Lie("Progress counts more steps and tokens than were made"),
    "pace": Lie("Progress says that a step takes almost no time"),
    "stall": Lie("Progress says that a step takes years"),
    "tokens": Lie("a contribution claims more tokens than went into it"),
    "steps": Lie("a contribution claims more steps than went into it"),
    "base": Lie("a contribution names another base than it was made from"),
    "extreme": Lie("a contribution is 1e30 times too long"),
    "scaled": Lie("a contribution is four times too long, which the norm guard lets pass"),
    "flipped": Lie("a contribution has the opposite sign"),
    "zero": Lie("a contribution is all zeros"),
    "tiny": Lie("a contribution is a billion times too short"),
    "silent": Lie("it steps and reports, and answers no request"),
    "chunks": Lie("it reports chunks of data as done, or hands some back, that it never had"),
    "names": Lie("it contributes and fetches in another learner's name"),
    "ids": Lie("it says hello with another learner's id", steals=True),
    "crowd": Lie("it says hello and ready under many ids that step on and never answer"),
    "numbers": Lie("it sends every contribution many times, each under a new number"),
    "churn": Lie("it leaves and says hello again, all the time"),
    "words": Lie("it leaves and comes back with reasons as long as `wire` lets them be"),
}
"""Every lie by its name."""
VALUES: Mapping[str, float] = {"extreme": 1e30, "scaled": 4.0, "flipped": -1.0, "zero": 0.0, "tiny": 1e-9}
"""What a contribution is multiplied with. Four is within the norm guard, whose factor is 5 or more when drawn."""


NUMBERS_EACH = 8
"""Copies of one contribution, each under a number of its own."""
NUMBERS_APART = 1000
CHUNKS_NAMED = 20


def falsified(message: Any, lies: Mapping[str, float]) -> Any:
    """What goes out instead of this message, and None if nothing does. `lies` are those being told, with amounts."""
    for name, amount in lies.items():
        if message is not None and (tell := _TELL.get((name, type(message)))) is not None:
            message = tell(message, amount)
    return message


def renumbered(header: PushHeader) -> list[PushHeader]:
    """The same contribution again, under other numbers."""
    apart = range(NUMBERS_APART, (NUMBERS_EACH + 1) * NUMBERS_APART, NUMBERS_APART)
    return [replace(header, seq=header.seq + number) for number in apart]


def _report_chunks(report: DataReport, amount: float) -> DataReport:
    """Done: chunks of others. Handed back: some that nobody has, to be given out."""
    first = max((*report.done, *report.holding), default=0)  # about where the others are
    done, returned = range(first, first + CHUNKS_NAMED), range(first + CHUNKS_NAMED, first + 2 * CHUNKS_NAMED)
    return replace(report, done=tuple(done), returned=tuple(Lease(chunk, 7) for chunk in returned))


def _hello_epoch(hello: Hello, amount: float) -> Hello:
    return replace(hello, epoch=_more(hello.epoch, amount))


def _hello_generation(hello: Hello, amount: float) -> Hello:
    return replace(hello, generation=_more(hello.generation, amount))


def _hello_versions(hello: Hello, amount: float) -> Hello:
    """The checksums are those of what the liar will give when it is asked."""
    return replace(hello, bases=tuple(_more(version, amount) for version in hello.bases))


def _ready_step(ready: Ready, amount: float) -> Ready:
    return replace(ready, step=_more(ready.step, amount))


def _progress_step(report: Progress, amount: float) -> Progress:
    return replace(report, step=_more(report.step, amount))


def _progress_counters(report: Progress, amount: float) -> Progress:
    """As they would be had it made them: a step that its own steps do not lead to would be found out."""
    steps = _times(report.steps, amount)
    step = min(report.step + steps - report.steps, WIRE_MAX)
    return replace(report, step=step, steps=steps, tokens=_times(report.tokens, amount))


def _progress_pace(report: Progress, amount: float) -> Progress:
    return replace(report, step_ns=1)


def _progress_stall(report: Progress, amount: float) -> Progress:
    return replace(report, step_ns=_times(report.step_ns, amount))


def _header_tokens(header: PushHeader, amount: float) -> PushHeader:
    return replace(header, tokens=_times(header.tokens, amount))


def _header_steps(header: PushHeader, amount: float) -> PushHeader:
    return replace(header, steps=_times(header.steps, amount))


def _header_base(header: PushHeader, amount: float) -> PushHeader:
    """A little older, or one that is not there yet."""
    return replace(header, base_version=max(0, header.base_version - 2) if amount < 10 else header.base_version + 1)


def _nothing(message: Any, amount: float) -> None:
    return None


def _long(message: Leave, amount: float) -> Leave:
    return replace(message, reason="x" * REASON_CHARS)


def _contribution(tell: Callable[[PushHeader, float], PushHeader | None]) -> Callable[[PushHeader, float], Any]:
    return lambda header, amount: tell(header, amount) if header.kind is PushKind.CONTRIBUTION else header


def _inline(tell: Callable[[PushHeader, float], PushHeader | None]) -> Callable[[InlinePush, float], Any]:
    def told(message: InlinePush, amount: float) -> InlinePush | None:
        header = tell(message.header, amount)
        return None if header is None else replace(message, header=header)

    return told


def _more(number: int, amount: float) -> int:
    return min(number + int(amount), WIRE_MAX)


def _times(number: int, amount: float) -> int:
    return min(number * int(amount), WIRE_MAX)


_HEADERS: Mapping[str, Callable[[PushHeader, float], PushHeader | None]] = {
    "tokens": _header_tokens,
    "steps": _header_steps,
    "base": _header_base,
    "silent": _nothing,
}
_TELL: Mapping[tuple[str, type], Callable[[Any, float], Any]] = {
    ("epoch", Hello): _hello_epoch,
    ("generation", Hello): _hello_generation,
    ("versions", Hello): _hello_versions,
    ("ready", Ready): _ready_step,
    ("step", Progress): _progress_step,
    ("counters", Progress): _progress_counters,
    ("pace", Progress): _progress_pace,
    ("stall", Progress): _progress_stall,
    ("silent", Nothing): _nothing,
    ("chunks", DataReport): _report_chunks,
    ("words", Leave): _long,
    **{(name, PushHeader): _contribution(tell) for name, tell in _HEADERS.items()},
    **{(name, InlinePush): _inline(tell) for name, tell in _HEADERS.items()},
}
TOLD_BY_PROCESSES = (*sorted({name for name, _ in _TELL} - {"words"}), *VALUES, "numbers")
"""What a real learner can be made to say. The others are acts (joining as a crowd, leaving, taking names)."""
