"""What studies have found, as figures and one page. The lab knows nothing of figures, nor they of it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError
from atoll.instruments.figures import PageTable, Picture, Section, bars_figure, loss_curves_figure, page, sweep_figure
from atoll.instruments.lab import COMMON, Study, StudyLine, short, text_table

CURVES_MAX = 10
"""Loss curves of one figure that can be told apart; a study with more lines shows them arm by arm."""
LOG_RATIO = 8
"""A setting whose largest value is this many times its smallest stands on a logarithmic axis."""

Found = tuple[Study, list[StudyLine]]


def draw(folder: Path, found: Sequence[Found]) -> Path:
    """Write NAME-*.png for each study and index.html for all. Returns the page."""
    sections = [_section(folder, study, lines) for study, lines in found if any(line.runs for line in lines)]
    if not sections:
        raise ConfigError("there is nothing to draw: none of the runs is finished; start them with `atoll lab study`")
    intro = "Held-out losses are of the published model, in nats per token. Error bars are standard errors over seeds."
    return page(folder / "index.html", "Results of the lab", intro, sections)


def _section(folder: Path, study: Study, lines: Sequence[StudyLine]) -> Section:
    text = text_table(study, lines)
    pictures: dict[str, Picture] = {**_bars(lines, study), **_sweeps(lines), **_curves(study, lines)}
    drawn = [picture.save(folder / f"{_stem(study.name)}-{name}") for name, picture in pictures.items()]
    table = PageTable("What was found", list(text.header), [list(row) for row in text.rows])
    return Section(study.name, [study.description, table, *drawn] if study.description else [table, *drawn])


# ---------------------------------------------------------------- curves


def _curves(study: Study, lines: Sequence[StudyLine]) -> dict[str, Picture]:
    """Loss against tokens, the baseline first; a figure for each group of runs whose losses can be compared."""
    pictures: dict[str, Picture] = {}
    for arm, group in _comparable(study, lines):
        runs = [
            {
                "label": _name(line, lines),
                "seed": seed,
                "curve": [list(point) for point in run.curve if math.isfinite(point[1])],
            }
            for line in group
            for seed, run in line.runs.items()
            if len(run.curve) > 1 and math.isfinite(run.loss)
        ]
        if len({run["label"] for run in runs}) > 1:
            name = f"loss-{_stem(arm)}" if arm else "loss"
            pictures[name if name not in pictures else f"{name}-{len(pictures) + 1}"] = loss_curves_figure(runs)
    return pictures


def _stem(text: str) -> str:
    """A part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-")


def _comparable(study: Study, lines: Sequence[StudyLine]) -> list[tuple[str, list[StudyLine]]]:
    """(an arm, or nothing for several of them; its lines and the baselines')."""
    groups: dict[tuple[Any, ...], list[StudyLine]] = {}
    for line in lines:
        groups.setdefault(tuple(getattr(line.spec, name) for name in COMMON), []).append(line)
    baselines = set(study.baselines.values())
    found = []
    for group in groups.values():
        first = [line for line in group if line.label in baselines]
        # Differences are to the first line drawn: of several baselines the best, as in the table's "against the best".
        first.sort(key=lambda line: line.loss.mean if line.loss is not None else math.inf)
        others = [line for line in group if line.label not in baselines]
        if len(group) <= CURVES_MAX:
            found.append(("", first + others))
        else:
            by_arm = {label: [line for line in others if line.label == label] for label in study.labels}
            found += [(label, first + arm[:CURVES_MAX]) for label, arm in by_arm.items() if arm]
    return found


# ---------------------------------------------------------------- against the baseline


def _bars(lines: Sequence[StudyLine], study: Study) -> dict[str, Picture]:
    bars: list[Mapping[str, Any]] = []
    groups = _group_setting(lines)
    for line in lines:
        if line.percent is None:
            continue
        bar: dict[str, Any] = {"label": _name(line, lines, without=groups), "percent": line.percent.mean}
        if math.isfinite(line.percent.error):
            bar["half_width"] = line.percent.error
        if line.label in study.published:
            bar["published"] = study.published[line.label]
        if groups:
            bar["group"] = str(line.settings.get(groups, ""))
        bars.append(bar)
    bars.sort(key=lambda bar: str(bar.get("group", "")))
    return {"relative": bars_figure(bars, wide=True)} if bars else {}


def _group_setting(lines: Sequence[StudyLine]) -> str:
    """A swept setting of words, such as the optimizer, that all lines have: bars stand together by it."""
    names = [name for name in lines[0].settings if all(name in line.settings for line in lines)]
    words = [name for name in names if all(isinstance(line.settings[name], str) for line in lines)]
    return words[0] if words else ""


def _name(line: StudyLine, lines: Sequence[StudyLine], *, without: str = "") -> str:
    """The arm, and those of its settings that tell its lines apart."""
    own = [other for other in lines if other.label == line.label]
    told = [name for name in line.settings if name != without and len(_values(own, name)) > 1]
    return ", ".join([line.label, *(_said(name, line.settings[name]) for name in told)])


def _said(name: str, value: Any) -> str:
    """A word says what it is about; a number does not."""
    text = str(value)
    return text if text[:1].isalpha() else f"{short(name).replace('_', ' ')} {text}"


def _values(lines: Sequence[StudyLine], name: str) -> set[str]:
    return {str(line.settings[name]) for line in lines if name in line.settings}


# ---------------------------------------------------------------- against a setting


def _sweeps(lines: Sequence[StudyLine]) -> dict[str, Picture]:
    """For every numeric setting that is swept: the loss against it, a line for each combination of the others."""
    pictures = {}
    for name in dict.fromkeys(name for line in lines for name in line.settings):
        series = _series(lines, name)
        if any(len(points) > 1 for points in series.values()):
            values = [point[0] for points in series.values() for point in points]
            relative = all(line.percent is not None for line in lines if name in line.settings and line.loss)
            pictures[f"by-{short(name)}"] = sweep_figure(
                [{"label": label, "points": sorted(points)} for label, points in series.items()],
                x_label=short(name).replace("_", " "),
                y_label="loss against the baseline (%)" if relative else "held-out loss (nats per token)",
                log_x=min(values) > 0 and max(values) >= LOG_RATIO * min(values),
                zero_line=relative,
            )
    return pictures


def _series(lines: Sequence[StudyLine], name: str) -> dict[str, list[list[float]]]:
    """Name -> [setting, result, error]. Arms that have one value each are the points of one line."""
    swept = [line for line in lines if name in line.settings]
    relative = all(line.percent is not None for line in swept if line.loss)
    inside = any(len(_values([one for one in swept if one.label == line.label], name)) > 1 for line in swept)
    series: dict[str, list[list[float]]] = {}
    for line in swept:
        value, result = line.settings[name], line.percent if relative else line.loss
        if isinstance(value, int | float) and not isinstance(value, bool) and result is not None:
            title = _name(line, lines, without=name)
            if not inside:
                title = title.removeprefix(line.label).removeprefix(", ") or "all arms"
            error = result.error if math.isfinite(result.error) else 0.0
            series.setdefault(title, []).append([float(value), result.mean, error])
    return series
