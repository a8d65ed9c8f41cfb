"""What `atoll lab` says of runs and studies: tables and lines for people, plain values for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atoll.instruments.cli.amounts import count, duration

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.instruments.lab import LabResult, Planned, Study, StudyOutcome, TextTable

LABEL_MIN = 10
"""Room for `decoupled` on a narrow terminal."""
GAP = 3
"""Between two columns."""
ROOM_MAX = 10_000
"""Columns of characters: where no terminal sets a limit, none is needed."""


def print_result(console: Console, result: LabResult) -> None:
    spec = result.spec
    many = f", {spec.learners} learners" if spec.method not in ("dp", "single") else ""
    console.print(
        f"{spec.method}{many}, {spec.model if spec.task == 'gpt' else spec.task}, {spec.optimizer}, "
        f"{result.tokens:,} tokens: "
        f"held-out loss {result.loss:.4f}{' nats per token' if spec.task == 'gpt' else ''}",
        style="bold",
        soft_wrap=True,
    )
    curve = "  ".join(f"{count(tokens)} {loss:.3f}" for tokens, loss in result.curve)
    console.print(f"on the way: {curve}", style="dim", soft_wrap=True)
    console.print(
        f"virtual time {duration(result.virtual_s)}; here {duration(result.wall_s)} "
        f"at {result.tokens_per_s:,.0f} tokens/s on {result.facts.get('device', 'this machine')}",
        soft_wrap=True,
        markup=False,
    )
    facts = {name: value for name, value in result.facts.items() if _worth_saying(name, value)}
    if facts:
        said = ", ".join(f"{name.replace('_', ' ')} {_fact(value)}" for name, value in facts.items())
        console.print(said, style="dim", soft_wrap=True, markup=False)


def _worth_saying(name: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and name not in ("eval_s", "machine_events")


def _fact(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def print_head(console: Console, study: Study, planned: tuple[Planned, ...], left: int, path: Path) -> None:
    runs = len({one.spec.key for one in planned})
    tokens = sum({one.spec.key: one.spec.tokens for one in planned}.values())
    console.print(
        f"{study.name}: {runs} runs of {len({one.label for one in planned})} arms, {count(tokens)} tokens; "
        f"{runs - left} are done, {left} to go; results in {path}",
        markup=False,
        soft_wrap=True,
    )


def print_outcome(console: Console, study: Study, outcome: StudyOutcome, *, some: bool = False) -> None:
    """`some`: the study has more arms than were asked for."""
    for one, reason in outcome.failed:
        text = f"{one.title}, seed {one.spec.seed} failed: {reason}"
        console.print(text, style="red", markup=False, soft_wrap=True)
    if outcome.interrupted:
        console.print("interrupted; what is finished is kept, and the same command goes on", style="yellow")
    elif outcome.left and outcome.left == outcome.elsewhere:
        console.print(f"{_runs_are(outcome.left)} under way in other processes; nothing else is left", style="yellow")
    elif outcome.left:
        console.print(f"{_runs_are(outcome.left)} left; the same command goes on", style="yellow")
    else:
        which = "the others" if outcome.failed else "these runs" if some else "all runs"
        text, style = f"{which} are done", "bold" if outcome.failed else "bold green"
        console.print(f"{study.name}: {text}", style=style, markup=False)


def _runs_are(count: int) -> str:
    return "1 run is" if count == 1 else f"{count} runs are"


def outcome_dict(study: Study, outcome: StudyOutcome) -> dict[str, Any]:
    return {
        "study": study.name,
        "done": outcome.done,
        "failed": [
            {"run": one.title, "seed": one.spec.seed, "key": one.spec.key, "reason": reason}
            for one, reason in outcome.failed
        ],
        "left": outcome.left,
        "elsewhere": outcome.elsewhere,
        "interrupted": outcome.interrupted,
    }


def print_list(console: Console, study: Study, planned: tuple[Planned, ...], results: Any) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from atoll.instruments.lab import Forecast

    known = results.records()
    forecast = Forecast(known)
    table = Table(
        title=f"{study.name}: {results.path}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("run", "seed", "tokens", "key", ""):
        table.add_column(name, justify="right" if name in ("seed", "tokens") else "left")
    for one in planned:
        seconds = forecast.seconds(one.spec)
        ahead = f"about {duration(seconds)}" if seconds is not None else "to go"
        state = f"done, loss {known[one.spec.key].loss:.4f}" if one.spec.key in known else ahead
        table.add_row(one.title, str(one.spec.seed), f"{one.spec.tokens:,}", one.spec.key, state)
    console.print(table, markup=False)


def print_table(console: Console, study: Study, text: TextTable) -> None:
    """The first column may be folded, numbers never; columns that a narrow terminal has no room for are named."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    widths = [_column_width(text, place) for place in range(len(text.header))]
    least = [min(LABEL_MIN, widths[0]), *widths[1:]]
    shown, left_out = list(range(len(widths))), list[str]()
    for spare in reversed(_spare(text)):
        if not console.is_terminal or _need(least, shown) <= console.width:
            break
        shown.remove(spare)
        left_out.insert(0, text.header[spare])
    table = Table(
        title=escape(study.name), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for place in shown:
        numbers = [row[place] for row in text.rows if row[place] not in ("", "-")]
        numeric = bool(numbers) and all(cell[0] in "+-0123456789" for cell in numbers)
        side: Literal["left", "right"] = "right" if numeric else "left"
        table.add_column(escape(text.header[place]), justify=side, overflow="fold", min_width=least[place])
    for row in text.rows:
        table.add_row(*(escape(row[place]) for place in shown))
    measured = console.measure(table, options=console.options.update(max_width=ROOM_MAX))
    narrow = max(console.width, measured.minimum, _need(least, shown))
    before = console.width
    console.width = narrow if console.is_terminal else measured.maximum  # one given to print is cut to the console's
    try:
        console.print(table)
    finally:
        console.width = before
    if left_out:
        said = f"no room for {', '.join(left_out)}: a wider terminal, --markdown or --json has them"
        console.print(said, style="dim", markup=False, soft_wrap=True)


def _spare(text: TextTable) -> list[int]:
    """The columns that a line can be understood without: all but what it is, its loss and the first comparison."""
    if "seeds" not in text.header:
        return []
    seeds = text.header.index("seeds")
    kept = text.header[: seeds + 3]
    return [place for place, name in enumerate(text.header) if name == "seeds" or name not in kept]


def _need(widths: Sequence[int], shown: Sequence[int]) -> int:
    """Columns, the gaps between them, and a space on either side."""
    return sum(widths[place] + GAP for place in shown) + GAP


def _column_width(text: TextTable, place: int) -> int:
    """What the cells need, and the longest word of the header; the first column's are as long as they are."""
    words = max((len(word) for word in text.header[place].split()), default=0)
    return max([words, *(len(row[place]) for row in text.rows)])
