"""A plan as tables for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from atoll.instruments.plan.job import Job
from atoll.instruments.plan.limits import with_quorum
from atoll.instruments.plan.methods import UTILISATION_WANTED
from atoll.instruments.plan.planner import Plan
from atoll.instruments.plan.traffic import first_bytes
from atoll.instruments.plan.units import bytes_text, count_text, percent_text, rate_text, seconds_text
from atoll.observe import adapted_text

LIMITS_SHOWN = 14
"""Rows of the table of limits; of many regions the fullest links are shown."""
_TITLES = {
    "sync_every": "sync-every (H)",
    "fragments": "fragments (P)",
    "overlap": "overlap (tau)",
    "quorum": "quorum (K)",
    "grace_cap_steps": "grace-cap, steps",
}


def print_plan(plan: Plan, console: Console) -> None:
    """Everything about a plan, the verdict last."""
    console.print(headline(plan.job), soft_wrap=True, markup=False)
    console.print(_settings(plan))
    console.print(_limits(plan))
    console.print(_round(plan))
    console.print(_syncer(plan))
    console.print(_methods(plan))
    for line in fabric(plan):
        console.print(line, markup=False, soft_wrap=True)
    for line in settled(plan):
        console.print(line, markup=False, soft_wrap=True)
    for warning in warnings(plan):
        console.print(warning, style="yellow", markup=False, soft_wrap=True)
    for note in notes(plan):
        console.print(note, style="dim", markup=False, soft_wrap=True)
    for number, line in enumerate(verdict(plan)):
        console.print(line, style=_verdict_style(plan, number), markup=False, soft_wrap=True)


def headline(job: Job) -> str:
    where = f" in {len(job.regions)} regions" if job.regions else f" at {job.sites} sites" if job.sites else ""
    text = f"{count_text(job.parameters)} parameters, {job.learners} learners{where}, {_steps(job)} per step"
    if job.tokens_per_step:
        text += f" of {count_text(job.tokens_per_step)} tokens each, {count_text(job.tokens_total)} tokens in all"
    if job.chips:
        years = "a year" if job.mtbi_years == 1 else f"{job.mtbi_years:g} years"
        text += f"; {job.chips:,} chips with {years} between two interruptions of each"
    return text


def _steps(job: Job) -> str:
    """The time of a step, or the range if places differ."""
    fastest, slowest = seconds_text(job.step_s_fastest), seconds_text(job.step_s_slowest)
    return fastest if fastest == slowest else f"{fastest} to {slowest}"


def fabric(plan: Plan) -> list[str]:
    """With `sites`: the shards and relays that the job needs, and why."""
    found = plan.fabric
    if found is None:
        return []
    shards = f"{found.shards} shards" if found.shards else "no shards"
    relays = f"{found.relays} relays" if found.relays else "no relays"
    return [f"{shards}: {found.shards_why}", f"{relays}: {found.relays_why}"]


def settled(plan: Plan) -> list[str]:
    """With `adaptive`: what the run's controller would decide on these links, and where that ends."""
    if plan.settled is None:
        return []
    by_codec: dict[str, list[str]] = {}
    for place, codec in plan.settled.codecs:
        by_codec.setdefault(codec, []).append(place)
    sends = "; ".join(f"{codec} from {', '.join(places)}" for codec, places in by_codec.items())
    down = f"; updates in {plan.settled.codec_down}"
    end = f"adaptive: H {plan.settled.period}, tau {plan.settled.overlap}, {sends}{down}"
    return [end, *(f"  {adapted_text(decision)}" for decision in plan.settled.decisions)]


