"""`atoll sim`: whole clusters in virtual time, each drawn from one number."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import EXIT_INTERRUPTED, human, print_json, save_text
from atoll.cli import options as o
from atoll.instruments.cli.goodput import goodput

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.instruments.sim import Explained, FuzzReport, RunReport, Scenario

Draw = Annotated[int | None, typer.Option(help="The version of drawing that the seeds are of (newest if not given).")]
EXIT_VIOLATION = 1
SAY_EVERY_S = 2.0

sim = typer.Typer(
    help="Run whole clusters in virtual time: the protocol of production, every fault, one seed.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
sim.command("goodput")(goodput)


@sim.command("fuzz")
def fuzz_command(
    *,
    seeds: Annotated[int, typer.Option(help="How many scenarios to draw and run.")] = 200,
    first: Annotated[int, typer.Option(help="The first seed; the others follow it.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes (0: one per core).")] = 0,
    minutes: Annotated[float, typer.Option(help="Stop after so many minutes (0: when all seeds are done).")] = 0.0,
    draw: Draw = None,
    json: o.Json = False,
) -> None:
    """Draw a scenario per seed, run it, check every invariant, heal the world and demand progress."""
    from atoll.instruments.sim import DRAW_VERSION, FAILURES_EXPLAINED, explain, fuzz

    console, version = human(json_wanted=json), DRAW_VERSION if draw is None else draw
    progress = _Progress(console, seeds)
    report = fuzz(seeds, first=first, jobs=jobs, minutes=minutes, version=version, progress=progress)
    for outcome in report.failures[:FAILURES_EXPLAINED]:
        _print_failure(console, outcome.seed, explain(outcome.seed, version))
    if report.interrupted:
        console.print(f"stopped after {report.seeds:,} of {seeds:,} seeds", style="yellow")
    _print_totals(console, report)
    if json:
        print_json(report.to_dict())
    if report.failures:
        raise typer.Exit(EXIT_VIOLATION)
    if report.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


@sim.command("run")
def run_command(
    *,
    seed: Annotated[int | None, typer.Option(help="Draw the scenario of this seed.")] = None,
    draw: Draw = None,
    scenario: Annotated[Path | None, typer.Option(help="Run a scenario that --save has written.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Take the faults from this plan (as for atoll chaos).")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Print every event.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the scenario to this file.")] = None,
    shrink: Annotated[bool, typer.Option("--shrink", help="If it fails, look for a smaller one that does.")] = False,
    json: o.Json = False,
) -> None:
    """Run one scenario again: the same events, byte for byte, every time and on every machine."""
    from atoll.instruments.sim import run_scenario, to_json
    from atoll.instruments.sim import shrink as shrunk

    console = human(json_wanted=json)
    chosen = _choose(seed, draw, scenario, plan)
    report = run_scenario(chosen, tracing=True)
    if shrink and report.violations:
        report = shrunk(report)
        chosen = report.scenario
    if save is not None:  # before anything is said: whoever listens may have gone
        save_text("--save", save, to_json(chosen) + "\n")
    if trace:
        for line in report.lines:
            console.print(line, markup=False, soft_wrap=True, highlight=False)
    _print_run(console, report)
    if save is not None:
        console.print(f"the scenario is in {save}", markup=False, soft_wrap=True)
    if json:
        print_json(_run_values(report))
    if report.violations:
        raise typer.Exit(EXIT_VIOLATION)


def _choose(seed: int | None, version: int | None, file: Path | None, plan: Path | None) -> Any:
    from dataclasses import replace

    from atoll.errors import ConfigError
    from atoll.instruments.sim import DRAW_VERSION, SimFault, draw, load

    if (seed is None) == (file is None):
        raise ConfigError("give either --seed NUMBER or --scenario FILE")
    if file is not None and version is not None:
        raise ConfigError("--draw goes with --seed: the file says which version drew it")
    newest = DRAW_VERSION if version is None else version
    chosen = load(file) if file is not None else draw(seed if seed is not None else 0, newest)
    if plan is not None:
        from atoll.instruments.chaos import load_plan

        loaded = load_plan(plan, learners=len(chosen.learners), seconds=chosen.seconds)
        faults = tuple(SimFault.of_plan(fault, chosen.seconds) for fault in loaded.faults)
        chosen = replace(chosen, faults=faults)
    return chosen


class _Progress:
    """A line now and then while the seeds run, and one for each that fails, at once: a night's run may be ended from
    outside before it explains them."""

    def __init__(self, console: Console, seeds: int) -> None:
        self._console = console
        self._seeds = seeds
        self._failed = 0
        self._said_s = time.monotonic()

    def __call__(self, report: FuzzReport) -> None:
        for outcome in report.failures[self._failed :]:
            self._console.print(f"seed {outcome.seed} broke {outcome.violations[0]}", markup=False, soft_wrap=True)
        self._failed = len(report.failures)
        now_s = time.monotonic()
        if now_s - self._said_s < SAY_EVERY_S:
            return
        self._said_s = now_s
        failed = f", {len(report.failures)} failed" if report.failures else ""
        self._console.print(
            f"{report.seeds:,} of {self._seeds:,} seeds, {report.seeds / report.seconds:.1f} per second, "
            f"{report.simulated_ns / 3.6e12:.1f} simulated hours{failed}",
            style="dim",
        )


def _print_totals(console: Console, report: FuzzReport) -> None:
    values = report.to_dict()
    last = report.first + max(0, report.seeds - 1)
    for name, text in (
        ("seeds", f"{report.seeds:,}: {report.first} to {last} of draw {values['draw']}"),
        ("with the default settings", f"{report.defaults:,}"),
        ("with a learner that lies", f"{report.liars:,}"),
        ("with a fabric", f"{report.fabrics:,}"),
        ("faults", f"{values['faults']:,} of {len(report.faults)} kinds"),
        ("simulated hours", f"{values['simulated_hours']}"),
        ("commits", f"{report.commits:,}"),
        ("machine events", f"{report.events:,}, {values['events_per_s']:,} per second"),
        ("most of them", f"{report.most[0]:,}, seed {report.most[1]}"),
        ("wall time", f"{report.seconds:.1f} s, {values['seeds_per_s']} seeds per second"),
        ("seeds that broke an invariant", f"{len(report.failures):,}"),
        ("seeds that took a liar's word", f"{len(report.undecidable):,}, where no two honest learners agreed"),
    ):
        console.print(f"{name:<30} {text}", soft_wrap=True, highlight=False)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.faults.items()))
    console.print(f"faults: {kinds or 'none'}", style="dim", soft_wrap=True)
    if report.failures:
        listed = ", ".join(str(outcome.seed) for outcome in report.failures[:20])
        console.print(f"{len(report.failures)} seeds broke an invariant: {listed}", style="bold red", soft_wrap=True)
    else:
        console.print("no invariant was broken", style="bold green")


def _print_failure(console: Console, seed: int, explained: Explained) -> None:
    whole, small = explained.whole, explained.small
    broke = f"seed {seed} of draw {whole.scenario.draw} broke {whole.violations[0]}"
    console.print(broke, style="bold red", markup=False, soft_wrap=True)
    console.print("its last events:", style="dim")
    for line in whole.last:
        console.print(f"  {line}", markup=False, soft_wrap=True, style="dim")
    console.print(
        f"smaller, with {len(small.scenario.learners)} learners and {len(small.scenario.faults)} faults: "
        f"{small.violations[0]}",
        markup=False,
        soft_wrap=True,
    )
    for fault in small.scenario.faults:
        console.print(f"  {fault}", markup=False, soft_wrap=True)
    console.print(
        f"again: atoll sim run --seed {seed} --draw {whole.scenario.draw} --trace;  as a file: the same with "
        f"--shrink --save draw-{whole.scenario.draw}-seed-{seed}.json",
        markup=False,
        soft_wrap=True,
    )


def _fabric(scenario: Scenario) -> str:
    """What the run has besides a syncer and its learners."""
    parts = [f"standby {scenario.standby}"] if scenario.standby else []
    parts += [f"{scenario.shards} shards"] if scenario.shards else []
    parts += [f"a relay before {scenario.relayed} learners"] if scenario.relayed else []
    return "".join(f"{part}, " for part in parts)


def _print_run(console: Console, report: RunReport) -> None:
    scenario = report.scenario
    config = scenario.config
    drawn = f" of draw {scenario.draw}" if scenario.draw else ""
    console.print(
        f"seed {scenario.seed}{drawn}: {len(scenario.learners)} learners, {config.fragments} fragments, "
        f"H {config.sync_every}, tau {config.overlap}, quorum {config.quorum}, "
        f"{config.codec_up} up, {config.codec_down} down, adopt {config.adopt}, durability {scenario.durability}, "
        f"{'arrays' if scenario.arrays else 'no arrays'}, {_fabric(scenario)}{len(scenario.faults)} faults",
        markup=False,
        soft_wrap=True,
    )
    console.print(
        f"{report.simulated_ns / 1e9:.1f} simulated seconds, {report.events:,} machine events, "
        f"{report.commits} commits, trace {report.digest} ({len(report.lines):,} lines)",
        markup=False,
        soft_wrap=True,
    )
    if report.undecidable:
        console.print(
            f"{report.undecidable} versions were a liar's: no two honest learners agreed on another",
            style="yellow",
            soft_wrap=True,
        )
    if report.violations:
        for violation in report.violations:
            console.print(str(violation), style="bold red", markup=False, soft_wrap=True)
    else:
        console.print("no invariant was broken", style="bold green")


def _run_values(report: RunReport) -> dict[str, Any]:
    return {
        "seed": report.scenario.seed,
        "draw": report.scenario.draw,
        "violations": [str(violation) for violation in report.violations],
        "simulated_seconds": report.simulated_ns / 1e9,
        "events": report.events,
        "faults": report.faults,
        "commits": report.commits,
        "undecidable": report.undecidable,
        "trace": report.digest,
        "lines": len(report.lines),
    }
