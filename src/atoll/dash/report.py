"""report.html: one self-contained page about a run, made from its events alone."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from atoll.dash import curves, lanes, page, pieces, recovery, words
from atoll.dash.text import count_text, percent_text
from atoll.errors import LaunchError
from atoll.observe import RunState, summarize

SAMPLE_CHARS_MAX = 4000
FAULTS_SHOWN_MAX = 50
ROWS_SHOWN_MAX = 40
SETTINGS_SHOWN_MAX = 200


def write_report(run_folder: str | Path) -> Path:
    """Write RUN/report.html and return its path. Raises LaunchError when there is nothing to report on."""
    folder = Path(run_folder)
    state = summarize(folder)
    if state.first_ns is None:
        raise LaunchError(
            f"the event files of {folder} hold no readable event; give the folder of a run that has started"
        )
    target = folder / "report.html"
    partial = target.with_name("report.html.partial")
    try:
        partial.write_text(render(state, folder), encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        raise LaunchError(f"cannot write {target}: {error}; make the run folder writable or free some space") from error
    return target


def render(state: RunState, folder: Path) -> str:
    """The page as text."""
    title = state.run.title if state.run and state.run.title else folder.resolve().name
    return page.page(f"Atoll: {title}", _body(state, folder, title), _data(state))


def _data(state: RunState) -> dict[str, Any]:
    """What the pieces draw."""
    drawn = {learner: lanes.lane(state, learner, state.end_ns) for learner in curves.drawn(state)}
    return {**pieces.picture(state, state.end_ns), "lanes": drawn}


def _body(state: RunState, folder: Path, title: str) -> Iterator[str]:
    yield page.header(title, _headline(state))
    yield page.tiles(pieces.tiles(state))
    if state.faults:
        yield _failures(state)
    if recovery.happened(state):
        yield _recovery(state)
    yield from _notices(state)
    if not state.learner_steps:
        yield page.section("No step yet", "No learner had reported a step when this was made.")
    else:
        yield _loss(state)
        yield _lanes(state)
        yield _speeds(state)
        yield _time(state)
    if state.rounds.commits:
        yield _rounds(state)
    yield _traffic(state)
    yield from _appendix(state, folder)


def _headline(state: RunState) -> str:
    run = state.run
    parts = [state.method]
    count = max(len(state.learners), run.learners if run else 0)
    parts.append(f"{count} learner{'s' if count != 1 else ''}")
    if state.parameters:
        parts.append(f"{count_text(state.parameters)} parameters")
    if run and state.method in ("decoupled", "diloco"):
        pieces = f"{run.fragments} fragment{'s' if run.fragments != 1 else ''}"
        parts.append(f"{pieces}, each synchronised every {run.sync_every} steps")
        parts.append(f"{run.codec_up} up, {run.codec_down} down")
    reason = state.finished.reason if state.finished else "not finished when this was made"
    parts.append(_ending(reason))
    return " · ".join(parts)


def _ending(reason: str) -> str:
    if reason.startswith("SIG"):
        return f"stopped by {reason}"
    return reason if reason.startswith(("finished", "not finished", "failed")) else f"finished: {reason}"


def _failures(state: RunState) -> str:
    costs = state.fault_costs()
    entries = [
        (words.fault_headline(state, cost), words.fault_own_cost(state, cost), words.fault_others_cost(cost))
        for cost in costs[:FAULTS_SHOWN_MAX]
    ]
    lead = (
        "Each fault, what it cost the learner that it hit, and how the others fared meanwhile. Learners on one machine "
        "share its cores, so the others may speed up a little while one is down, or slow down while it starts again."
    )
    if len(costs) > FAULTS_SHOWN_MAX:
        lead += f" The first {FAULTS_SHOWN_MAX} of {len(costs)} are listed."
    return page.section("What the failures cost", lead, page.faults(entries))


def _recovery(state: RunState) -> str:
    rows, returns, found = recovery.restarts(state), recovery.returns(state), recovery.problems(state)
    parts = [page.settings_wide(recovery.facts(state))]
    if rows:
        parts.append(
            page.table(recovery.RESTART_HEAD, rows[:ROWS_SHOWN_MAX], (4,), whole=3, title="Restarts and joins")
        )
        parts.append(_left_out(len(rows)))
    if returns:
        title = "Learners that were cut off, and what they weighed when they came back"
        parts.append(page.table(recovery.RETURN_HEAD, returns[:ROWS_SHOWN_MAX], (2, 3, 4, 5), whole=2, title=title))
        parts.append(_left_out(len(returns)))
    if found:
        parts.append(page.listed("Problems found", found[:ROWS_SHOWN_MAX]))
    return page.section("What was lost, and what was not", recovery.lead(state), *parts)


def _notices(state: RunState) -> Iterator[str]:
    """Learners that rounds did not wait for, and warnings: nothing where there were none."""
    rows, thin, warned = recovery.asides(state), recovery.thin_links(state), recovery.warnings(state)
    if rows or thin:
        lead = "Rounds closed without these, so that nobody had to wait. What they sent was merged whenever it came."
        table = page.table(recovery.ASIDE_HEAD, rows[:ROWS_SHOWN_MAX], (2, 4), whole=3) if rows else ""
        links = page.listed("Links that were too thin", thin[:ROWS_SHOWN_MAX]) if thin else ""
        yield page.section("Learners that rounds did not wait for", lead, table, _left_out(len(rows)), links)
    decided = recovery.adapted(state)
    if decided:
        lead = "What learners were asked to send, and how often, followed what was measured."
        listed = page.listed("", decided[:ROWS_SHOWN_MAX])
        yield page.section("What was decided about what is sent", lead, listed, _left_out(len(decided)))
    if warned:
        yield page.section("Warnings", "", page.listed("", warned[:ROWS_SHOWN_MAX]), _left_out(len(warned)))


def _left_out(count: int) -> str:
    return f'<p class="lead">and {count - ROWS_SHOWN_MAX} more</p>' if count > ROWS_SHOWN_MAX else ""


def _loss(state: RunState) -> str:
    faults = ", with the faults marked" if state.faults else ""
    lead = "Bold: the published model on held-out data. Faint: the training loss of each learner."
    return page.pair(
        page.half("Loss over tokens", lead, page.piece("loss-tokens", "Loss over tokens processed")),
        page.half(
            "Loss over time",
            f"The same against the clock{faults}.",
            page.piece("loss-time", "Loss over time, faults marked"),
        ),
    )


def _lanes(state: RunState) -> str:
    return page.section(
        "Rounds, learner by learner" if state.rounds.commits else "Learner by learner",
        "The run was stopped and resumed; the time between is cut out." if state.pauses else "",
        page.piece("lane-legend", "", "legend"),
        page.piece("lanes", "What each learner was doing, its contributions and the faults"),
        _more(state),
    )


def _speeds(state: RunState) -> str:
    lead = "One curve per learner, and all together."
    if state.faults:
        lead += " In a red band the learner that was hit dips, and it shows whether the others went on."
    return page.section(
        "Tokens per second", lead, page.piece("rates", "Tokens per second of each learner over time"), _more(state)
    )


def _more(state: RunState) -> str:
    hidden = len(state.learners) - curves.LEARNERS_DRAWN_MAX
    return f'<p class="lead">and {hidden} more learners, not drawn</p>' if hidden > 0 else ""


def _time(state: RunState) -> str:
    lead = f"Goodput: {words.goodput_sentence(state)}. On the right: what was not training, enlarged."
    legend = page.piece("time-legend", "", "legend")
    return page.section("Where the time went", lead, legend, page.piece("time", "Where the time of each learner went"))


def _rounds(state: RunState) -> str:
    rounds = state.rounds
    lead = f"{rounds.merged:,} contributions in {rounds.commits:,} commits; {rounds.late:,} came late. "
    lead += "Hollow: not all that were asked were in time."
    return page.pair(
        page.half("Contributors per commit", lead, page.piece("commits", "Contributors per commit over time")),
        page.half(
            "Agreement from commit to commit",
            "rho: cosine between successive merged gradients of a fragment. Below 0 the outer step overshoots.",
            page.piece("rho", "Cosine between successive merged gradients"),
        ),
    )


def _traffic(state: RunState) -> str:
    whole = max(1, state.ledger.processed)
    rows = [(name, f"{count:,}", percent_text(count / whole)) for name, count in pieces.ledger(state)]
    fates = page.table(("fate", "tokens", "share"), rows, numbers=(1, 2))
    who_counted = "As counted by the syncer." if state.stats else "There is no syncer: every token is in the model."
    tokens = page.half("Every token has a known fate", who_counted, fates)
    if not (state.bytes_up or state.bytes_down or state.data_parallel_bytes):
        return page.pair(tokens, "")
    lead = (
        "Data-parallel: a ring all-reduce of bf16 gradients at each of the same steps, "
        "2 (M-1)/M x 2 bytes x parameters per learner."
    )
    return page.pair(
        page.half("Bytes", lead, page.piece("bytes", "Bytes sent, against data-parallel training")), tokens
    )


def _appendix(state: RunState, folder: Path) -> Iterator[str]:
    sample = read_text(folder / "sample.txt")
    if sample:
        yield page.section("A sample from the model", "", page.preformatted(sample[:SAMPLE_CHARS_MAX]))
    for name, title in (("config.json", "Settings"), ("result.json", "Result")):
        values = list(flatten(read_json(folder / name)))[:SETTINGS_SHOWN_MAX]
        if values:
            yield page.section(title, f"From {name} in the run folder.", page.settings(values))
    command = f"atoll report {shlex.quote(str(folder))}"
    yield page.footer(f"Made from the events of the run. To make it again: <code>{escape(command)}</code>")


def read_text(path: Path) -> str:
    """The text of a file, or nothing when there is none that can be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file, or an empty one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as "outer.inner" -> text."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            yield f"{prefix}{name}", f"{value:.6g}" if math.isfinite(value) else "-"
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)
