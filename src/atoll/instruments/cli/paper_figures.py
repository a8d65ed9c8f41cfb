"""Figures of `atoll sim goodput` and `atoll plan --published`: PNG files and a page each. The rooms that have the data
know nothing of figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.instruments.figures import (
    PageTable,
    Section,
    bars_figure,
    collapse_figure,
    goodput_figure,
    page,
    utilisation_figure,
)
from atoll.instruments.plan import (
    GRID_GBIT_S,
    MODELS,
    ROWS,
    STREAMING_TABLE,
    UTILISATIONS,
    ComparedCell,
    compute_utilisation,
    exchange_of,
)


def draw_goodput(folder: Path, cells: Sequence[Mapping[str, Any]]) -> Path:
    """goodput.png, goodput-collapse.png and goodput.html. They compare what the published table compares: cells of
    synchronous DiLoCo are left out."""
    cells = [cell for cell in cells if cell["method"] != "diloco"]
    body: list[Any] = [goodput_figure(cells, wide=True).save(folder / "goodput")]
    if sum(cell["method"] == "decoupled" for cell in cells) > 1:
        body.append(collapse_figure(cells).save(folder / "goodput-collapse"))
    body.append(
        PageTable(
            "Cells",
            ["chips", "method", "learners", "goodput, %", "published", "uptime, %"],
            [
                [
                    f"{cell['chips']:,}",
                    str(cell["method"]),
                    str(cell["learners"]),
                    f"{cell['goodput']:.1f}",
                    "-" if cell.get("published") is None else f"{cell['published']:g}",
                    f"{cell['uptime']:.2f}",
                ]
                for cell in cells
            ],
        )
    )
    intro = (
        "Share of the allocated chip time that is useful training, when chips fail at random and islands of chips "
        "shrink, grow and restart. Learners are joined by the production protocol in virtual time."
    )
    return page(folder / "goodput.html", "Goodput under failures", intro, [Section("Goodput", body)])


def draw_heterogeneous(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """heterogeneous.png and .html: what each quorum leaves of the time of learners of unequal speed."""
    bars = [
        {
            "label": row["setting"],
            "percent": row["goodput"],
            "published": row["published"],
            "group": f"speeds vary {row['variance']}" if row["variance"] != "none" else "speeds do not vary",
        }
        for row in rows
    ]
    caption = "Goodput of eight learners, four of them 18% slower, by the quorum K that a merge waits for."
    picture = bars_figure(bars, x_label="goodput (%)", differences=False, wide=True, caption=caption)
    intro = (
        "Share of the learners' time that is training and not waiting. With K=8 everybody waits for the slowest; with "
        "K=1 nobody waits, and with grace a merge has everybody in it all the same."
    )
    body: list[Any] = [picture.save(folder / "heterogeneous"), picture.table]
    return page(folder / "heterogeneous.html", "Learners of unequal speed", intro, [Section("Goodput", body)])


def draw_scavenging(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """scavenging.png and .html: the time of a run with extra learners for half of its tokens."""
    groups = {
        "decoupled": ("decoupled", "decoupled_published"),
        "one elastic data-parallel job": ("data_parallel", "data_parallel_published"),
    }
    bars = [
        {
            "label": f"+{row['extra_percent']}%",
            "percent": 100.0 * row[ours],
            "published": None if row[theirs] is None else 100.0 * row[theirs],
            "group": group,
        }
        for group, (ours, theirs) in groups.items()
        for row in rows
    ]
    caption = "Time of a run with extra learners for half of its tokens, in percent of the time of four learners alone."
    picture = bars_figure(
        bars, x_label="time (% of four learners alone)", differences=False, wide=True, caption=caption
    )
    intro = (
        "Four learners, and extra ones for half of the tokens. What slowed the published data-parallel runs down is "
        "not published where we could read it; ours stand still for two planned resizes and nothing else."
    )
    body: list[Any] = [picture.save(folder / "scavenging"), picture.table]
    return page(folder / "scavenging.html", "Extra learners for half of a run", intro, [Section("Time", body)])


def draw_utilisation(folder: Path, cells: Sequence[ComparedCell]) -> Path:
    """utilisation.png and utilisation.html: our curves beside the published points of Streaming DiLoCo's table."""
    rows: list[dict[str, Any]] = []
    for model in (one for one in MODELS if one.table == STREAMING_TABLE):
        panel = f"{model.name}, {model.step_s:g} s per step"
        for row in (one for one in ROWS if one.model is model):
            exchange = exchange_of(model, row.method)
            known = dict(zip(row.gbit_s, UTILISATIONS, strict=True))
            for gbit_s in sorted({*GRID_GBIT_S, *known}):
                rows.append(
                    {
                        "method": row.method,
                        "panel": panel,
                        "gbit_s": gbit_s,
                        "utilisation": 100.0 * compute_utilisation(exchange, gbit_s),
                        "published": 100.0 * known[gbit_s] if gbit_s in known else None,
                    }
                )
    table = PageTable(
        "Cells of the published tables",
        ["table", "model", "method", "utilisation", "published, Gbit/s", "ours, Gbit/s", "grid steps off"],
        [
            [
                cell.table,
                cell.model,
                cell.method,
                f"{cell.utilisation:.0%}",
                f"{cell.published_gbit_s:.1f}",
                f"{cell.ours_gbit_s:.1f}",
                str(cell.steps_off),
            ]
            for cell in cells
        ],
    )
    picture = utilisation_figure(rows, wide=True).save(folder / "utilisation")
    intro = "Share of its time that a synchronous method computes, by the bandwidth of each learner's link."
    return page(folder / "utilisation.html", "Compute utilisation", intro, [Section("Utilisation", [picture, table])])
