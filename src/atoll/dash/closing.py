"""The closing words of a run in the terminal."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from atoll.dash import recovery, words
from atoll.dash.report import read_text
from atoll.dash.text import count_text, duration_text, loss_text
from atoll.observe import RunState, summarize

FAULTS_PRINTED_MAX = 10
ROWS_PRINTED_MAX = 8
SAMPLE_LINES_MAX = 12
SAMPLE_CHARS_MAX = 800


def print_summary(run_folder: str | Path, console: Console | None = None) -> None:
    """Say what happened: loss, goodput, what the failures cost, bytes, the fate of the tokens, a sample of text."""
    folder = Path(run_folder)
    console = console if console is not None else Console()
    state = summarize(folder)
    console.print(Rule("[bold]summary", style="cyan"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, text in _facts(state):
        grid.add_row(name, Text(text))
    console.print(grid)
    _print_faults(state, console)
    _print_recovery(state, console)
    _print_notices(state, console)
    sample = read_text(folder / "sample.txt")
    if sample:
        lines = sample[:SAMPLE_CHARS_MAX].splitlines()[:SAMPLE_LINES_MAX]
        console.print(Text("\na sample from the model", style="dim"))
        console.print(Padding(Text("\n".join(lines), style="italic"), (0, 2)))
    report = folder / "report.html"
    if report.exists():
        console.print(Text.assemble(("\nreport  ", "dim"), (str(report.resolve()), "bold")), soft_wrap=True)


def _facts(state: RunState) -> list[tuple[str, str]]:
    seconds = state.elapsed_s(state.end_ns)
    learners = f"{len(state.learners)} learner{'s' if len(state.learners) != 1 else ''}"
    tokens = state.tokens or state.ledger.processed
    loss = f"{loss_text(state.eval_loss)} nats per token, published model on held-out data"
    if state.eval_loss is None or math.isnan(state.eval_loss):
        loss = "not measured: nobody evaluated the published model"
    told = bool(state.tokens)
    facts = [
        ("loss", loss),
        ("trained", f"{count_text(tokens)} tokens in {duration_text(seconds)} by {learners}"),
        ("goodput", words.goodput_sentence(state) if told else "not known: no learner wrote its events to this folder"),
        ("bytes", words.bytes_sentence(state)),
        ("tokens", words.ledger_sentence(state)),
    ]
    if state.rounds.commits:
        rounds = state.rounds
        merged = f"{rounds.merged:,} contributions merged in {rounds.commits:,} commits"
        facts.append(("rounds", f"{merged}, {rounds.late:,} late and carried on, {rounds.aborted} rounds aborted"))
    return facts


def _print_faults(state: RunState, console: Console) -> None:
    costs = state.fault_costs()
    if not costs:
        return
    console.print(Text("\nwhat the failures cost", style="dim"))
    for cost in costs[:FAULTS_PRINTED_MAX]:
        console.print(Text.assemble(("  ✗ ", "red"), (words.fault_headline(state, cost), "bold")))
        console.print(Padding(Text(words.fault_own_cost(state, cost)), (0, 0, 0, 4)))
        console.print(Padding(Text(words.fault_others_cost(cost), style="green"), (0, 0, 0, 4)))
    if len(costs) > FAULTS_PRINTED_MAX:
        console.print(Text(f"  and {len(costs) - FAULTS_PRINTED_MAX} more, in the report", style="dim"))


def _print_recovery(state: RunState, console: Console) -> None:
    """What was lost, and what was not: restarts, durability, data, and learners that were cut off."""
    if not recovery.happened(state):
        return
    console.print(Text("\nwhat was lost, and what was not", style="dim"))
    lead = recovery.lead(state)
    if lead:
        console.print(Padding(Text(lead), (0, 2)))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, text in recovery.facts(state):
        grid.add_row(name, Text(text, style="bold red" if name == "degraded" else ""))
    rows = recovery.restarts(state, faults=False)
    for at, who, what, source, away in rows[:ROWS_PRINTED_MAX]:
        gone = f", away for {away}" if away != "-" else ""
        grid.add_row(f"at {at}", Text(f"{who}: {what}; state from {source}{gone}"))
    if len(rows) > ROWS_PRINTED_MAX:
        grid.add_row("", Text(f"and {len(rows) - ROWS_PRINTED_MAX} more, in the report", style="dim"))
    returns = recovery.returns(state)
    for at, who, away, steps, weight, share in returns[:ROWS_PRINTED_MAX]:
        text = f"{who}: cut off for {away}, came back with {steps} steps in one contribution, weight {weight}"
        grid.add_row(f"at {at}", Text(f"{text} ({share} would be an equal share)"))
    for text in recovery.problems(state)[:ROWS_PRINTED_MAX]:
        grid.add_row(Text("problem", style="red"), Text(text, style="red"))
    console.print(Padding(grid, (0, 2)))


def _print_notices(state: RunState, console: Console) -> None:
    """Learners that rounds did not wait for, and warnings."""
    rows = recovery.asides(state)
    lines = [
        f"{who}: from {at} for {lasts} ({why}); {merged} of its contributions were merged all the same"
        for at, who, lasts, why, merged in rows
    ]
    _print_list(console, "learners that rounds did not wait for", [*lines, *recovery.thin_links(state)], "yellow")
    _print_list(console, "what was decided about what is sent", recovery.adapted(state), "cyan")
    _print_list(console, "warnings", recovery.warnings(state), "red")


def _print_list(console: Console, title: str, lines: list[str], style: str) -> None:
    if not lines:
        return
    console.print(Text(f"\n{title}", style="dim"))
    for line in lines[:ROWS_PRINTED_MAX]:
        console.print(Padding(Text.assemble(("! ", style), line), (0, 2)))
    if len(lines) > ROWS_PRINTED_MAX:
        console.print(Text(f"  and {len(lines) - ROWS_PRINTED_MAX} more, in the report", style="dim"))
