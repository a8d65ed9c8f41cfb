"""One page with headings, figures, captions and tables that opens from a disk, without scripts or a network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path

from atoll.errors import ConfigError
from atoll.instruments.figures.picture import Markup, PageTable, Picture

Content = str | Markup | Picture | PageTable
"""Text becomes a paragraph; `Markup` (what `Picture.save` returns) is taken as it is."""


@dataclass(frozen=True)
class Section:
    heading: str
    content: Sequence[Content] = field(default_factory=tuple)
    """In this order. Narrow figures that follow each other stand side by side where there is room."""


def page(path: str | os.PathLike[str], title: str, intro: str, sections: Iterable[Section]) -> Path:
    """Write the page to PATH (its suffix becomes .html if it has none) and return where it is."""
    target = Path(path)
    if not target.suffix:
        target = target.with_suffix(".html")
    body = [f"<header><h1>{escape(title)}</h1>{_paragraphs(intro, 'lead')}</header>"]
    body += [_section(section) for section in sections]
    if len(body) == 1:
        raise ConfigError("The page has no sections. Give at least one with a figure, a table or a text.")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style>"
    )
    text = f'<!DOCTYPE html><html lang="en"><head>{head}</head><body><main>{"".join(body)}</main></body></html>\n'
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {target}: {error}. Choose a folder that can be written to.") from error
    return target


def _section(section: Section) -> str:
    parts: list[str] = []
    row: list[str] = []
    for item in section.content:
        piece, is_figure = _piece(item)
        if not is_figure and row:
            parts.append(f'<div class="figures">{"".join(row)}</div>')
            row = []
        (row if is_figure else parts).append(piece)
    if row:
        parts.append(f'<div class="figures">{"".join(row)}</div>')
    return f"<section><h2>{escape(section.heading)}</h2>{''.join(parts)}</section>"


def _piece(item: Content) -> tuple[str, bool]:
    """(HTML, whether it is a figure)"""
    if isinstance(item, Picture):
        return item.html(), True
    if isinstance(item, PageTable):
        return item.html(), False
    if isinstance(item, Markup):
        return item, item.startswith("<figure")
    if isinstance(item, str):
        return _paragraphs(item), False
    raise ConfigError(
        f"A page cannot show a {type(item).__name__}. Give text, a Table, a Picture, or what Picture.save returned."
    )


def _paragraphs(text: str, css: str = "") -> str:
    """Empty lines separate paragraphs."""
    name = f' class="{css}"' if css else ""
    return "".join(f"<p{name}>{escape(' '.join(part.split()))}</p>" for part in text.split("\n\n") if part.strip())


def _style() -> str:
    return files("atoll.instruments.figures").joinpath("page.css").read_text(encoding="utf-8")
