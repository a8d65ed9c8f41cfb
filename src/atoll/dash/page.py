"""The frame of the report: small pieces of HTML around the pictures. Everything that comes from a run is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from atoll.dash.bars import MEANING
from atoll.dash.curves import HUES
from atoll.observe import CATEGORIES


def page(title: str, body: Iterable[str]) -> str:
    """The whole document, with its style sheet inside: it opens from a disk without a network."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style>"
    )
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head><body><main>{"".join(body)}</main></body></html>\n'


def _style() -> str:
    rules = [files("atoll.dash").joinpath("style.css").read_text(encoding="utf-8")]
    for i in range(HUES):
        rules.append(f"svg path.l{i} {{ stroke: var(--l{i}); }} svg path.area.l{i} {{ fill: var(--l{i}); }}")
        rules.append(f"svg text.l{i} {{ fill: var(--l{i}); }}")
    rules += [f"svg rect.{name} {{ fill: var(--{name}); }}" for name in (*CATEGORIES, "slow")]
    return "\n".join(rules)


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


def wide_and_narrow(wide: str, narrow: str) -> str:
    """The same picture drawn twice, for a desk and for a phone: shrinking one would make its labels unreadable."""
    return f'<div class="picture wide">{wide}</div><div class="picture narrow">{narrow}</div>'


def legend(entries: Iterable[tuple[str, str]], shape: str = "") -> str:
    """(style of the sign, text)"""
    parts = "".join(f'<span><i class="{shape}" style="{style}"></i>{escape(text)}</span>' for style, text in entries)
    return f'<div class="legend">{parts}</div>'


def category_legend(shown: Iterable[str]) -> str:
    return legend((f"background:var(--{name})", f"{name}: {MEANING[name]}") for name in shown)


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
