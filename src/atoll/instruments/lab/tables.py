"""From a study and its store to one table: loss with its standard error, and against the baseline.

A line is an arm with one combination of what it sweeps, over all its seeds. It is compared with that line of the
baseline which has the same values of everything that the baseline itself sweeps and of everything without which losses
cannot be compared (`COMMON`); seed by seed where both have it, because a seed's luck is largely common to both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from atoll.instruments.lab.spec import LabSpec
from atoll.instruments.lab.store import RunRecord
from atoll.instruments.lab.study import Study, short, title_of

COMMON = ("task", "model", "corpus", "seq", "tokens", "eval_windows")
"""Losses of runs that differ in one of these say nothing about each other."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    error: float = math.nan
    """Standard error of the mean; NaN when one seed tells nothing about it."""
    count: int = 1

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(fmean(values), error, len(values))


@dataclass(slots=True)
class StudyLine:
    """One line of a study's table. What is not known yet is None."""

    label: str
    settings: Mapping[str, Any]
    spec: LabSpec
    """Of its first seed."""
    wanted: list[int] = field(default_factory=list)
    """Seeds."""
    runs: dict[int, RunRecord] = field(default_factory=dict)
    """By seed, those that are finished."""
    loss: Estimate | None = None
    diverged: int = 0
    """Seeds whose loss is not a number."""
    percent: Estimate | None = None
    """How much higher the loss is than the baseline's."""
    paired: bool = True
    """Whether `percent` compares seed by seed."""
    other_text: bool = False
    """The baseline was trained on other text (the same name, another machine): the two say nothing about each other."""
    percent_best: Estimate | None = None
    """Against the best line of all arms that are somebody's baseline."""
    time_ratio: float | None = None
    """Virtual time, in that of the baseline."""
    reached_s: Estimate | None = None
    """Virtual time to the study's `time_to`, if every seed came down to it."""
    reached_ratio: float | None = None
    """That, in the time of the quickest line of the same world whose settings are fixed."""

    @property
    def title(self) -> str:
        return title_of(self.label, self.settings)

    @property
    def virtual_s(self) -> float | None:
        return fmean(run.virtual_s for run in self.runs.values()) if self.runs else None

    @property
    def tokens_per_s(self) -> float | None:
        return fmean(run.tokens_per_s for run in self.runs.values()) if self.runs else None

    def losses(self) -> dict[int, float]:
        return {seed: run.loss for seed, run in self.runs.items() if math.isfinite(run.loss)}

    @property
    def lost_share(self) -> float | None:
        """Share of the processed tokens that were refused, dropped, overwritten, or went with a learner."""
        kept = ("tokens_merged", "tokens_pending")
        shares = [
            sum(run.fact(name) for name in run.facts if name.startswith("tokens_") and name not in kept) / run.tokens
            for run in self.runs.values()
            if "tokens_merged" in run.facts
        ]
        return fmean(shares) if shares else None

    @property
    def sent_per_mtoken(self) -> float | None:
        """Bytes that all links carried, for each parameter and million tokens."""
        known = [run for run in self.runs.values() if run.facts.get("parameters") and "bytes_up" in run.facts]
        sizes = [(run.fact("bytes_up") + run.fact("bytes_down")) / run.fact("parameters") for run in known]
        return fmean(size / run.tokens * 1e6 for size, run in zip(sizes, known, strict=True)) if known else None

    def fact(self, name: str) -> float | None:
        values = [value for run in self.runs.values() if math.isfinite(value := run.fact(name))]
        return fmean(values) if values else None


def table_of(study: Study, records: Mapping[str, RunRecord]) -> list[StudyLine]:
    """Every line of the study, in the order of its file."""
    lines: dict[tuple[str, str], StudyLine] = {}
    for planned in study.planned:
        key = (planned.label, repr(sorted(planned.settings.items())))
        line = lines.setdefault(key, StudyLine(planned.label, planned.settings, planned.spec))
        line.wanted.append(planned.spec.seed)
        if planned.spec.key in records:
            line.runs[planned.spec.seed] = records[planned.spec.key]
    order = {label: place for place, label in enumerate(study.labels)}
    found = sorted(lines.values(), key=lambda line: order[line.label])
    for line in found:
        losses = line.losses()
        line.loss = Estimate.of(list(losses.values())) if losses else None
        line.diverged = len(line.runs) - len(losses)
    baselines = [line for line in found if line.label in study.baselines.values()]
    for line in found:
        if line.label in study.baselines:
            _compare(line, baselines, study.baselines[line.label])
    if study.time_to:
        _compare_times(found, study.time_to)
    return found


def reached_s(run: RunRecord, loss: float) -> float | None:
    """When the run's curve comes down to this loss, between its points as the crow flies; None: never, or unknown."""
    before: tuple[float, float] | None = None
    for at_s, (_, now) in zip(run.facts.get("times_s", ()), run.curve, strict=False):
        if now <= loss:
            share = (before[1] - loss) / (before[1] - now) if before and math.isfinite(before[1]) else 1.0
            return float(at_s if before is None else before[0] + share * (at_s - before[0]))
        before = (at_s, now)
    return None


