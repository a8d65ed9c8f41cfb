"""Any JSON-like answer as readable tables: single values first, then one table for each list of records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_tables(answer: Mapping[str, Any], *, console: Console, title: str) -> None:
    """Print the single values as one table and every list (or mapping) of records as a table of its own."""
    records = {name: rows for name, value in answer.items() if (rows := _records(value))}
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in answer.items():
        if name not in records:
            table.add_row(name.replace("_", " "), _text(value))
    console.print(table)
    for name, rows in records.items():
        console.print(_record_table(name, rows))


def _records(value: Any) -> list[Mapping[str, Any]]:
    """A list of mappings as it is; a mapping of mappings with its names as the first column; else nothing."""
    if isinstance(value, Mapping) and value and all(isinstance(item, Mapping) for item in value.values()):
        return [{"id": name, **item} for name, item in value.items()]
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return value
    return []


def _record_table(name: str, rows: list[Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=name.replace("_", " "), title_justify="left")
    for column in columns:
        numeric = all(isinstance(row.get(column, 0), int | float) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(_text(row.get(column, "")) for column in columns))
    return table


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value) or "-"
    return str(value)
