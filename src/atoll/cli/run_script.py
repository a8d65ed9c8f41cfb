"""`atoll run`: the user's own training script, once per learner, as with torchrun."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options as o
from atoll.cli.terminal import human, write_raw

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.launch import Outcome

EXIT_LEARNERS_FAILED = 1


def run_script(
    command: Annotated[
        list[str] | None, typer.Argument(help="The command of each learner, after --: python train.py ...")
    ] = None,
    *,
    learners: Annotated[int | None, typer.Option(help="How many learners to start (M) (default 2).")] = None,
    sync_every: o.SyncEvery = None,
    fragments: o.Fragments = None,
    overlap: o.Overlap = None,
    quorum: o.Quorum = None,
    grace_cap: o.GraceCap = None,
    weights: o.Weights = None,
    merge: o.Merge = None,
    outer_lr: o.OuterLr = None,
    outer_momentum: o.OuterMomentum = None,
    momentum_restart: o.MomentumRestart = None,
    correction: o.Correction = None,
    partial: o.Partial = None,
    codec_up: o.CodecUp = None,
    codec_down: o.CodecDown = None,
    feedback_up: o.FeedbackUp = None,
    feedback_down: o.FeedbackDown = None,
    adopt: o.Adopt = None,
    durability: o.Durability = None,
    durability_interval: o.DurabilityInterval = None,
    snapshots: o.Snapshots = None,
    snapshot_every: o.SnapshotEvery = None,
    keep: o.Keep = None,
    snapshot_options: o.SnapshotOptions = None,
    record: o.Record = None,
    chaos: o.Chaos = None,
    chaos_seed: o.ChaosSeed = None,
    storm_minutes: o.StormMinutes = None,
    threads: o.Threads = None,
    out: o.Out = None,
    config: o.ConfigFile = None,
) -> None:
    """Start a syncer and M learners that run your script: atoll run --learners 4 -- python train.py

    The output of learner-0 appears here, that of the others in the run folder's logs.
    """
    values, where = o.given(locals(), "command")
    from atoll.launch import describe, run_command, run_config

    console = human(json_wanted=True)
    resolved = run_config(values, where=where)
    for line in describe(resolved):
        console.print(line, style="dim", markup=False, soft_wrap=True)
    outcome, folder = run_command(
        resolved,
        command or [],
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
        say_raw=write_raw,
    )
    finish_script(outcome, folder, console=console)


def finish_script(outcome: Outcome, folder: Path, *, console: Console) -> None:
    """Say how a run of the user's own script ended, and leave with the status that goes with it."""
    from atoll.cli.train import exit_interrupted, print_skipped

    if outcome.faults:
        counts = Counter(fault.fault for fault in outcome.faults)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        console.print(f"the script came through {len(outcome.faults)} faults: {kinds}", markup=False, soft_wrap=True)
        for fault in outcome.faults:
            detail = f": {fault.detail}" if fault.detail else ""
            text = f"  at {fault.t_s:6.1f} s  {fault.fault} on {fault.target}{detail}"
            console.print(text, style="dim", markup=False, soft_wrap=True)
    print_skipped(outcome, console=console)
    if outcome.interrupted:
        exit_interrupted(outcome, folder=folder, console=console)
    if outcome.given_up:
        console.print(f"{', '.join(outcome.given_up)} failed; see {folder}/logs", style="red", markup=False)
        raise typer.Exit(EXIT_LEARNERS_FAILED)
    if outcome.silent:
        console.print(
            f"{', '.join(outcome.silent)} never joined the run: does the script make an atoll.Learner and call step()?",
            style="yellow",
            markup=False,
        )
        if len(outcome.silent) == outcome.learners:
            raise typer.Exit(EXIT_LEARNERS_FAILED)
    console.print(f"published model: {folder}/model.safetensors; report: atoll report {folder}", markup=False)
