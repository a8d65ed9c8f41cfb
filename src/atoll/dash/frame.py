"""One frame of the terminal view: RunState -> a rich renderable. Pure but for the console's size."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.dash.syncer_line import data_line, syncer_line, syncer_state, waiting_line
from atoll.dash.text import bytes_text, clock_text, count_text, loss_text, percent_text, ratio_text
from atoll.observe import AWAY, Goodput, LinkThin, RoundSeen, RunState, adapted_text, bits_text, span_text, thin_text

STATE_STYLE = {
    "active": "green",
    "slow": "yellow",
    "joining": "cyan",
    "set aside": "bold yellow",
    "cut off": "bold magenta",
    "away": "magenta",
    "lost": "bold red",
    "down": "bold red",
    "left": "dim",
}
STATE_SIGN = dict.fromkeys(STATE_STYLE, "◌") | {"active": "●", "slow": "◐", "set aside": "◐", "left": "○"}
STATE_SIGN |= dict.fromkeys(("lost", "down"), "✗")
STATE_WORD = {"aside": "set aside"}
TRAINING = ("active", "slow", "aside", "cut off")
TONE_STYLE = {"bad": "red", "good": "green", "plain": "default"}
NARROW_COLUMNS = 96
LEARNER_ROWS_MAX = 16
NAMED_MAX = 4
"""Learners that a line names; it stays a line."""
DOT_LEARNERS_MAX = 16
"""With more learners the contributors of a commit are shown as a number."""
BAR_PARTS = (
    ("train", ("compute",), "blue", "━"),
    ("stall", ("stall",), "red", "━"),
    ("Atoll", ("adopt", "snapshot", "overhead"), "yellow", "━"),
    ("down", ("evaluate", "recovery", "down", "idle"), "bright_black", "┄"),
)


def frame(state: RunState, *, width: int, height: int, now_ns: int) -> RenderableType:
    """The whole view, at most `width` by `height`; learners for whom there is no row are counted in one line."""
    header, header_rows = _header(state, now_ns)
    learner_rows = min(len(state.learners), LEARNER_ROWS_MAX, max(1, height - 14 - header_rows))
    # Beside their rows the learners take 3 lines, the middle 3 and the log 2; one is left for the cursor.
    spare = height - header_rows - (learner_rows + 3) - 3 - 2 - 1
    log_rows = max(2, min(6, spare // 3))
    round_rows = max(2, min(12, spare - log_rows))
    goodput = state.goodput()
    middle = Table.grid(expand=True, padding=0)
    middle.add_column(ratio=1)
    middle.add_column(width=36)
    middle.add_row(_rounds(state, round_rows, narrow=width < NARROW_COLUMNS), _numbers(state, goodput, round_rows + 1))
    return Group(header, _learners(state, learner_rows, width, now_ns), middle, _log(state, log_rows))


def status_line(state: RunState, now_ns: int) -> str:
    """The same in one plain line, for a log file."""
    states, rates = state.states(now_ns), state.rates(now_ns)
    running = sum(one in TRAINING for one in states.values())
    # Guests that have left are no longer missed.
    present = max(sum(one != "left" for one in states.values()), state.run.learners if state.run else 0)
    losses = [one.loss for one in state.learners.values() if math.isfinite(one.loss)]
    parts = [
        _clock(state, now_ns),
        f"{running}/{present} learners",
        f"{count_text(_tokens(state))} tokens{_budget_text(state)}",
        f"{count_text(sum(rates.values()))} tok/s",
        f"loss {loss_text(sum(losses) / len(losses) if losses else math.nan)}",
        f"eval {loss_text(state.eval_loss)}",
        f"goodput {percent_text(state.goodput().share)}",
    ]
    if state.rounds.commits:
        parts.append(f"{state.rounds.commits} commits")
    if rhythm := rhythm_text(state):
        parts.append(rhythm)
    if syncer_state(state, now_ns) in ("down", "silent"):
        parts.append("SYNCER GONE, learners train on")
    if (waiting := waiting_line(state)) is not None:
        parts.append(waiting.plain)
    parts += [f"{name} {STATE_WORD[one]}" for name, one in states.items() if one in STATE_WORD][:NAMED_MAX]
    parts += [f"{name} {one}" for name, one in states.items() if one in ("cut off", *AWAY)][:NAMED_MAX]
    if state.durability.lapse is not None:
        parts.append(f"DURABILITY {state.durability.level.upper()}: {state.durability.lapse.reason}")
    if state.bytes_up or state.bytes_down:
        parts.append(f"up {bytes_text(state.bytes_up)} down {bytes_text(state.bytes_down)}")
    return " | ".join(parts)


def rhythm_text(state: RunState) -> str:
    """ "H 12, tau 3", where the network has decided about them."""
    words = {"period": "H", "overlap": "tau"}
    return ", ".join(f"{words[what]} {after}" for what, after in sorted(state.notices.rhythm.items(), reverse=True))


def _clock(state: RunState, now_ns: int) -> str:
    """Time since the first step, which is also what the log and the report count from."""
    if not state.learner_steps and not state.rounds.commits:
        return "starting"
    end_ns = state.end_ns if state.finished else max(now_ns, state.last_ns)
    return clock_text(state.elapsed_s(end_ns))


def _tokens(state: RunState) -> int:
    """As the learners report, or as the syncer counts where no learner writes to this folder."""
    return state.tokens or state.ledger.processed


def _budget_text(state: RunState) -> str:
    budget = state.run.tokens_budget if state.run else 0
    return f" ({min(1.0, state.tokens / budget):.0%})" if budget else ""


def _header(state: RunState, now_ns: int) -> tuple[RenderableType, int]:
    """The panel on top, and how many lines it takes."""
    run = state.run
    title = Text("atoll ", style="bold cyan")
    alone = "syncer" if state.syncer.up else "waiting for the first events"  # learners elsewhere keep their own events
    title.append((run.title or run.method) if run else alone, style="bold default")
    right = Text(f"  eval loss {loss_text(state.eval_loss)}", style="bold")
    top = Table.grid(expand=True)
    top.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    top.add_column(justify="right", no_wrap=True)
    top.add_row(title, right)
    budget = run.tokens_budget if run else 0
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    tokens = f"{count_text(_tokens(state))}{f' of {count_text(budget)}' if budget else ''} tokens"
    if not state.finished:
        tokens += f", {count_text(sum(state.rates(now_ns).values()))}/s"
    bar: RenderableType = Text("")
    if budget:
        bar = ProgressBar(budget, min(state.tokens, budget), complete_style="cyan", finished_style="green")
    line.add_row(_clock(state, now_ns), bar, tokens)
    lines: list[RenderableType] = [top, line]
    if (syncer := syncer_line(state, now_ns)) is not None:
        lines.append(syncer)
    if (waiting := waiting_line(state)) is not None:
        lines.append(waiting)
    if (decided := state.notices.sends.get("run")) is not None:
        lines.append(Text(adapted_text(decided), style="dim", no_wrap=True, overflow="ellipsis"))
    if (data := data_line(state)) is not None:
        lines.append(data)
    return Panel(Group(*lines), border_style="cyan", padding=(0, 1)), len(lines) + 2


def _learners(state: RunState, rows: int, width: int, now_ns: int) -> RenderableType:
    wide = width >= NARROW_COLUMNS
    if len(state.learners) == rows + 1:
        rows += 1  # it takes no more room than the line that would count it
    table = Table(expand=True, box=None, padding=(0, 1), header_style="dim")
    table.add_column("learner", no_wrap=True, overflow="ellipsis")
    states, rates = state.states(now_ns), state.rates(now_ns)
    state_width = max([9, *(2 + len(STATE_WORD[one]) for one in states.values() if one in STATE_WORD)])
    table.add_column("state", no_wrap=True, width=state_width)
    for name in ("step", "tok/s", "loss", "behind"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("restarts", justify="right", no_wrap=True)
    table.add_column(_bar_legend(), no_wrap=True, ratio=1, min_width=16)
    rung_width = max((len(one.rung) + 4 for one in state.learners.values() if one.rung), default=0)
    bar_width = max(10, width - (64 + max(0, rung_width - 8) if wide else 54) - (state_width - 9))
    whole = state.goodput().learners if state.finished else {}
    for learner, one in list(state.learners.items())[:rows]:
        word = STATE_WORD.get(states[learner], states[learner])
        sign = Text(f"{STATE_SIGN[word]} {word}", style=STATE_STYLE[word])
        quiet = word in ("down", "lost", "left")
        cells: list[RenderableType] = [
            Text(learner, style="dim" if quiet else "bold"),
            sign,
            f"{one.step:,}" if one.step or one.last_ns else Text("-", style="dim"),
            count_text(rates[learner]) if rates[learner] and word not in AWAY and not quiet else Text("-", style="dim"),
            loss_text(one.loss),
            str(one.behind) if one.behind else Text("0", style="dim"),
        ]
        if wide:
            rung = f" · {one.rung}" if one.rung else ""
            cells.append(Text(f"{one.restarts}{rung}", style="red" if one.restarts else "dim"))
        # Once it is all over the bar shows the whole run.
        shares = whole[learner].shares if learner in whole else state.recent_shares(learner, now_ns)
        notes = [] if state.finished else _note(state, learner, states[learner], now_ns)
        bar = _bar({} if word == "left" and not state.finished else shares, bar_width)
        cells.append(Text(_fitting(notes, bar_width), style=STATE_STYLE[word], overflow="ellipsis") if notes else bar)
        table.add_row(*cells)
    if len(state.learners) > rows:
        table.add_row(Text(f"+ {len(state.learners) - rows} more", style="dim"))
    return Panel(table, title="learners", title_align="left", border_style="bright_black", padding=0)


def _note(state: RunState, learner: str, word: str, now_ns: int) -> list[str]:
    """What is to be said of a learner instead of how it spends its time, the longest words first; nothing for one that
    is well."""
    since_ns = state.comebacks.cut_off_since(learner)
    lasts = span_text(max(0, now_ns - since_ns)) if since_ns is not None else ""
    if word == "cut off":
        alone = [f"for {lasts}, trains on alone", f"{lasts}, trains on alone"]
        return [*(alone if state.rates(now_ns)[learner] else ()), f"for {lasts}"]
    if word in AWAY:
        return [f"for {lasts}, nothing is heard of it", f"nothing heard for {lasts}"] if lasts else ["not heard of"]
    links = [event for (name, _), event in state.notices.thin.items() if name == learner]
    whole, short = "; ".join(map(thin_text, links)), "; ".join(map(_thin_sign, links))
    sends = state.notices.sends.get(learner)
    if sends is not None:
        whole = "; ".join(filter(None, (f"sends {sends.after} ({sends.reason})", whole)))
        short = "; ".join(filter(None, (f"sends {sends.after}", short)))
    spell = state.notices.spell(learner)
    if spell is None or word != "aside":
        return [whole, short] if whole else []
    return [f"{spell.reason}; {whole}", f"{spell.reason}; {short}", short] if whole else [spell.reason]


def _thin_sign(event: LinkThin) -> str:
    sign = {"up": "↑", "down": "↓"}.get(event.direction, event.direction)
    return f"{sign} needs {bits_text(event.needs_bytes_s)}, gets {bits_text(event.gets_bytes_s)}"


def _fitting(texts: list[str], width: int) -> str:
    """The first that fits; else the last, which is the shortest."""
    return next((text for text in texts if len(text) <= width), texts[-1])


def _bar_legend() -> Text:
    legend = Text()
    for name, _, style, sign in BAR_PARTS:
        legend.append(sign, style=f"not dim {style}")
        legend.append(f"{name} ", style="dim")
    legend.right_crop(1)
    return legend


def _bar(shares: dict[str, float], width: int) -> Text:
    """The recent time as a bar; what is there at all gets at least one cell."""
    if not shares:
        return Text("·" * width, style="bright_black")
    sizes = []
    for _, names, _, _ in BAR_PARTS:
        share = sum(shares[name] for name in names)
        sizes.append(max(1, round(share * width)) if share > 0.005 else 0)
    sizes[sizes.index(max(sizes))] += width - sum(sizes)
    bar = Text()
    for (_, _, style, sign), size in zip(BAR_PARTS, sizes, strict=True):
        bar.append(sign * size, style=style)
    return bar


def _rounds(state: RunState, rows: int, narrow: bool) -> RenderableType:
    table = Table(expand=True, box=None, padding=(0, 1), header_style="dim")
    table.add_column("frag", justify="right", no_wrap=True)
    table.add_column("version", justify="right", no_wrap=True)
    table.add_column("merged", no_wrap=True)
    if not narrow:
        table.add_column("quorum", justify="right", no_wrap=True)
        table.add_column("grace", justify="right", no_wrap=True)
    table.add_column("closed in", justify="right", no_wrap=True)
    table.add_column("late", no_wrap=True, overflow="ellipsis", ratio=1)
    entries = list(state.rounds.recent)[: -rows - 1 : -1]
    for entry in entries:
        closed_ns = entry.close_ns - entry.launch_ns if entry.launch_ns and entry.close_ns else 0
        cells: list[RenderableType] = [str(entry.fragment), str(entry.version), _dots(state, entry)]
        if not narrow:
            cells += [_milliseconds(entry.quorum_wait_ns), _milliseconds(entry.grace_wait_ns)]
        table.add_row(*cells, _milliseconds(closed_ns), Text(", ".join(entry.late), style="yellow"))
    for _ in range(rows - len(entries)):
        table.add_row("")
    title = f"commits {state.rounds.commits:,}" + (f" · aborted {state.rounds.aborted}" if state.rounds.aborted else "")
    return Panel(table, title=title, title_align="left", border_style="bright_black", padding=0)


def _milliseconds(ns: int) -> str:
    return f"{ns / 1e6:,.0f} ms" if ns else "-"


def _dots(state: RunState, entry: RoundSeen) -> Text:
    """● merged, ○ asked but not in time, · not asked; one per learner, in the order of the table."""
    carried = f" +{entry.carried}" if entry.carried else ""
    if len(state.learners) > DOT_LEARNERS_MAX:
        return Text(f"{len(entry.contributors)} of {len(entry.asked)}{carried}")
    dots = Text()
    for learner in state.learners:
        if learner in entry.contributors:
            dots.append("●", style="green")
        elif learner in entry.asked:
            dots.append("○", style="yellow")
        else:
            dots.append("·", style="bright_black")
    dots.append(carried, style="cyan")
    return dots


def _numbers(state: RunState, goodput: Goodput, rows: int) -> RenderableType:
    """The figures, the least important last: what does not fit is left out."""
    ours, theirs, ledger = state.bytes_up + state.bytes_down, state.data_parallel_bytes, state.ledger
    lost = sum(ledger.discarded.values())
    fewer = f"{ratio_text(theirs / ours)} fewer bytes" if theirs and ours else "-"
    figures = [
        ("goodput", Text(percent_text(goodput.share), style="bold green")),
        ("vs data-parallel", Text(fewer, style="bold green")),
        ("sent up", Text(bytes_text(state.bytes_up))),
        ("sent down", Text(bytes_text(state.bytes_down))),
        ("tokens merged", Text(count_text(ledger.merged))),
        ("tokens pending", Text(count_text(ledger.pending))),
        ("tokens lost", Text(count_text(lost), style="yellow" if lost else "dim")),
        ("late, carried on", Text(f"{state.rounds.late:,}")),
        ("rounds open", Text(str(len(state.rounds.open)))),
    ]
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in figures[:rows]:
        table.add_row(name, value)
    for _ in range(rows - len(figures)):
        table.add_row("")
    return Panel(table, title="traffic and tokens", title_align="left", border_style="bright_black", padding=(0, 1))


def _log(state: RunState, rows: int) -> RenderableType:
    lines = list(state.log)[-rows:]
    text = Text(no_wrap=True, overflow="ellipsis")
    for i in range(rows):
        if i:
            text.append("\n")
        if i < len(lines):
            text.append(f"{clock_text(state.elapsed_s(lines[i].t_ns))} ", style="dim")
            text.append(lines[i].text, style=TONE_STYLE[lines[i].tone])
    return Panel(text, title="events", title_align="left", border_style="bright_black", padding=(0, 1))
