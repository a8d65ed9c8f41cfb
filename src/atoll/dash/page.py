"""The frame of the report: small pieces of HTML around the pictures. Everything that comes from a run is escaped.

The pictures are drawn in the browser by static/pieces.js from the data that lies in the page. Nothing is fetched: style
sheets, uPlot and the data are inside, and a policy in the page lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

STYLES = ("style.css", "uPlot.min.css")
SCRIPTS = ("uPlot.iife.min.js", "pieces.js", "report.js")


def static(name: str) -> str:
    """A file of the pages, as it was packed."""
    return files("atoll.dash").joinpath("static", name).read_text(encoding="utf-8")


def page(title: str, body: Iterable[str], data: Mapping[str, Any]) -> str:
    """The whole document: it opens from a disk without a network."""
    scripts = [static(name) for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{''.join(map(static, STYLES))}</style>"
    )
    tail = "".join(f"<script>{script}</script>" for script in scripts)
    inside = f'<main>{"".join(body)}</main><script type="application/json" id="run">{as_json(data)}</script>{tail}'
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>{inside}</body></html>\n'


def as_json(data: Mapping[str, Any]) -> str:
    """JSON that no text of a run can end early: in it, `<` is only ever written as an escape."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def piece(kind: str, label: str, css: str = "picture") -> str:
    """A place that static/pieces.js draws into."""
    named = f' role="img" aria-label="{escape(label)}"' if label else ""
    return f'<div class="{css}" data-piece="{kind}"{named}></div>'


def header(title: str, line: str) -> str:
    return f"<header><h1>{escape(title)}</h1><p>{escape(line)}</p></header>"


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """(value, what it is)"""
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in figures
    )
    return f'<div class="tiles">{cells}</div>'


def section(title: str, lead: str, *content: str) -> str:
    lead_text = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{lead_text}{''.join(content)}</section>"


def pair(left: str, right: str) -> str:
    """Two half-width parts side by side; one under the other on a phone."""
    return f'<div class="pair">{left}{right}</div>'


def half(title: str, lead: str, picture: str) -> str:
    return f'<div><h2>{escape(title)}</h2><p class="lead">{escape(lead)}</p><div class="picture">{picture}</div></div>'


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), *, whole: int = 0, title: str = ""
) -> str:
    """`numbers`: the columns that are set flush right; `whole`: the first so many are kept on one line."""

    def cells(tag: str, values: Sequence[str]) -> str:
        parts = []
        for i, value in enumerate(values):
            names = [name for name, on in (("number", i in numbers), ("whole", i < whole)) if on]
            css = f' class="{" ".join(names)}"' if names else ""
            parts.append(f"<{tag}{css}>{escape(value)}</{tag}>")
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(cells("td", row) for row in rows)
    named = f"<caption>{escape(title)}</caption>" if title else ""
    return f'<div class="scroll"><table>{named}<thead>{cells("th", head)}</thead><tbody>{body}</tbody></table></div>'


def settings(values: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<div><span>{escape(name)}</span><code>{escape(value)}</code></div>" for name, value in values)
    return f'<div class="settings">{rows}</div>'


def settings_wide(values: Iterable[tuple[str, str]]) -> str:
    """Names with a sentence each, in one column."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in values)
    return f"<dl>{rows}</dl>" if rows else ""


def listed(caption: str, entries: Iterable[str]) -> str:
    """What a person should look at."""
    items = "".join(f"<li>{escape(text)}</li>" for text in entries)
    named = f'<p class="caption">{escape(caption)}</p>' if caption else ""
    return f'{named}<ul class="problems">{items}</ul>'


def faults(entries: Iterable[tuple[str, str, str]]) -> str:
    """(what happened, what it cost the learner, what it cost the others)"""
    items = "".join(
        f'<li><b>{escape(what)}</b>{escape(own)}<br><span class="others">{escape(others)}</span></li>'
        for what, own, others in entries
    )
    return f'<ol class="faults">{items}</ol>'


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def footer(text: str) -> str:
    return f"<footer>{text}</footer>"
