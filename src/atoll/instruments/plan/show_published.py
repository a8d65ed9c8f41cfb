"""The published tables beside ours, cell by cell, for people."""

from __future__ import annotations

import math
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from atoll.instruments.plan.claims import ComparedClaim
from atoll.instruments.plan.published import BITS_PER_PARAMETER, MODELS, UTILISATIONS, Agreement, ComparedCell

WIDE = 120
"""Columns from which on both numbers of a cell stand side by side."""


def print_published(
    cells: tuple[ComparedCell, ...], totals: tuple[Agreement, ...], claims: tuple[ComparedClaim, ...], console: Console
) -> None:
    """Both tables, how many cells agree, and the other figures."""
    console.print("Gbit/s for a compute utilisation: published, then ours where it is another point of the grid")
    between = " | " if console.width >= WIDE else "\n"
    for total in totals:
        console.print(_table(total.table, [cell for cell in cells if cell.table == total.table], between))
        console.print(f"  {sentence(total)}", markup=False, soft_wrap=True)
        console.print(f"  {inputs(total.table)}", style="dim", markup=False, soft_wrap=True)
    table = Table(title="Other published figures", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in ("published", "ours", "remark"):
        table.add_column(column)
    for claim in claims:
        table.add_row(*map(Text, (claim.published, claim.ours, claim.remark)))
    console.print(table)


def sentence(total: Agreement) -> str:
    """In how many cells the two agree."""
    return (
        f"{total.exact} of {total.cells} cells are the same, {total.one_off} are one point of the grid (21%) off, "
        f"{total.more_off} more than one"
    )


def inputs(table: str) -> str:
    """What our numbers were made from."""
    layers = ", ".join(f"{model.name} {model.layers}" for model in MODELS if model.table == table)
    return f"inputs of ours: {BITS_PER_PARAMETER[table]:g} bits per parameter and exchange; layers: {layers}"


def cell_text(cell: ComparedCell, between: str) -> str:
    """Theirs, and ours with its distance if it differs."""
    theirs = _value(cell.published_gbit_s)
    return theirs if cell.steps_off == 0 else f"{theirs}{between}{_value(cell.ours_gbit_s)} ({cell.steps_off:+d})"


def _table(title: str, cells: list[ComparedCell], between: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("model, method", no_wrap=True)
    for utilisation in UTILISATIONS:
        table.add_column(f"{utilisation:.0%}", justify="right", no_wrap=True)
    shown = ""
    for (model, method), row in groupby(cells, key=lambda cell: (cell.model, cell.method)):
        if model != shown:
            table.add_row(Text(model, style="bold"))
        texts = [Text(cell_text(cell, between), style="" if cell.steps_off == 0 else "yellow") for cell in row]
        table.add_row(Text(f"  {method}"), *texts)
        shown = model
    return table


def _value(gbit_s: float) -> str:
    return "1000+" if math.isinf(gbit_s) else f"{gbit_s:.1f}"
