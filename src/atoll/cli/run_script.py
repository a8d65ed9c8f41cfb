"""`atoll run`: the user's own training script, once per learner, as with torchrun."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from atoll.cli import options as o
from atoll.cli.terminal import human

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
    codec_up: o.CodecUp = None,
    codec_down: o.CodecDown = None,
    adopt: o.Adopt = None,
    threads: o.Threads = None,
    out: o.Out = None,
    config: o.ConfigFile = None,
) -> None:
    """Start a syncer and M learners that run your script: atoll run --learners 4 -- python train.py

    The output of learner-0 appears here, that of the others in the run folder's logs.
    """
    values, where = o.given(locals(), "command")
    from atoll.cli.train import exit_interrupted
    from atoll.launch import describe, run_command, run_config

    console = human(json_wanted=True)
    resolved = run_config(values, where=where)
    for line in describe(resolved):
        console.print(line, style="dim", markup=False, soft_wrap=True)
    outcome, folder = run_command(
        resolved,
        command or [],
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
        say_raw=_write_raw,
    )
    if outcome.interrupted:
        exit_interrupted(outcome, folder=str(folder), console=console)
    if outcome.given_up:
        console.print(f"{', '.join(outcome.given_up)} failed; see {folder}/logs", style="red", markup=False)
        raise typer.Exit(EXIT_LEARNERS_FAILED)
    if outcome.silent:
        console.print(
            f"{', '.join(outcome.silent)} never joined the run: does the script make an atoll.Learner and call step()?",
            style="yellow",
            markup=False,
        )
        if len(outcome.silent) == resolved.learners:
            raise typer.Exit(EXIT_LEARNERS_FAILED)
    console.print(f"published model: {folder}/model.safetensors; report: atoll report {folder}", markup=False)


def _write_raw(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