def _compare_times(lines: Sequence[StudyLine], loss: float) -> None:
    for line in lines:
        times = [reached_s(run, loss) for run in line.runs.values()]
        known = [time for time in times if time is not None]
        line.reached_s = Estimate.of(known) if known and len(known) == len(times) else None
    for line in lines:
        alike = [o for o in lines if o.spec.world == line.spec.world and all(_same(line, o, n) for n in COMMON)]
        fixed = [o for o in alike if o.reached_s and o.spec.sync.get("adaptive", "off") == "off"]
        if line.reached_s and fixed:
            line.reached_ratio = line.reached_s.mean / min(_reached_mean(o, set(line.runs), loss) for o in fixed)


def _reached_mean(line: StudyLine, seeds: set[int], loss: float) -> float:
    """Of these seeds where the line has all of them: a seed's luck is largely common to all settings."""
    runs = [run for seed, run in line.runs.items() if seed in seeds or not seeds <= set(line.runs)]
    return fmean(time for run in runs if (time := reached_s(run, loss)) is not None)


def _compare(line: StudyLine, baselines: Sequence[StudyLine], label: str) -> None:
    alike = [other for other in baselines if all(_same(line, other, name) for name in COMMON)]
    same = (other for other in alike if other.label == label)
    own = next((other for other in same if all(_same(line, other, name) for name in other.settings)), None)
    if own is not None:
        line.other_text = not _same_text(line, own)
        line.percent, line.paired = _percent(line, own)
        if line.virtual_s and own.virtual_s:
            line.time_ratio = line.virtual_s / own.virtual_s
    known = [other for other in alike if other.loss is not None and _same_text(line, other)]
    if len(alike) > 1 and known:
        line.percent_best, _ = _percent(line, min(known, key=lambda other: other.loss.mean if other.loss else math.inf))


def _same(line: StudyLine, other: StudyLine, name: str) -> bool:
    return bool(_setting(line.spec, name) == _setting(other.spec, name))


def _setting(spec: LabSpec, name: str) -> Any:
    return spec.sync.get(short(name)) if name.startswith("sync.") else getattr(spec, name)


def _same_text(line: StudyLine, other: StudyLine) -> bool:
    """Runs know the fingerprint of what they were trained on."""
    texts = {str(run.facts["data"]) for run in (*line.runs.values(), *other.runs.values()) if "data" in run.facts}
    return len(texts) < 2


def _percent(line: StudyLine, baseline: StudyLine) -> tuple[Estimate | None, bool]:
    ours, theirs = line.losses(), baseline.losses()
    if not ours or not theirs or not _same_text(line, baseline):
        return None, True
    common = sorted(set(ours) & set(theirs))
    if common:
        return Estimate.of([100.0 * (ours[seed] / theirs[seed] - 1.0) for seed in common]), True
    mine, base = Estimate.of(list(ours.values())), Estimate.of(list(theirs.values()))
    error = 100.0 * mine.mean / base.mean * math.hypot(mine.error / mine.mean, base.error / base.mean)
    return Estimate(100.0 * (mine.mean / base.mean - 1.0), error, min(mine.count, base.count)), False


# ---------------------------------------------------------------- as text


@dataclass(frozen=True, slots=True)
class TextTable:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.header, tuple("---" for _ in self.header), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def text_table(study: Study, lines: Sequence[StudyLine]) -> TextTable:
    """The table as people read it. Columns that would be empty are left out."""
    settings = tuple(dict.fromkeys(name for line in lines for name in line.settings))
    columns: list[tuple[str, list[str]]] = [("arm", [line.label for line in lines])]
    columns += [(short(name), [_plain(line.settings.get(name)) for line in lines]) for name in settings]
    columns += [
        ("seeds", [_seeds(line) for line in lines]),
        ("loss", [_loss(line) for line in lines]),
        (_against(study, lines), [_against_text(line) for line in lines]),
        ("published", [_published(study, line) for line in lines]),
        ("against the best", [_percent_text(line.percent_best) for line in lines]),
        ("lost", [f"{100.0 * line.lost_share:.1f}%" if line.lost_share else "" for line in lines]),
        ("virtual time", [_virtual(line) for line in lines]),
        (f"time to {study.time_to:g}", [_reached(line) if study.time_to else "" for line in lines]),
        ("bits up", [_bits(line, "bits_up") for line in lines]),
        ("bits down", [_bits(line, "bits_down") for line in lines]),
        ("B/parameter/Mtoken", [_bits(line, "") for line in lines]),
        ("decisions", [_number(line.fact("decisions")) if line.fact("decisions") else "" for line in lines]),
        ("tokens/s", [_rate(line.tokens_per_s) for line in lines]),
    ]
    columns += [(name, [_number(line.fact(name)) for line in lines]) for name in study.columns]
    shown = [column for column in columns if any(column[1]) or column[0] in study.columns]
    return TextTable(
        tuple(name for name, _ in shown), tuple(tuple(cells) for cells in zip(*(c for _, c in shown), strict=True))
    )


