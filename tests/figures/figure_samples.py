"""Plain data for the figures: the published goodput table (FIGURES.md, section 1) and made-up curves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from atoll.instruments import figures
from atoll.instruments.figures import Picture

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
GOODPUT = {
    ("inelastic", 1): (72, 57, 38, 27, 18),
    ("elastic", 1): (88, 80, 69, 58, 40),
    ("decoupled", 2): (94, 88, 80, 70, 54),
    ("decoupled", 4): (96, 93, 89, 82, 73),
    ("decoupled", 8): (98, 96, 94, 88, 80),
    ("decoupled", 16): (99, 98, 96, 93, 86),
}
LONG = "a name that says everything about this arm, its codec, its policy and its temper"
NAMES = [f"{word}: {LONG}" for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")]


def cells(**more: Any) -> list[dict[str, Any]]:
    return [
        {"chips": c, "method": m, "learners": n, "goodput": p - 0.5, "half_width": 0.4, "uptime": 99.0, "published": p}
        | more
        for (m, n), row in GOODPUT.items()
        for c, p in zip(CHIPS, row, strict=True)
    ]


def growth(labels: tuple[str, ...] = ("",)) -> list[dict[str, Any]]:
    return [
        {"chips": c, "events": (i + 1) * c**0.8, "wall_s": c**0.7 / 1e4, "label": label}
        for i, label in enumerate(labels)
        for c in CHIPS
    ]


def utilisation(methods: list[str], panels: tuple[str, ...] = ("",)) -> list[dict[str, Any]]:
    computed = [
        {"method": m, "panel": p, "gbit_s": 0.1 * 2**k, "utilisation": 100 * 2**k / (2**k + 3**i), "published": None}
        for p in panels
        for i, m in enumerate(methods)
        for k in range(14)
    ]
    return [*computed, {"method": methods[0], "panel": panels[0], "gbit_s": 0.4, "utilisation": None, "published": 50}]


def runs(labels: list[str], seeds: int = 2, points: int = 20) -> list[dict[str, Any]]:
    return [
        {
            "label": label,
            "seed": seed,
            "curve": [
                [1e6 * k, 0.8 + 0.01 * i + 0.002 * math.sin(k + seed) + 4 * math.exp(-k / 2)] for k in range(points)
            ],
        }
        for i, label in enumerate(labels)
        for seed in range(seeds)
    ]


def bars(labels: list[str], groups: tuple[str, ...] = ("",)) -> list[dict[str, Any]]:
    published = (0.7, None, [1.0, 2.5], -0.1)
    return [
        {"label": x, "percent": i - 1.3, "half_width": 0.2 * i, "published": published[i % 4], "group": g}
        for g in groups
        for i, x in enumerate(labels)
    ]


def sweep(labels: list[str], xs: tuple[float, ...] = (1, 2, 8, 24)) -> list[dict[str, Any]]:
    return [{"label": x, "points": [[h, 0.1 * i + h / 10, 0.05] for h in xs]} for i, x in enumerate(labels)]


PLAIN: dict[str, Callable[[], Picture]] = {
    "goodput": lambda: figures.goodput_figure(cells()),
    "collapse": lambda: figures.collapse_figure(cells()),
    "growth": lambda: figures.growth_figure(growth(("M = 1", "M = 8"))),
    "utilisation": lambda: figures.utilisation_figure(utilisation(["DP", "DiLoCo", "Atoll"])),
    "losses": lambda: figures.loss_curves_figure(runs(["data-parallel", "M = 2", "M = 8"])),
    "bars": lambda: figures.bars_figure(bars(["M = 1", "M = 2", "M = 4", "M = 8"], ("AdamW", "Muon"))),
    "sweep": lambda: figures.sweep_figure(sweep(["overwrite", "rebase"]), x_label="overlap", log_x=True),
}

ONE_CELL = {"chips": 150_000, "method": "decoupled", "learners": 8, "goodput": 98.0}

HARD: dict[str, Callable[[], Picture]] = {
    "goodput, page-wide": lambda: figures.goodput_figure(cells(), wide=True),
    "goodput, lines on each other": lambda: figures.goodput_figure(cells(goodput=99.0, published=None)),
    "goodput, one cell": lambda: figures.goodput_figure([ONE_CELL]),
    "goodput, ten methods": lambda: figures.goodput_figure(
        [ONE_CELL | {"chips": 10**k, "learners": 2**m} for k in range(4, 16) for m in range(10)]
    ),
    "collapse, one cell": lambda: figures.collapse_figure([ONE_CELL]),
    "growth, one point": lambda: figures.growth_figure([{"chips": 8, "events": 1, "wall_s": 1e-4}], wide=False),
    "growth, eight long names": lambda: figures.growth_figure(growth(tuple(NAMES)), wide=False),
    "utilisation, four panels": lambda: figures.utilisation_figure(
        utilisation(NAMES, ("1B", "10B, 0.8 s", "100B", "671B"))
    ),
    "utilisation, long names in one column": lambda: figures.utilisation_figure(utilisation(NAMES)),
    "losses, eight long names": lambda: figures.loss_curves_figure(runs(NAMES)),
    "losses, long names in one column": lambda: figures.loss_curves_figure(runs(NAMES), difference=False),
    "losses, eight short names": lambda: figures.loss_curves_figure(runs(list("abcdefgh")), difference=False),
    "losses, one point": lambda: figures.loss_curves_figure(runs(["a", "b"], points=1)),
    "losses, 24 labels": lambda: figures.loss_curves_figure(runs([f"arm {i}" for i in range(24)], seeds=1)),
    "bars, eight long names": lambda: figures.bars_figure(bars(NAMES)),
    "bars, no differences": lambda: figures.bars_figure(bars(NAMES), x_label="goodput (%)", differences=False),
    "bars, one of zero": lambda: figures.bars_figure([{"label": "none", "percent": 0}]),
    "bars, long groups": lambda: figures.bars_figure(bars(NAMES[:4], tuple(NAMES[:3]))),
    "bars, small values": lambda: figures.bars_figure([{"label": "a", "percent": -0.02, "half_width": 0.01}]),
    "sweep, eight long names": lambda: figures.sweep_figure(sweep(NAMES)),
    "sweep, crowded settings": lambda: figures.sweep_figure(sweep(["a"], (1, 1.01, 1.02, 2, 1000, 1001, 1002))),
    "sweep, many settings": lambda: figures.sweep_figure(sweep(["a"], tuple(range(-50, 50)))),
    "sweep, many settings on a log axis": lambda: figures.sweep_figure(
        sweep(["a"], tuple(1.4**k for k in range(-20, 60))), log_x=True
    ),
    "sweep, one point": lambda: figures.sweep_figure([{"label": "a", "points": [[24, 1.5]]}], log_x=True),
    "sweep, an endless word": lambda: figures.sweep_figure(sweep(["w" * 200, "b"])),
}
