"""`atoll run`: the user's own training script, once per learner, as with torchrun."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options as o
from atoll.cli.terminal import human, logged_as, print_json, write_raw, write_raw_aside

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.launch import FaultPlanner, FinishedRun, RunOutcome

EXIT_LEARNERS_FAILED = 1


@o.takes(o.SYNC, o.KEEPING)
def run_script(
    command: Annotated[
        list[str] | None, typer.Argument(help="The command of each learner, after --: python train.py ...")
    ] = None,
    *,
    learners: Annotated[int | None, typer.Option(help="How many learners to start (M) (default 2).")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes of each learner, started by torchrun: DDP, FSDP2, tensor parallel (default 1)."),
    ] = None,
    gpus_per_learner: Annotated[
        int | None, typer.Option(help="GPUs of each learner (default: one for each of its ranks).")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="decoupled, or diloco: synchronous, learners wait (default decoupled).")
    ] = None,
    tokens_budget: Annotated[
        int | None,
        typer.Option(
            help="End the run after this many tokens of all learners: learner.done is True then (default 0: none)."
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="End the run this long after its first step: learners hand over and leave (default 0: no limit)."
        ),
    ] = None,
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
    threads: o.Threads = None,
    out: o.Out = None,
    config: o.ConfigFile = None,
    json: o.Json = False,
    dash: o.Dash = None,
    metrics: o.Metrics = "",
    log_format: o.LogFormat = "text",
    context: typer.Context,
    **named: Any,
) -> None:
    """Start a syncer and M learners that run your script: atoll run --learners 4 -- python train.py

    The output of learner-0 appears here (with --json on standard error), that of the others in the run folder's logs.
    RUN/result.json, which --json prints, holds tokens and their ledger (processed, merged, pending, discarded by
    cause), steps by learner, goodput, bytes and how the run ended; `atoll report RUN --json` gives it again.

    Exit status: 0 when the script ended or its time was up; 1 when learners failed, never joined, or never called
    learner.step; 128 + signal after Ctrl-C. A learner that is told to leave ends with 0, or with 4 if it could not hand
    over its last progress.
    """
    values, where = o.given(locals(), "command", "json", "dash", "metrics", "log_format", "context")
    o.use_metrics(metrics)
    with logged_as(log_format, aside="info"):
        _run(values, where, command or [], json_wanted=json, dash=dash, faults=o.faults_of(context))


def _run(
    values: Mapping[str, Any],
    where: str,
    command: Sequence[str],
    *,
    json_wanted: bool,
    dash: str | None,
    faults: FaultPlanner,
) -> None:
    from atoll.launch import describe, run_command, script_config

    console = human(json_wanted=True)
    resolved, notes = script_config(values, where=where)
    faults.check(resolved)
    for line in (*describe(resolved), *notes):
        console.print(line, style="dim", markup=False, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    finished = run_command(
        resolved,
        command,
        say=say,
        view=o.page_beside(dash, say),
        say_raw=write_raw_aside if json_wanted else write_raw,
        faults=faults,
    )
    finish_script(finished, console=console, json_wanted=json_wanted)


def finish_script(finished: FinishedRun, *, console: Console, json_wanted: bool) -> None:
    """Say how a run of the user's own script ended, and leave with the status that goes with it."""
    from atoll.cli.train import exit_interrupted, print_skipped, print_unhanded

    outcome, folder = finished.outcome, finished.folder
    _print_faults(outcome, console=console)
    print_skipped(outcome, console=console)
    print_unhanded(outcome, console=console)
    if json_wanted and finished.result is not None:
        print_json(finished.result)
    if outcome.interrupted:
        exit_interrupted(outcome, folder=folder, console=console)
    failed = bool(outcome.given_up or outcome.stayed_out) or not outcome.trained
    if outcome.given_up:
        console.print(f"{', '.join(outcome.given_up)} failed; see {folder}/logs", style="red", markup=False)
    if outcome.silent:
        console.print(
            f"{', '.join(outcome.silent)} never joined the run: does the script make an atoll.Learner and call step()?",
            style="red" if outcome.stayed_out else "yellow",
            markup=False,
        )
    if outcome.trained:
        text = f"published model: {folder}/model.safetensors; report: atoll report {folder}"
    else:
        text = "nothing was trained, so that there is no model: no learner called learner.step, once per optimizer step"
    console.print(text, style="" if outcome.trained else "red", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(EXIT_LEARNERS_FAILED)


def _print_faults(outcome: RunOutcome, *, console: Console) -> None:
    if not outcome.faults:
        return
    counts = Counter(fault.fault for fault in outcome.faults)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    console.print(f"the script came through {len(outcome.faults)} faults: {kinds}", markup=False, soft_wrap=True)
    for fault in outcome.faults:
        detail = f": {fault.detail}" if fault.detail else ""
        text = f"  at {fault.t_s:6.1f} s  {fault.fault} on {fault.target}{detail}"
        console.print(text, style="dim", markup=False, soft_wrap=True)