def markdown(study: Study, lines: Sequence[StudyLine], *more: TextTable) -> str:
    """A section of a document: what was done, and the tables."""
    head = [f"## {study.name}", ""]
    if study.description:
        head += [study.description.strip(), ""]
    notes = ["Losses are held-out, in nats per token, of the published model; ± is the standard error over seeds."]
    notes += [f"On {machine}." for machine in sorted({run.machine for line in lines for run in line.runs.values()})]
    if any(line.lost_share for line in lines):
        notes.append("Lost: tokens that were never merged: refused, dropped, overwritten, or gone with a learner.")
    if any(line.fact("bits_up") for line in lines):
        notes.append("Bits are per parameter, of a contribution and of an update; B counts all that links carried.")
    if any(line.reached_ratio for line in lines):
        notes.append("In brackets: times the quickest fixed setting of the same world.")
    if any(line.percent is not None and not line.paired for line in lines):
        notes.append("Percentages with * compare means of different seeds.")
    return "\n".join([*head, text_table(study, lines).markdown(), " ".join(notes), "", *(t.markdown() for t in more)])


def unknown_facts(study: Study, lines: Sequence[StudyLine]) -> tuple[list[str], list[str]]:
    """(columns that no finished run has anything for, facts that runs do have)."""
    known = {name for line in lines for run in line.runs.values() for name in run.facts}
    return [name for name in study.columns if known and name not in known], sorted(known)


def to_dict(study: Study, lines: Sequence[StudyLine]) -> dict[str, Any]:
    """For programs. What is not known is null."""
    return {
        "study": study.name,
        "runs": len({planned.spec.key for planned in study.planned}),
        "finished": len({run.key for line in lines for run in line.runs.values()}),
        "lines": [_line_dict(study, line) for line in lines],
    }


def _line_dict(study: Study, line: StudyLine) -> dict[str, Any]:
    return {
        "label": line.label,
        "settings": dict(line.settings),
        "seeds": sorted(line.runs),
        "seeds_wanted": line.wanted,
        "diverged": line.diverged,
        **_estimate("loss", line.loss),
        "baseline": study.baselines.get(line.label),
        **_estimate("percent", line.percent),
        "paired": line.paired if line.percent else None,
        **_estimate("percent_best", line.percent_best),
        "published": study.published.get(line.label),
        "lost_share": line.lost_share,
        "virtual_s": line.virtual_s,
        "time_ratio": line.time_ratio,
        **_estimate("reached_s", line.reached_s),
        "reached_ratio": line.reached_ratio,
        "bits_up": line.fact("bits_up"),
        "bits_down": line.fact("bits_down"),
        "bytes_per_parameter_mtoken": line.sent_per_mtoken,
        "decisions": line.fact("decisions"),
        "tokens_per_s": line.tokens_per_s,
        "other_text": line.other_text,
        "facts": {name: line.fact(name) for name in study.columns},
        "keys": {str(seed): run.key for seed, run in line.runs.items()},
    }


def _estimate(name: str, value: Estimate | None) -> dict[str, float | None]:
    if value is None:
        return {name: None, f"{name}_error": None}
    return {name: value.mean, f"{name}_error": None if math.isnan(value.error) else value.error}


def _against(study: Study, lines: Sequence[StudyLine]) -> str:
    names = {study.baselines[line.label] for line in lines if line.label in study.baselines}
    return f"against {names.pop()}" if len(names) == 1 else "against baseline"


def _seeds(line: StudyLine) -> str:
    have, wanted = len(line.runs), len(line.wanted)
    return str(have) if have == wanted else f"{have} of {wanted}"


def _loss(line: StudyLine) -> str:
    if line.loss is None:
        return "diverged" if line.diverged else "-"
    error = "" if math.isnan(line.loss.error) else f" ± {line.loss.error:.4f}"
    return f"{line.loss.mean:.4f}{error}" + (f" ({line.diverged} diverged)" if line.diverged else "")


def _against_text(line: StudyLine) -> str:
    return "other text" if line.other_text and line.loss is not None else _percent_text(line.percent, line.paired)


def _percent_text(value: Estimate | None, paired: bool = True) -> str:
    if value is None:
        return ""
    error = "" if math.isnan(value.error) else f" ± {value.error:.2f}"
    return f"{value.mean:+.2f}{error}%" + ("" if paired else " *")


def _published(study: Study, line: StudyLine) -> str:
    return f"{study.published[line.label]:+g}%" if line.label in study.published else ""


def _virtual(line: StudyLine) -> str:
    if line.virtual_s is None:
        return ""
    ratio = f" ({line.time_ratio:.2f}x)" if line.time_ratio is not None else ""
    return f"{line.virtual_s:,.0f} s{ratio}"


def _reached(line: StudyLine) -> str:
    if line.reached_s is None:
        return "not reached" if line.runs else ""
    ratio = f" ({line.reached_ratio:.2f}x)" if line.reached_ratio is not None else ""
    return f"{line.reached_s.mean:,.0f} s{ratio}"


def _bits(line: StudyLine, name: str) -> str:
    value = line.fact(name) if name else line.sent_per_mtoken
    return "" if value is None else f"{value:.3g}"


def _rate(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.0f}k" if value >= 1e4 else f"{value:,.0f}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
