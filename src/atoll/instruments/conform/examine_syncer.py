"""`atoll conform syncer`: play learners for a syncer that somebody else has started."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from atoll.errors import UnreachableError
from atoll.instruments.conform import syncer_scenes as scenes
from atoll.instruments.conform.played_learner import Missing
from atoll.instruments.conform.report import Report
from atoll.instruments.conform.syncer_scenes import Cast
from atoll.wire import raw

grpc = raw.grpc

Scene = Callable[[Cast], Awaitable[None]]
A_RUN: tuple[Scene, ...] = (
    scenes.strangers,
    scenes.joining,
    scenes.seeding,
    scenes.fetching,
    scenes.rounds,
    scenes.nonsense,
    scenes.older,
    scenes.coming_back,
    scenes.data,
    scenes.poison,
    scenes.leaving,
)


@dataclass(frozen=True, slots=True)
class SyncerExamOptions:
    address: str
    """host:port of a fresh syncer on this machine: without state, and with nobody else in its run."""
    token: str = field(default="", repr=False)
    patience_s: float = 60.0
    """The longest wait for anything that the syncer must do."""
    returning: bool = False
    """Play learners that hold a run of which the syncer knows nothing, instead of a run from its beginning."""
    fragments: int = 2
    """Of the syncer's run, where learners come with a run of their own."""


async def examine_syncer(report: Report, options: SyncerExamOptions, say: Callable[[str], None]) -> None:
    """Fill the report. A scene that cannot go on ends; so do those that build on it."""
    cast = Cast.of(report, options.address, options.token, options.patience_s)
    played: tuple[Scene, ...] = (partial(scenes.returning, fragments=options.fragments),)
    try:
        for scene in played if options.returning else A_RUN:
            await scene(cast)
    except Missing as missing:
        say(f"it could not go on without {missing}")
        _blame(report, str(missing))
    except grpc.aio.AioRpcError as error:
        raise UnreachableError(
            f"no syncer answers at {options.address}: {error.code().name.lower()}; start one there"
        ) from None
    finally:
        await cast.one.close()
        await cast.two.close()
    why = "only without --returning" if options.returning else "only with --returning, or the exam ended before"
    for clause in report.clauses:
        report.untried(clause, why)


_CLAUSES_OF = {
    "welcome": "message.valid",
    "start": "start.states",
    "request": "round.request",
    "received": "round.received",
    "published": "published.all",
    "fate": "back.fate",
    "refused": "back.fenced",
    "data_leases": "data.leases",
    "stop": "leave.asked",
    "heal": "heal.asked",
    "the end": "leave.over",
}
"""What is broken when a message of this kind does not come."""


def _blame(report: Report, missing: str) -> None:
    clause = next((name for kind, name in _CLAUSES_OF.items() if missing.startswith(kind)), "message.valid")
    report.broken(clause, f"{missing} did not come in time")