def warnings(plan: Plan) -> list[str]:
    """What a user might take for something else: H counts the steps of the learner that completes the quorum."""
    job, period, count = plan.job, plan.settings.sync.sync_every, plan.quorum.count
    if round(plan.steps_fastest) <= period:
        return []
    return [
        f"Learners are not equally fast. H = {period} counts the steps of the one that completes the quorum (number "
        f"{count} by speed, {seconds_text(job.step_s_of(count))} per step): between two rounds of a fragment the "
        f"fastest do {plan.steps_fastest:,.0f} local steps and the slowest {plan.steps_slowest:,.0f}. If that is too "
        "many, give a smaller --sync-every or a smaller --quorum."
    ]


def notes(plan: Plan) -> list[str]:
    """What was left out or assumed, because it was not given."""
    job, found = plan.job, []
    if not job.chips:
        found.append("Failures are left out: give --chips (and --mtbi-years) to count them.")
    if not job.tokens_per_step:
        found.append("Times and totals are left out: give --tokens-per-step (of one learner).")
    elif not job.tokens:
        found.append("Tokens were not given: 20 per parameter are assumed.")
    if not job.syncer_gbit:
        rate = rate_text(max(plan.rates.syncer_in, plan.rates.syncer_out))
        found.append(f"The syncer's own link is not checked: it needs {rate} each way; give --syncer-gbit.")
    return found


def verdict(plan: Plan) -> list[str]:
    """One line that says that it fits, or several that name the binding limit and what would fit."""
    worst = plan.binding
    if worst is None:
        return [f"It fits. The fullest part: {plan.fullest.name}, {percent_text(plan.fullest.share)} used."]
    lines = [
        f"It does not fit. The binding limit: {worst.name} needs {worst.text(worst.need)} and has "
        f"{worst.text(worst.have)}.",
        _consequence(plan),
    ]
    if not plan.remedies:
        return [
            *lines,
            "Nothing that was tried would fit: take a smaller model, longer steps, or faster links and machines.",
        ]
    return [*lines, "Any one of these lines would do:", *(f"  - {text}" for text in plan.remedies)]


def _consequence(plan: Plan) -> str:
    if plan.settings.sync.synchronous:
        share = percent_text(plan.methods[-1].utilisation * with_quorum(plan.limits))
        return f"Learners would compute {share} of the time and wait for the rest."
    if math.isinf(plan.sync_every_effective):
        return "Learners would train on all the same, but no round would ever close."
    return (
        f"Learners would train on all the same, but H would be about {plan.sync_every_effective:,.0f} instead of "
        f"{plan.settings.sync.sync_every}."
    )


def _verdict_style(plan: Plan, number: int) -> str:
    if plan.fits:
        return "bold green"
    return "bold red" if number == 0 else ""


def _table(title: str, *columns: str, right: Sequence[int] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in right else "left")
    return table


def _fill(table: Table, rows: Iterable[Sequence[str]]) -> Table:
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _settings(plan: Plan) -> Table:
    rows = [
        (_TITLES.get(choice.name, choice.name.replace("_", "-")), _value(choice.name, choice.value), choice.reason)
        for choice in plan.choices
    ]
    return _fill(_table("Settings", "setting", "value", "why", right=(1,)), rows)


def _value(name: str, value: Any) -> str:
    unit = " s" if name == "durability_interval" else ""
    return (f"{value:g}" if isinstance(value, float) else str(value)) + unit


def _limits(plan: Plan) -> Table:
    fullest = sorted(plan.limits, key=lambda limit: -limit.share)[:LIMITS_SHOWN]
    kept = [limit for limit in plan.limits if limit in fullest]
    rows = [(one.name, one.text(one.need), one.text(one.have), percent_text_over(one.share)) for one in kept]
    table = _fill(_table("Needs, against what there is", "what", "needs", "has", "used", right=(1, 2, 3)), rows)
    if len(kept) < len(plan.limits):
        table.caption = f"the fullest {len(kept)} of {len(plan.limits)}"
    return table


def percent_text_over(share: float) -> str:
    """A share that may be above 1."""
    return f"{100.0 * share:.3g}%" if share < 10.0 else f"{share:.3g}x"


