"""What each learner did over virtual time, one lane per learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atoll.errors import ConfigError
from atoll.instruments.figures.labels import LABEL_POINTS, LINE_INCHES, finish, legend, wrap
from atoll.instruments.figures.picture import PageTable, Picture, unique_ids
from atoll.instruments.figures.style import INK, colour, new_figure, styled, width_of
from atoll.instruments.figures.ticks import count_axis
from atoll.instruments.figures.values import Tally, limit_lines, name, number, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LANES_MAX = 64
"""Learners in one figure: at 0.15 inch each they fill a page."""

LANE_INCHES = 0.19
NAMES_SHARE_MAX = 0.3
JOIN_SHARE = 1e-6
"""Spans of one kind that are nearer to each other than this share of the whole time are drawn as one."""

KINDS = {
    "compute": "#7fb0d6",
    "waiting": "#d1495b",
    "stall": "#d1495b",
    "adopt": "#2a9d8f",
    "snapshot": "#8fd0c6",
    "overhead": "#e9a03b",
    "evaluate": "#b9c46a",
    "recovery": "#a98bc9",
    "away": "#f2c14e",
    "slow": "#f2c14e",
    "down": "#3d4752",
    "idle": "#d5dae0",
}
"""The colours that the run report has for the same kinds of time (dash/style.css); others take the palette's."""

REMEDY = 'Give spans such as {"learner": "learner-0", "start_s": 0.0, "end_s": 12.5, "kind": "compute"}.'

Spans = dict[str, dict[str, list[tuple[float, float]]]]
"""learner -> kind -> (start, end) in seconds."""


def timeline_figure(spans: Sequence[Mapping[str, Any]], *, wide: bool = True, caption: str = "") -> Picture:
    """One lane per learner in the order in which they first appear; colours say what it did. Gaps are left white."""
    tally = Tally("spans")
    lanes = _read(spans, tally)
    kinds = _kinds(lanes)
    with styled():
        width = width_of(wide)
        figure, (axes,) = new_figure(width, 1.0)
        names = [wrap(figure, learner, NAMES_SHARE_MAX * width) for learner in lanes]
        heights = [max(LANE_INCHES, LINE_INCHES * (text.count("\n") + 1) + 0.04) for text in names]
        places = [sum(heights[:i]) + height / 2 for i, height in enumerate(heights)]
        figure.set_size_inches(width, round(sum(heights) + 0.5, 2))
        unit, seconds = _unit(lanes)
        ids = unique_ids("lane", lanes)
        for (_, doing), y, gid in zip(lanes.items(), places, ids, strict=True):
            _lane(axes, doing, y, kinds, seconds, gid)
        ends = [end for doing in lanes.values() for parts in doing.values() for part in parts for end in part]
        count_axis(axes, min(ends) / seconds, max(ends) / seconds, width - 1.0, steps=(1, 1.5, 2, 3, 5, 6, 10))
        _frame(axes, places, names, sum(heights), unit)
        legend(figure, _key(kinds))
        finish(figure)
    text = caption or "What each learner did over time."
    tips = {
        f"{gid}-{kind}": f"{learner}, {kind}: {_total(parts):.4g} s"
        for gid, (learner, doing) in zip(ids, lanes.items(), strict=True)
        for kind, parts in doing.items()
    }
    return Picture(figure, "What each learner did over time", text, _table(lanes, kinds), tally.notes(), tips)


def _read(spans: Sequence[Mapping[str, Any]], tally: Tally) -> Spans:
    lanes: Spans = {}
    for i, row in enumerate(rows_of(spans, "spans", REMEDY)):
        where = f"spans[{i}]"
        learner, kind = name(row, "learner", where), name(row, "kind", where)
        start, end = number(row, "start_s", where), number(row, "end_s", where)
        if not tally.keep(start, end) or start is None or end is None:
            continue
        if end < start:
            raise ConfigError(f"{where}: it ends at {end:g} s, before it starts at {start:g} s. Exchange the two.")
        lanes.setdefault(learner, {}).setdefault(kind, []).append((start, end))
    tally.require_some(REMEDY)
    if len(lanes) > LANES_MAX:
        raise ConfigError(
            f"{len(lanes)} learners in one figure; at most {LANES_MAX} fit on a page. Choose some of them."
        )
    return lanes


def _kinds(lanes: Spans) -> dict[str, str]:
    """Kind -> colour; the known ones first, in their usual order."""
    seen = dict.fromkeys(kind for doing in lanes.values() for kind in doing)
    limit_lines(len(seen), "kinds")
    ordered = [kind for kind in KINDS if kind in seen] + [kind for kind in seen if kind not in KINDS]
    others = iter([1, 4, 3, 2, 0, 5, 6, 7] * len(ordered))  # blue last: computing is blue
    return {kind: KINDS[kind] if kind in KINDS else colour(next(others)) for kind in ordered}


def _lane(
    axes: Axes,
    doing: Mapping[str, list[tuple[float, float]]],
    y: float,
    kinds: Mapping[str, str],
    seconds: float,
    gid: str,
) -> None:
    """Kinds in the legend's order: rare ones lie above computing, and a hair-line edge keeps short ones visible."""
    whole = max(end for parts in doing.values() for _, end in parts) - min(
        s for parts in doing.values() for s, _ in parts
    )
    for place, (kind, fill) in enumerate(kinds.items()):
        parts = _joined(doing.get(kind, []), JOIN_SHARE * whole)
        if parts:
            bars = [(start / seconds, (end - start) / seconds) for start, end in parts]
            edge = 0.0 if kind == "compute" else 0.3
            made = axes.broken_barh(
                bars, (y - 0.065, 0.13), facecolor=fill, edgecolor=fill, linewidth=edge, zorder=2 + place / 100
            )
            made.set_gid(f"{gid}-{kind}")


def _joined(parts: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(parts):
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _frame(axes: Axes, places: Sequence[float], names: Sequence[str], height: float, unit: str) -> None:
    axes.set_ylim(height + 0.03, -0.03)
    axes.set_yticks(list(places), list(names))
    for tick in axes.get_yticklabels():
        tick.set(color=INK, linespacing=1.1, fontsize=LABEL_POINTS)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time ({unit})")


def _unit(lanes: Spans) -> tuple[str, float]:
    end = max(abs(t) for doing in lanes.values() for parts in doing.values() for part in parts for t in part)
    for name_of, seconds in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if end >= 3 * seconds:
            return name_of, seconds
    return "seconds", 1.0


def _key(kinds: Mapping[str, str]) -> list[tuple[Any, str]]:
    from matplotlib.patches import Patch

    return [(Patch(facecolor=fill), kind) for kind, fill in kinds.items()]


def _total(parts: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in parts)


def _table(lanes: Spans, kinds: Mapping[str, str]) -> PageTable:
    rows = [(learner, *(f"{_total(doing.get(kind, [])):.1f}" for kind in kinds)) for learner, doing in lanes.items()]
    return PageTable("Seconds by learner and kind", ("learner", *kinds), rows)
