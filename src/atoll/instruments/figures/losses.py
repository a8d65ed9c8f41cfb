"""Loss against tokens: one line per label with a band over its seeds, and the difference to the first label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atoll.errors import ConfigError
from atoll.instruments.figures.labels import LineEnd, end_labels, finish
from atoll.instruments.figures.picture import PageTable, Picture, unique_ids
from atoll.instruments.figures.style import AXIS, INK, PALETTE, look, new_figure, styled, width_of
from atoll.instruments.figures.ticks import count_axis, short, signed
from atoll.instruments.figures.values import Tally, as_number, limit_lines, name, pairs, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

GRID_POINTS_MAX = 2000
"""Points of a drawn line: about the pixels of a page-wide figure."""

ZOOM_SHARE = 0.08
"""The loss axis ends at the highest loss after this share of the tokens: the first steps would flatten the rest."""

REMEDY = 'Give runs such as {"label": "M = 8", "seed": 1, "curve": [[0, 5.6], [1000000, 2.3]]}.'

Array = NDArray[np.float64]


@dataclass
class Arm:
    """All seeds of one label, on a common grid of tokens."""

    label: str
    seeds: list[int | str]
    tokens: Array
    losses: Array  # seeds x tokens
    style: dict[str, Any] = field(default_factory=dict)
    group: str = ""

    @property
    def mean(self) -> Array:
        return np.asarray(self.losses.mean(axis=0))

    @property
    def final(self) -> float:
        return float(self.mean[-1])


def loss_curves_figure(
    runs: Sequence[Mapping[str, Any]], *, difference: bool = True, wide: bool | None = None, caption: str = ""
) -> Picture:
    """Loss against tokens, a line per label (mean of its seeds) with a band from the lowest to the highest seed.

    With `difference`, and more than one label, a second panel shows the difference to the first label in percent, seed
    by seed where both have the seed. A label's line ends where its shortest run does.
    """
    tally = Tally("points")
    arms = _arms(runs, tally)
    two = difference and len(arms) > 1
    with styled():
        _dress(arms)
        width = width_of(two if wide is None else wide)
        figure, panels = new_figure(width, 2.6, panels=2 if two else 1)
        share = width - 1.4 if not two else (width - 1.8) / 2
        handles = [_draw(panels[0], arm, arm.mean, arm.losses, arm.group) for arm in arms]
        zoomed = _loss_axes(panels[0], arms, share)
        notes = _notes(arms, zoomed)
        if two:
            endings = _difference_panel(panels[1], arms, handles, share)
        else:
            endings = [
                LineEnd(f"{arm.label}: {arm.final:.3f}", arm.style["color"], arm.tokens[-1], arm.final, handle)
                for arm, handle in zip(arms, handles, strict=True)
            ]
        end_labels(figure, panels[-1], endings)
        finish(figure)
    text = caption or f"Loss against tokens{', and its difference to ' + arms[0].label if two else ''}."
    tips = {arm.group: f"{arm.label}: {arm.final:.4f} after {short(arm.tokens[-1])} tokens" for arm in arms}
    return Picture(figure, "Loss against tokens", text, _table(arms), [*notes, *tally.notes()], tips)


# ---------------------------------------------------------------- reading


def _arms(runs: Sequence[Mapping[str, Any]], tally: Tally) -> list[Arm]:
    curves: dict[str, dict[int | str, list[tuple[float, float]]]] = {}
    for i, row in enumerate(rows_of(runs, "runs", REMEDY)):
        where = f"runs[{i}]"
        seeds = curves.setdefault(name(row, "label", where), {})
        seed = row.get("seed", 0)
        if isinstance(seed, bool) or not isinstance(seed, (int, str)):
            raise ConfigError(f"{where}: 'seed' is {seed!r}, not a whole number. {REMEDY}")
        if seed in seeds:
            raise ConfigError(f"{where}: a second run of {row['label']!r} with seed {seed}. Keep one of them.")
        points = []
        for tokens, loss in pairs(row, "curve", where):
            x, y = as_number(tokens, f"{where}: tokens", low=0), as_number(loss, f"{where}: loss")
            if tally.keep(x, y) and x is not None and y is not None:
                points.append((x, y))
        if points:
            seeds[seed] = points
    if not any(curves.values()):
        raise ConfigError(f"Nothing to draw: no run has a point with finite tokens and loss. {REMEDY}")
    limit_lines(len(curves), "labels")
    return [_arm(label, seeds) for label, seeds in curves.items() if seeds]


def _arm(label: str, seeds: Mapping[int | str, list[tuple[float, float]]]) -> Arm:
    """Seeds may have been evaluated at different places: interpolate, over the range that all of them have."""
    tracks = []
    for points in seeds.values():
        distinct = dict(sorted(points))
        tracks.append((np.array(list(distinct)), np.array(list(distinct.values()))))
    first, last = max(track[0][0] for track in tracks), min(track[0][-1] for track in tracks)
    if first > last:
        raise ConfigError(f"The seeds of {label!r} have no range of tokens in common. Give runs of the same length.")
    grid = np.unique(np.concatenate([track[0] for track in tracks]))
    grid = grid[(grid >= first) & (grid <= last)]
    if grid.size > GRID_POINTS_MAX:
        grid = np.linspace(first, last, GRID_POINTS_MAX)
    losses = np.array([np.interp(grid, xs, ys) for xs, ys in tracks])
    return Arm(label, list(seeds), grid, losses)


def _dress(arms: Sequence[Arm]) -> None:
    """The first label, the baseline, is drawn in ink; the others take the palette's colours, except ink."""
    places = [i for i in range(2 * len(PALETTE)) if PALETTE[i % len(PALETTE)] != INK]
    for arm, group, i in zip(arms, unique_ids("loss", [arm.label for arm in arms]), range(len(arms)), strict=True):
        arm.style = look(places[(i - 1) % len(places)] + len(PALETTE) * (2 * ((i - 1) // len(places)))) if i else {}
        arm.style |= {"color": INK, "linestyle": "-", "marker": "o"} if not i else {}
        arm.group = group


# ---------------------------------------------------------------- drawing


def _draw(axes: Axes, arm: Arm, middle: Array, each: Array, group: str) -> Line2D:
    style = {**arm.style, "marker": arm.style["marker"] if arm.tokens.size == 1 else ""}
    (line,) = axes.plot(arm.tokens, middle, gid=group, zorder=3, **style)
    if len(each) > 1:
        low, high = each.min(axis=0), each.max(axis=0)
        if arm.tokens.size == 1:
            axes.vlines(arm.tokens, low, high, color=arm.style["color"], linewidth=0.8)
        else:
            axes.fill_between(
                arm.tokens, low, high, color=arm.style["color"], alpha=0.18, linewidth=0, gid=f"{group}-band"
            )
    return line


def _loss_axes(axes: Axes, arms: Sequence[Arm], share: float) -> bool:
    """Whether the first losses lie above the axis."""
    start, end = min(arm.tokens[0] for arm in arms), max(arm.tokens[-1] for arm in arms)
    count_axis(axes, start, end, share)
    axes.set(xlabel="tokens", ylabel="loss")
    cut = start + ZOOM_SHARE * (end - start)
    later = [arm.losses[:, arm.tokens >= cut] for arm in arms]
    if not all(part.size for part in later):
        return False
    low, high = min(float(arm.losses.min()) for arm in arms), max(float(part.max()) for part in later)
    top = max(float(arm.losses.max()) for arm in arms)
    if top - high <= 1.5 * (high - low):  # not so high that it would flatten the rest
        high = top
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    axes.set_ylim(low - pad, high + pad)
    return top > high


def _difference_panel(axes: Axes, arms: Sequence[Arm], handles: Sequence[Line2D], share: float) -> list[LineEnd]:
    base = arms[0]
    endings = []
    later: list[float] = [0.0]
    for arm, handle in zip(arms, handles, strict=True):
        each = _difference(arm, base)
        middle = np.asarray(each.mean(axis=0))
        _draw(axes, arm, middle, each, f"{arm.group}-difference")
        later += each[:, arm.tokens >= arm.tokens[0] + ZOOM_SHARE * (arm.tokens[-1] - arm.tokens[0])].ravel().tolist()
        final = f"{arm.label}: {signed(float(middle[-1]))}%" if arm is not base else arm.label
        endings.append(LineEnd(final, arm.style["color"], float(arm.tokens[-1]), float(middle[-1]), handle))
    count_axis(axes, min(arm.tokens[0] for arm in arms), max(arm.tokens[-1] for arm in arms), share)
    axes.axhline(0, color=AXIS, linewidth=0.6, zorder=1)
    pad = 0.06 * (max(later) - min(later)) or 0.5
    axes.set_ylim(min(later) - pad, max(later) + pad)
    axes.set(xlabel="tokens", ylabel="difference (%)")
    return endings


def _difference(arm: Arm, base: Arm) -> Array:
    """Percent, per seed of the arm: against the same seed of the baseline where it has it, else against its mean."""
    rows = []
    for seed, losses in zip(arm.seeds, arm.losses, strict=True):
        reference = base.losses[base.seeds.index(seed)] if seed in base.seeds else base.mean
        at = np.interp(arm.tokens, base.tokens, reference)
        with np.errstate(divide="ignore", invalid="ignore"):
            rows.append(np.where(at != 0, 100 * (losses / at - 1), 0.0))
    return np.array(rows)


# ---------------------------------------------------------------- words


def _notes(arms: Sequence[Arm], zoomed: bool) -> list[str]:
    notes = []
    counts = sorted({len(arm.seeds) for arm in arms})
    if counts[-1] > 1:
        many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        notes.append(f"Lines are means of {many} seeds, bands reach from the lowest to the highest.")
    if zoomed:
        notes.append(f"The first losses, up to {max(float(arm.losses.max()) for arm in arms):.2f}, lie above the axis.")
    return notes


def _table(arms: Sequence[Arm]) -> PageTable:
    rows = []
    for arm in arms:
        finals = arm.losses[:, -1]
        spread = f"{finals.min():.4f} to {finals.max():.4f}" if len(finals) > 1 else "–"
        each = _difference(arm, arms[0])[:, -1]
        gap = signed(float(each.mean()), 2) if arm is not arms[0] else "–"
        rows.append((arm.label, str(len(arm.seeds)), short(arm.tokens[-1]), f"{arm.final:.4f}", spread, gap))
    head = ("run", "seeds", "tokens", "final loss", "range", f"against {arms[0].label}, %")
    return PageTable("Final losses", head, rows)
