"""The picture of `atoll status`: a paragraph and a table in people's words, then what somebody should know."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from atoll.dash import bytes_text, count_text, duration_text, loss_text

if TYPE_CHECKING:
    from atoll.launch import RunEnd

SILENT_S = 5.0
"""A learner says something every 2 s; one that was not heard for longer is called silent."""
WARNINGS_SHOWN = 5
WIDE = 100
"""Columns of a terminal that has room to say from where each learner comes."""
LEARNERS_SHOWN = 50
"""Rows of the table: a tall terminal; --json has them all."""


def status_view(answer: Mapping[str, Any], now_s: float, width: int = 80) -> RenderableType:
    """Everything is read with `get`: the syncer may be older than this command."""
    if answer.get("relay") or answer.get("shard") or answer.get("stands_by"):
        return Text(_part(answer))
    members = list(answer.get("members", ()))
    parts: list[RenderableType] = [Text(line) for line in _heading(answer, members)]
    if members:
        parts += [Text(""), _learners(members[:LEARNERS_SHOWN], wide=width >= WIDE), Text("")]
    hidden = len(members) - LEARNERS_SHOWN + int(answer.get("members_left_out", 0))
    if len(members) > LEARNERS_SHOWN:
        parts.append(Text(f"and {hidden} more learners", style="dim"))
    parts += _notes(answer, members, now_s)
    return Group(*parts)


def _part(answer: Mapping[str, Any]) -> str:
    """A shard, a relay or a standby, which somebody has asked instead of the syncer."""
    if answer.get("stands_by"):
        has = "has everything" if answer.get("ready") else "does not have everything yet"
        run = answer.get("run") or "(none yet)"
        return f"standby of run {run}: {has}; heard its primary {float(answer.get('heard_s', 0)):.0f} s ago"
    if answer.get("relay"):
        served, fetched = (bytes_text(int(answer.get(name, 0))) for name in ("bytes_served", "bytes_fetched"))
        who = f"relay for {answer.get('upstream')}: {len(answer.get('learners', ()))} learners"
        why = f" ({answer['passes_on_because']})" if answer.get("passes_on_because") else ""
        upwards = "merges contributions" if answer.get("merges") else f"passes contributions on{why}"
        return f"{who}; {served} served of {fetched} fetched; {upwards}"
    led = "led by a syncer" if answer.get("led") else "waits for a syncer"
    versions = answer.get("versions", {})
    return f"shard {answer.get('shard')} of run {answer.get('run') or '(none yet)'}: {len(versions)} fragments; {led}"


def ended_lines(ended: RunEnd, title: str, now_s: float) -> Iterator[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ended.time_s))
    commits = f" after {ended.commits:,} commits" if ended.commits else ""
    yield f"the run in {title} ended {when} ({_ago(now_s - ended.time_s)}){commits}: {ended.reason}"
    if ended.model:
        yield f"model: {ended.model}"
    else:
        why = "`atoll export` makes it from the state" if ended.commits else "nothing was merged"
        yield f"no model was written: {why}"
    yield f"report: atoll report {title}"


def _heading(answer: Mapping[str, Any], members: list[Mapping[str, Any]]) -> Iterator[str]:
    training = sum(state_words(member) == "training" for member in members)
    config, versions = answer.get("config", {}), answer.get("versions") or [0]
    up = f", up {duration_text(answer['uptime_s'])}" if "uptime_s" in answer else ""
    expected = answer.get("expected", config.get("learners_expected", 0))
    yield f"run {answer.get('run')} (epoch {answer.get('epoch', 1)}{up}): {training} of {expected} learners train"
    tokens, budget = answer.get("tokens_processed", 0), config.get("tokens_budget", 0)
    spent = answer.get("tokens_spent", tokens)  # of what is only claimed, little counts
    share = f" of {count_text(budget)} ({100 * spent / budget:.0f}%)" if budget else ""
    yield (
        f"{count_text(tokens)}{share} tokens at step {answer.get('clock_step', 0):,}, "
        f"{count_text(answer.get('tokens_merged', 0))} of them merged in {answer.get('commits', 0):,} commits; "
        f"versions {min(versions)} to {max(versions)} of {len(versions)} fragments"
    )
    if shards := list(answer.get("shards", ())):
        away = [str(shard.get("address")) for shard in shards if shard.get("away")]
        yield f"{len(shards)} shards have the fragments" + (f"; away: {', '.join(away)}" if away else "")
    if answer.get("stopping"):
        yield f"ending: {answer['stopping']}"
    elif answer.get("waits"):
        yield str(answer["waits"])
    elif answer.get("healing"):
        yield "healing: learners bring back what the syncer had lost"
    elif not answer.get("committed", True):
        yield "waiting for the first learner's parameters"


def _learners(members: list[Mapping[str, Any]], *, wide: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for column in ("learner", "state"):
        table.add_column(column, overflow="fold", min_width=8)
    for column in ("heard", "step", "tokens", "loss", "up/s", "down/s", "behind", "proto"):
        table.add_column(column, justify="right", no_wrap=True)
    if wide:
        table.add_column("from", overflow="fold")
    for member in members:
        loss = member.get("loss")
        table.add_row(
            f"{member.get('learner')}{_process(member.get('generation', 1))}",
            Text(state_words(member), style="" if member.get("state") == "active" else "dim"),
            _ago(member["heard_s"]).removesuffix(" ago") if "heard_s" in member else "-",
            f"{member.get('step', 0):,}",
            count_text(member.get("tokens", 0)),
            loss_text(loss) if isinstance(loss, float | int) else "-",
            bytes_text(member.get("up_bytes_s", 0)),
            bytes_text(member.get("down_bytes_s", 0)),
            f"{member.get('behind', 0):,}" if member.get("state") not in ("lost", "left") else "-",
            str(member.get("protocol", "-")),
            *([str(member.get("from", ""))] if wide else []),
        )
    return table


def _process(generation: int) -> str:
    """The first process of a learner needs no number."""
    return f" ({generation})" if generation > 1 else ""


def state_words(member: Mapping[str, Any]) -> str:
    """training / joining / set aside: why / silent for 12 s / away / lost / left."""
    state, heard_s = str(member.get("state", "?")), float(member.get("heard_s", 0.0))
    words = {"active": "training"}.get(state, state)
    if state == "active" and member.get("aside"):
        words = f"set aside: {member['aside']}"
    elif state == "active" and heard_s >= SILENT_S:
        words = f"silent for {heard_s:.0f} s"
    return f"{words}, asked to leave" if member.get("dismissed") and state != "left" else words


def _notes(answer: Mapping[str, Any], members: list[Mapping[str, Any]], now_s: float) -> Iterator[RenderableType]:
    for member in members:
        for thin in member.get("thin", ()):
            yield Text(f"{member.get('learner')}'s link is too thin, {thin}", style="yellow")
    for one in list(answer.get("warnings", ()))[-WARNINGS_SHOWN:]:
        yield Text(f"warning, {_ago(now_s - one.get('time_s', now_s))}: {one.get('text', '')}", style="yellow")
    if answer.get("degraded"):
        yield Text(f"disk: NOT durable now ({answer['degraded']})", style="bold red")
    elif "durability" in answer:
        standby = (answer.get("standby") or {}).get("address")
        yield Text(f"disk: durability {answer['durability']}" + (f", and all of it at {standby}" if standby else ""))
    yield from _snapshots(answer.get("snapshots") or {}, now_s)
    model = answer.get("model")
    if model:
        yield Text(f"model: {model['path']}, written {_ago(now_s - model['time_s'])} (versions {_range(model)})")


def _snapshots(told: Mapping[str, Any], now_s: float) -> Iterator[Text]:
    if "label" in told:
        ago = _ago(now_s - told["time_s"])
        yield Text(f"snapshots: number {told['label']} {ago} in {told['url']} (versions {_range(told)})")
    if told.get("failed"):
        yield Text(f"snapshots: {told['failed']} ({_ago(now_s - told['failed_time_s'])})", style="bold red")


def _range(told: Mapping[str, Any]) -> str:
    low, high = told.get("versions") or [0, 0]
    return f"{low} to {high}"


def _ago(seconds: float) -> str:
    return "now" if seconds < 1 else f"{duration_text(round(seconds)).replace('.0', '')} ago"
