"""`atoll demo`: the whole story in about two minutes, with failures in it."""

from __future__ import annotations

from typing import Annotated

import typer

from atoll.cli import human, train_with
from atoll.cli import options as o

DEMO_STEPS = 720
"""A step of `tiny` takes some 60 ms of one core, so four learners on two cores train for about 95 s; starting five
processes and evaluating at the end bring the whole to about two minutes."""


def demo(
    *,
    learners: Annotated[int, typer.Option(help="Learner processes; at least 2.")] = 4,
    steps: Annotated[int, typer.Option(help="Inner steps per learner; more take longer and learn more.")] = DEMO_STEPS,
    seed: Annotated[int, typer.Option(help="Seed of parameters and data order.")] = 0,
    out: o.Out = None,
    json: o.Json = False,
    dash: Annotated[
        str, typer.Option(help="HOST:PORT of the live page, or off (default: any free port of this machine).")
    ] = "127.0.0.1:0",
    context: typer.Context,
) -> None:
    """Train a small byte-level GPT on this machine while parts of the run are killed and slowed, and report."""
    from atoll.instruments.chaos import chaos_plan
    from atoll.page import can_serve

    killed, slowed, *more = chaos_plan("demo", learners)
    console = human(json_wanted=json)
    for line in (
        f"{learners} learners train one small GPT on the source of Python's standard library, around a syncer.",
        f"At {killed.at_progress:.0%} of the run {killed.target} is killed with SIGKILL and comes back; from "
        f"{slowed.at_progress:.0%} to {slowed.until_progress:.0%} {slowed.target} is {slowed.amount:g}x slower.",
        *(
            f"At {fault.at_progress:.0%} the {fault.target} itself is killed, and goes on from its last commit."
            for fault in more
        ),
        "Watch the others: nobody waits. At the end there is a summary, a text sample and a report with pictures.",
    ):
        console.print(line, markup=False)
    values = {"learners": learners, "steps": steps, "seed": seed, "model": "tiny", "chaos": "demo"}
    if out is not None:
        values["out"] = out
    train_with(
        values,
        o.faults_of(context),
        console=console,
        json_wanted=json,
        where="the command line",
        dash=dash if dash != "off" and can_serve() else None,
    )
