"""`atoll conform`: does a learner or a syncer of another maker keep the wire contract?"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import human, print_json
from atoll.cli import options as o
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.instruments.conform import ClauseFinding, Report

EXIT_BROKEN = 1
"""A clause is not kept."""

conform = typer.Typer(
    name="conform",
    help="Hold a learner or a syncer of another maker to the wire contract.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Patience = Annotated[float, typer.Option(help="Longest wait, in seconds, for anything that must happen.")]


@conform.callback()
def _conform() -> None:
    """Hold a learner or a syncer of another maker to the wire contract."""


@conform.command("learner", context_settings={"allow_interspersed_args": False})
def learner(
    command: Annotated[
        list[str] | None, typer.Argument(help="The command of one learner, after --; it gets ATOLL_SYNCER.")
    ] = None,
    *,
    listen: Annotated[
        str, typer.Option(help="Wait here for a learner that somebody else starts, instead of a command.")
    ] = "",
    patience: Patience = 60.0,
    json: o.Json = False,
) -> None:
    """Play a syncer for a learner: joins, rounds, refusals, healing, bad input. Exit status 1: a clause is not kept.

    The learner must step until it is told to stop. It finds the played syncer in ATOLL_SYNCER, its id in ATOLL_LEARNER
    and the token in ATOLL_TOKEN. With a command it is started once for each of three scenes. With --listen only the
    first scene is played.
    """
    from atoll.instruments.conform import LEARNER_CLAUSES, LearnerExamOptions, Report, examine_learner

    if bool(command) == bool(listen):
        raise ConfigError("give the command of a learner after --, or --listen HOST:PORT; one of the two")
    console = human(json_wanted=json)
    report = Report(LEARNER_CLAUSES, _teller(console))
    options = LearnerExamOptions(
        command=command or (), listen=listen or "127.0.0.1:0", environment=dict(os.environ), patience_s=patience
    )
    asyncio.run(examine_learner(report, options, lambda text: console.print(text, style="dim", markup=False)))
    _finish(report, console, json_wanted=json)


@conform.command("syncer")
def syncer(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="A fresh syncer, without state, on this machine.")
    ],
    *,
    token: o.Token = "",
    token_file: o.TokenFile = "",
    returning: Annotated[
        bool, typer.Option("--returning", help="Play learners that hold a run of which this syncer knows nothing.")
    ] = False,
    fragments: Annotated[int, typer.Option(help="With --returning: fragments of the syncer's run.")] = 2,
    patience: Patience = 60.0,
    json: o.Json = False,
) -> None:
    """Play learners for a syncer: joins, rounds, refusals, healing, bad input. Exit status 1: a clause is not kept.

    The syncer must be fresh, and nobody else may be in its run. A second one, fresh again, is needed for --returning.
    """
    from atoll.instruments.conform import SYNCER_CLAUSES, Report, SyncerExamOptions, examine_syncer
    from atoll.wire import read_token

    console = human(json_wanted=json)
    report = Report(SYNCER_CLAUSES, _teller(console))
    options = SyncerExamOptions(
        address=address,
        token=read_token(token, token_file),
        patience_s=patience,
        returning=returning,
        fragments=fragments,
    )
    asyncio.run(examine_syncer(report, options, lambda text: console.print(text, style="dim", markup=False)))
    _finish(report, console, json_wanted=json)


def _teller(console: Console) -> Callable[[ClauseFinding], None]:
    def tell(finding: ClauseFinding) -> None:
        console.print(_line(finding), markup=False, soft_wrap=True)

    return tell


def _line(finding: ClauseFinding) -> str:
    clause = finding.clause
    seen = f": {finding.detail}" if finding.detail else ""
    return f"{finding.verdict:9}  {clause.name:22} {clause.text}{seen}  [{clause.section}]"


def _finish(report: Report, console: Console, *, json_wanted: bool) -> None:
    from atoll.instruments.conform import Keeping

    for finding in report.findings.values():
        if finding.verdict is Keeping.UNTRIED:
            console.print(_line(finding), markup=False, soft_wrap=True, style="dim")
    counts = ", ".join(f"{report.count(verdict)} {verdict}" for verdict in Keeping)
    console.print(f"{counts}; the clauses are in docs/reference/wire.md", markup=False, soft_wrap=True)
    if json_wanted:
        print_json(report.to_dict())
    if not report.conforms:
        raise typer.Exit(EXIT_BROKEN)
