"""The scorecard of a storm in the terminal: what happened, how the run fared against its twin, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

STEPS_GOAL = 0.95
LOSS_GOAL = 1.01
"""The issue's own numbers: 95% of the twin's learner steps, a loss within 1% of the twin's."""
VIOLATIONS_PRINTED_MAX = 10


def print_scorecard(card: dict[str, Any], console: Console, *, folder: Path) -> None:
    """Print it for somebody who sees one for the first time."""
    console.print(Rule("[bold]storm scorecard", style="cyan"))
    console.print(_verdict(card))
    console.print(_comparison(card))
    console.print(_faults(card))
    for skipped in card["faults_skipped"]:
        text = f"left out: {skipped['fault']} on {skipped['target']} ({skipped['reason']})"
        console.print(text, style="yellow", markup=False, soft_wrap=True)
    for failed in card["failed"]:
        console.print(f"a process failed that nobody had killed: {failed}", style="red", markup=False, soft_wrap=True)
    for violation in card["violations"][:VIOLATIONS_PRINTED_MAX]:
        console.print(f"broken: {violation}", style="bold red", markup=False, soft_wrap=True)
    more = len(card["violations"]) - VIOLATIONS_PRINTED_MAX
    if more > 0:
        console.print(f"and {more} more, in scorecard.json", style="red")
    console.print(f"replay of every merge from the recording: {card['replay']}", markup=False, soft_wrap=True)
    if not card["liveness_judged"]:
        text = "the run ended too soon after its last fault to say whether everybody was merged again (I5)"
        console.print(text, style="yellow", markup=False, soft_wrap=True)
    console.print(_how_to_read(card), style="dim", markup=False)
    console.print(f"folder: {folder} (scorecard.json, plan.toml, both runs)", markup=False, soft_wrap=True)


def _verdict(card: dict[str, Any]) -> Text:
    kinds = f"{card['faults']} faults of {len(card['fault_kinds'])} kinds in {card['minutes']:g} minutes"
    if card["violations"] or not card["ledger_exact"]:
        return Text(f"{kinds}: {len(card['violations'])} broken promises (listed below)", style="bold red")
    return Text(f"{kinds}: the run came to its end, every promise held, nobody had to help", style="bold green")


def _comparison(card: dict[str, Any]) -> Table:
    table = Table(title="against the same training without faults", title_justify="left")
    for name in ("", "storm", "twin", "storm / twin", "what it says"):
        table.add_column(name, justify="left" if name in ("", "what it says") else "right")
    rate, twin_rate = card["steps"] / max(card["wall_s"], 1e-9), card["steps_twin"] / max(card["wall_s_twin"], 1e-9)
    table.add_row(
        "learner steps/s",
        f"{rate:.2f}",
        f"{twin_rate:.2f}",
        _share(card["steps_ratio_raw"]),
        "all learners together, as it was",
    )
    table.add_row(
        "  accounted",
        "",
        "",
        _goal(_share(card["steps_ratio"]), (card["steps_ratio"] or 0.0) >= STEPS_GOAL),
        f"without {card['taken_s']:.0f} s of learner time that the plan took, with {card['added_s']:.0f} s it added",
    )
    table.add_row(
        "loss",
        _number(card["loss"]),
        _number(card["loss_twin"]),
        _goal(_share(card["loss_ratio"], 2), (card["loss_ratio"] or 9.0) <= LOSS_GOAL),
        f"published model, held-out data, after {card['tokens']:,} tokens",
    )
    table.add_row(
        "goodput",
        _share(card["goodput"]),
        _share(card["goodput_twin"]),
        "",
        "learner time that made progress that counts",
    )
    lost = sum(card["tokens_discarded"].values())
    causes = ", ".join(f"{count:,} {cause.replace('_', ' ')}" for cause, count in card["tokens_discarded"].items())
    sums = f"{card['tokens_merged']:,} merged + {card['tokens_pending']:,} pending + {lost:,} discarded"
    table.add_row(
        "ledger",
        _goal("exact" if card["ledger_exact"] else "WRONG", card["ledger_exact"]),
        "",
        "",
        f"{card['tokens']:,} = {sums}" + (f" ({causes})" if causes else ""),
    )
    return table


def _faults(card: dict[str, Any]) -> Table:
    table = Table(title="faults, and how soon what they hit was useful again", title_justify="left")
    for name in ("fault", "times", "median", "longest", "not back at the end"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for name, figures in card["recovery_s"].items():
        table.add_row(
            name,
            str(figures["count"]),
            _seconds(figures["median"]),
            _seconds(figures["max"]),
            str(figures["open"]) if figures["open"] else "",
        )
    return table


def _how_to_read(card: dict[str, Any]) -> str:
    return (
        f"accounted: freezes, absences and slow learners are taken off the time that they took on purpose, guests are "
        f"added; kills and everything on links, disk and data are our cost. {card['restarts']} learner and "
        f"{card['syncer_restarts']} syncer processes were started again. Times count from the end of a fault (from the "
        f"beginning for kill, cut and join) to the next commit that holds the learner's work."
    )


def _share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _goal(text: str, reached: bool) -> str:
    return f"[green]{text}[/green]" if reached else f"[red]{text}[/red]"
