"""A finished figure: its PNG, its HTML (inline SVG), its caption and the table of what is in it."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import ConfigError
from atoll.instruments.figures.style import DPI, PAGE_INCHES, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCREEN_SCALE = 1.4
"""A figure is shown this much larger on a screen than on paper: 7 pt type becomes about 13 px."""

_NUMBER = re.compile(r"[+\u2212-]?[\d.,]+(\s?[%kMBTs]?)(\s?±\s?[\d.]+)?")


class Markup(str):
    """HTML that is finished: `page` takes it as it is, while plain text is escaped."""


@dataclass(frozen=True)
class PageTable:
    """Rows of text under named columns. A column whose cells are all numbers is set flush right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for i, row in enumerate(self.rows):
            if len(row) != len(self.head):
                raise ConfigError(
                    f"Table {self.title!r}: row {i} has {len(row)} cells, not {len(self.head)}. Give one per column."
                )

    def html(self) -> Markup:
        numeric = [self._numeric(column) for column in range(len(self.head))]
        head = "".join(_cell("th", text, numeric[i], ' scope="col"') for i, text in enumerate(self.head))
        body = "".join(f"<tr>{self._row(row, numeric)}</tr>" for row in self.rows)
        title = escape(self.title)
        return Markup(
            f'<div class="scroll" role="region" tabindex="0" aria-label="{title}"><table><caption>{title}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _row(self, row: Sequence[str], numeric: Sequence[bool]) -> str:
        first = _cell("td" if numeric[0] else "th", row[0], numeric[0], "" if numeric[0] else ' scope="row"')
        return first + "".join(_cell("td", text, numeric[i]) for i, text in enumerate(row[1:], 1))

    def _numeric(self, column: int) -> bool:
        cells = [row[column] for row in self.rows if row[column] not in ("", "–")]
        return bool(cells) and all(_NUMBER.fullmatch(cell) for cell in cells)


def _cell(tag: str, text: str, numeric: bool, more: str = "") -> str:
    css = ' class="number"' if numeric else ""
    return f"<{tag}{css}{more}>{escape(text)}</{tag}>"


@dataclass
class Picture:
    """What a figure function gives."""

    figure: Figure
    title: str
    """What it shows, in a few words: read aloud in place of the drawing."""
    caption: str
    table: PageTable
    notes: list[str] = field(default_factory=list)
    """What a reader must know, such as values that could not be drawn; part of the caption."""
    tips: Mapping[str, str] = field(default_factory=dict)
    """Drawn group id -> the values in it, as text. They are in the SVG and show when the mouse rests on the line."""

    @property
    def full_caption(self) -> str:
        return " ".join([self.caption, *self.notes]).strip()

    def save(self, path: str | os.PathLike[str]) -> Markup:
        """Write PATH.png (300 dpi) and return the HTML with the same drawing inside."""
        target = Path(path)
        stem = target.name.removesuffix(".png")
        if not stem:
            raise ConfigError(f"{str(path)!r} names no file. Give a path and a name without a suffix.")
        target = target.with_name(f"{stem}.png")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with styled():
                metadata = {"Title": self.title, "Software": "atoll"}
                self.figure.savefig(target, format="png", dpi=DPI, metadata=metadata)
        except OSError as error:
            raise ConfigError(f"Cannot write {target}: {error}. Choose a folder that can be written to.") from error
        return self.html()

    def html(self) -> Markup:
        width = float(self.figure.get_size_inches()[0])
        size = "wide" if width > 0.75 * PAGE_INCHES else "narrow"
        pixels = round(width * 96 * SCREEN_SCALE)
        caption = f"<figcaption>{escape(self.full_caption)}</figcaption>" if self.full_caption else ""
        panel = f'<div class="panel">{self.svg()}</div>'
        return Markup(f'<figure class="{size}" style="--width: {pixels}px">{panel}{caption}</figure>')

    def svg(self) -> str:
        """An SVG element for use inside HTML: no declarations, ids that no other picture has."""
        buffer = io.BytesIO()
        with styled():
            self.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        text = buffer.getvalue().decode("utf-8")
        prefix = "f" + hashlib.sha256(text.encode()).hexdigest()[:8] + "-"
        return _inline(text, prefix, self.title, self.tips)


def _inline(text: str, prefix: str, title: str, tips: Mapping[str, str]) -> str:
    text = text[text.index("<svg") :]
    view = re.search(r'viewBox="([^"]+)"', text)
    assert view is not None, "matplotlib always writes a viewBox"
    text = text[text.index(">") + 1 :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>|<defs>\s*</defs>", "", text, flags=re.DOTALL)
    for group, tip in tips.items():
        text = text.replace(f'<g id="{group}">', f'<g id="{group}"><title>{escape(tip)}</title>', 1)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    # matplotlib's own style sheet says this of every element; inside a page it would reach the whole page.
    inherited = "stroke-linejoin:round;stroke-linecap:butt"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{view[1]}" '
        f'role="img" aria-label="{escape(title)}" style="{inherited}">{text.strip()}'
    )


def group_id(kind: str, label: str) -> str:
    """An id for a drawn series: letters, digits and dashes only."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', label.lower()).strip('-') or 'x'}"


def unique_ids(kind: str, labels: Iterable[str]) -> list[str]:
    """One id per label, also where two labels differ only in characters that ids do not have."""
    made: list[str] = []
    for label in labels:
        base = group_id(kind, label)
        made.append(base if base not in made else f"{base}-{len(made)}")
    return made
