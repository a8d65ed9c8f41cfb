"""`atoll chaos storm`: a real local cluster under a seeded plan of faults, and a scorecard against its calm twin."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from atoll.cli import human, print_json
from atoll.cli import options as o

EXIT_BROKEN = 1
"""A promise was broken: an invariant, or the ledger."""

chaos = typer.Typer(
    name="chaos",
    help="Faults on purpose, on real processes.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@chaos.callback()
def _chaos() -> None:
    """Faults on purpose, on real processes."""


@chaos.command("storm")
def storm(
    *,
    minutes: Annotated[float, typer.Option(help="Length of each run: the twin without faults, and the storm.")] = 10.0,
    plan: Annotated[str, typer.Option(help="TOML file of faults instead of a drawn plan.")] = "",
    seed: Annotated[int, typer.Option(help="What the plan is drawn from.")] = 0,
    faults: Annotated[int, typer.Option(help="How many faults are drawn (default 3 a minute).")] = 0,
    learners: Annotated[int, typer.Option(help="Learner processes; at least 2.")] = 4,
    model: Annotated[str, typer.Option(help="Size of the GPT: nano, tiny, small, medium, base.")] = "tiny",
    step_ms: Annotated[float, typer.Option(help="A step takes at least this many ms; the rest is slept.")] = 300.0,
    fragments: Annotated[int, typer.Option(help="Pieces of the model (default 0: as many as it needs).")] = 0,
    shards: Annotated[int, typer.Option(help="Shards that have the fragments (default 0: none).")] = 0,
    relays: Annotated[int, typer.Option(help="Sites of learners, each behind a relay (default 0: none).")] = 0,
    standby: Annotated[bool, typer.Option("--standby", help="A second syncer stands by.")] = False,
    out: Annotated[str, typer.Option(help="Folder of both runs (default a new one under runs/).")] = "",
    twin: Annotated[str, typer.Option(help="Folder of an earlier twin with the same settings, to use again.")] = "",
    beside: Annotated[
        bool, typer.Option("--beside", help="Both runs at the same time, where the machine has room for both.")
    ] = False,
    namespaces: Annotated[
        bool, typer.Option("--namespaces", help="Each learner in a network namespace of its own; needs root.")
    ] = False,
    rate_mbit: Annotated[float, typer.Option(help="With --namespaces: rate of each learner's link, in Mbit/s.")] = 0.0,
    json: o.Json = False,
) -> None:
    """Train under faults of all kinds, check every promise, and compare with the same training without faults.

    Learners and syncer are real processes: they are killed, frozen, slowed and sent away, their links are cut, delayed,
    limited, corrupted and partitioned, the syncer's disk is full, contributions are poisoned. Exit status 1 means that
    a promise was broken.
    """
    from atoll.cli import exit_interrupted
    from atoll.dash import LiveView
    from atoll.instruments.cli.scorecard import print_scorecard
    from atoll.instruments.storms import StormConfig, run_storm

    config = StormConfig(
        minutes=minutes,
        seed=seed,
        faults=faults,
        plan=plan,
        learners=learners,
        model=model,
        step_ms=step_ms,
        settings={"fragments": fragments} if fragments else {},
        shards=shards,
        relays=relays,
        standby=standby,
        out=out,
        twin=twin,
        beside=beside,
        namespaces=namespaces,
        rate_mbit=rate_mbit,
    )
    console = human(json_wanted=json)
    end = run_storm(
        config,
        view=lambda folder: LiveView(folder, console=console),
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
    )
    if end.scorecard is None:
        assert end.stopped is not None
        if end.stopped.folder.name == "storm":
            text = f"the twin is complete: add --twin {end.folder / 'twin'} to run the storm alone"
            console.print(text, markup=False, soft_wrap=True)
        exit_interrupted(end.stopped.outcome, folder=end.stopped.folder, console=console)
    print_scorecard(end.scorecard, console, folder=end.folder)
    if json:
        print_json(end.scorecard)
    if broken(end.scorecard):
        raise typer.Exit(EXIT_BROKEN)


def broken(scorecard: dict[str, Any]) -> bool:
    """Whether a promise was broken that holds whatever the faults were."""
    return bool(scorecard["violations"]) or not scorecard["ledger_exact"]