def _round(plan: Plan) -> Table:
    times, quorum, job = plan.times, plan.quorum, plan.job
    steps = f"{plan.settings.sync.overlap} steps"
    joining = first_bytes(job.parameters)
    joining_s = max(joining * 8 / 1e9 / place.down_gbit for place in job.places)
    rows = [
        (
            "bytes of a fragment",
            f"{bytes_text(plan.fragment.up_bytes)} up, {bytes_text(plan.fragment.down_bytes)} down",
        ),
        ("a learner sends / receives", f"{rate_text(plan.rates.learner_up)} / {rate_text(plan.rates.learner_down)}"),
        ("the syncer receives / sends", f"{rate_text(plan.rates.syncer_in)} / {rate_text(plan.rates.syncer_out)}"),
        ("a round is launched every", f"{seconds_text(times.every_s)}, at most {times.in_flight} in flight"),
        ("encoded after", seconds_text(times.encode_s)),
        (
            f"quorum of {quorum.count} complete after",
            f"{seconds_text(times.quorum_s)}; all after {seconds_text(times.all_s)}",
        ),
        ("grace window", f"{seconds_text(times.grace_s)} ({times.grace_reason})"),
        ("merge, commit", f"{seconds_text(times.merge_s)}, {seconds_text(times.commit_s)}"),
        ("published update at the last learner after", seconds_text(times.download_s)),
        (
            "slack",
            f"{seconds_text(times.slack_s)}: a round has {seconds_text(times.has_s)} ({steps}) and takes "
            f"{seconds_text(times.takes_s)}",
        ),
        (
            "learners that are up",
            f"{quorum.up:.1f} of {job.learners}; a quorum {percent_text(quorum.chance)} of the time"
            if job.chips
            else "-",
        ),
        ("contributions in a round", f"{quorum.merged:.1f}"),
        (
            "parameters of a learner that joins",
            f"{bytes_text(joining)}, {seconds_text(joining_s)} at the slowest place",
        ),
    ]
    return _fill(_table("A round", "", "expected"), rows)


def _syncer(plan: Plan) -> Table:
    memory, disk = plan.memory, plan.disk
    parts = f"state {bytes_text(memory.state)}, recent updates {bytes_text(memory.updates)}, "
    parts += f"contributions {bytes_text(memory.contributions)}, gradient sample {bytes_text(memory.sample)}"
    rows = [("memory", bytes_text(memory.total), parts)]
    if plan.settings.durability != "none":
        rows.append(("disk", bytes_text(disk.state), "two slots per fragment, and the log of merges"))
        rows.append(("written", f"{bytes_text(plan.disk_bytes_s)}/s", _written(plan)))
    return _fill(_table("The syncer", "", "needs", "of which", right=(1,)), rows)


def _written(plan: Plan) -> str:
    """What reaches the disk at a time."""
    if plan.settings.durability == "commit":
        return f"{bytes_text(plan.disk.commit)} per commit on average, {bytes_text(plan.disk.slot)} now and then"
    interval_s = plan.settings.durability_interval
    what = "all state" if interval_s >= plan.times.period_s else "the state that has changed"
    return f"on average: {what}, {bytes_text(plan.interval_bytes)}, every {interval_s:g} s"


def _methods(plan: Plan) -> Table:
    title = (
        f"Against other methods, on the same links (Gbit/s: for {UTILISATION_WANTED:.0%} utilisation; Atoll: to keep H)"
    )
    columns = ("method", "link, each way", "utilisation", "goodput", "time", "bytes")
    rows = [
        (
            one.name,
            rate_text(one.gbit_s),
            percent_text(one.utilisation),
            percent_text(one.goodput) if plan.job.chips else "-",
            "-" if math.isnan(one.seconds) else seconds_text(one.seconds),
            "-" if math.isnan(one.bytes) else bytes_text(one.bytes),
        )
        for one in plan.methods
    ]
    return _fill(_table(title, *columns, right=(1, 2, 3, 4, 5)), rows)
