"""`atoll train`: one run of the reference GPT with any of the methods."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from atoll.cli import options as o
from atoll.cli.terminal import human, logged_as, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.launch import FaultPlanner, FinishedRun, RunOutcome


EXIT_UNFINISHED = 1


@o.takes(o.SYNC, o.KEEPING)
def train(
    *,
    method: Annotated[
        str | None,
        typer.Option(help="decoupled, diloco (synchronous), dp (data-parallel) or single (default decoupled)."),
    ] = None,
    learners: Annotated[int | None, typer.Option(help="Learner processes on this machine (M) (default 4).")] = None,
    steps: Annotated[int | None, typer.Option(help="Inner steps per learner (default 300).")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step of one learner (default 8).")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens (bytes) per sequence (default 128).")] = None,
    model: Annotated[
        str | None, typer.Option(help="Size of the GPT: nano, tiny, small, medium, base (default tiny).")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(help="stdlib, a file or folder of text, or hf:NAME (default stdlib).")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="Inner optimizer: muon, adamw or sgd (default muon).")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; 0: the model's own (default 0).")] = None,
    step_ms: Annotated[
        float | None, typer.Option(help="A step takes at least this many ms; the rest is slept (default 0: none).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of parameters and data order (default 0).")] = None,
    shards: Annotated[
        str | None,
        typer.Option(
            help="Processes that have the fragments; 0: the syncer itself; learners: one beside each (default 0)."
        ),
    ] = None,
    relays: Annotated[
        int | None, typer.Option(help="Sites of learners, each behind a relay of its own (default 0: none).")
    ] = None,
    standby: Annotated[
        bool | None,
        typer.Option("--standby/--no-standby", help="A second syncer waits, and serves when the first is gone."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda (default auto).")] = None,
    threads: o.Threads = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between evaluations (default an eighth of the steps).")
    ] = None,
    out: o.Out = None,
    config: o.ConfigFile = None,
    json: o.Json = False,
    dash: o.Dash = None,
    metrics: o.Metrics = "",
    log_format: o.LogFormat = "text",
    context: typer.Context,
    **named: Any,
) -> None:
    """Train the reference GPT on this machine: learner processes, a syncer between them, a report at the end."""
    values, where = o.given(locals(), "json", "dash", "metrics", "log_format", "context")
    o.use_metrics(metrics)
    with logged_as(log_format, aside="info"):
        console = human(json_wanted=json)
        train_with(values, o.faults_of(context), console=console, json_wanted=json, where=where, dash=dash)


def train_with(
    values: Mapping[str, Any],
    faults: FaultPlanner,
    *,
    console: Console,
    json_wanted: bool,
    where: str,
    dash: str | None = None,
) -> None:
    """Train as these settings say, show it (with `dash` also in a browser), and report."""
    from atoll.dash import LiveView
    from atoll.launch import describe, run_train, train_config

    config, notes = train_config(values, where=where)
    faults.check(config)
    for line in (*describe(config), *notes):
        console.print(line, style="dim", markup=False, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    finished = run_train(
        config,
        view=o.page_beside(dash, say, lambda folder: LiveView(folder, console=console)),
        say=say,
        faults=faults,
    )
    finish_train(finished, console=console, json_wanted=json_wanted)


def finish_train(finished: FinishedRun, *, console: Console, json_wanted: bool) -> None:
    """The report and the summary of a run that came to its end, or how to go on with one that did not."""
    from atoll.dash import print_summary, write_report

    if json_wanted and finished.result is not None and finished.outcome.interrupted:
        print_json(finished.result)
    print_unhanded(finished.outcome, console=console)
    if finished.outcome.interrupted:
        exit_interrupted(finished.outcome, folder=finished.folder, console=console)
    write_report(finished.folder)
    print_summary(finished.folder, console)
    print_skipped(finished.outcome, console=console)
    if finished.outcome.given_up:
        text = f"{', '.join(finished.outcome.given_up)} was given up; see {finished.folder}/logs"
        console.print(text, style="yellow", markup=False, soft_wrap=True)
    if json_wanted:
        print_json(finished.result)


def print_skipped(outcome: RunOutcome, *, console: Console) -> None:
    """Faults of a chaos plan that could not be put in: a run that was spared some has not survived them."""
    for fault in outcome.skipped:
        text = f"left out of the plan: {fault.fault} on {fault.target} ({fault.reason})"
        console.print(text, style="yellow", markup=False, soft_wrap=True)


def print_unhanded(outcome: RunOutcome, *, console: Console) -> None:
    """Learners that left without their last progress being safe."""
    for learner, tokens in outcome.unhanded.items():
        text = f"{learner} left without handing over {tokens:,} tokens; its log says why"
        console.print(text, style="yellow", markup=False, soft_wrap=True)


def exit_interrupted(outcome: RunOutcome, *, folder: Path, console: Console) -> NoReturn:
    """Say what is left of a run that did not come to its end, and leave with the shell's status for the signal."""
    from atoll.launch import can_resume

    by_signal = outcome.reason in signal.Signals.__members__
    what = f"stopped by {outcome.reason}" if by_signal else f"stopped: {outcome.reason}"
    console.print(f"{what}; `atoll report {folder}` shows what was recorded", markup=False, soft_wrap=True)
    if can_resume(folder):
        console.print(f"go on with it: atoll resume {folder}", markup=False, soft_wrap=True)
    raise typer.Exit(128 + signal.Signals[outcome.reason] if by_signal else EXIT_UNFINISHED)
