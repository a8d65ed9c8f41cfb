"""The lines of the live view about the syncer and the data: one each, and loud when something is wrong."""

from __future__ import annotations

from rich.text import Text

from atoll.core import SECOND_NS
from atoll.dash.text import duration_text
from atoll.observe import RunState, source_text

LOUD = "bold white on red"
SIGN = {"up": ("●", "green"), "down": ("✗", "bold red"), "silent": ("◌", "bold yellow"), "stopped": ("○", "dim")}


def syncer_state(state: RunState, now_ns: int) -> str:
    """As the book says; a run that is over has nothing to be loud about."""
    return "" if state.finished is not None else state.syncer_state(now_ns)


def syncer_line(state: RunState, now_ns: int) -> Text | None:
    """Whether it serves, what it went on from, and what is on disk; None for a run without one, and after the end."""
    book, word = state.syncer, syncer_state(state, now_ns)
    if not word:
        return None
    sign, style = SIGN[word]
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{sign} syncer ", style=style)
    if word == "down":
        away_s = max(0, now_ns - (book.down_ns or now_ns)) / SECOND_NS
        line.append(f"down for {duration_text(away_s)}, learners train on", style="bold red")
    elif word == "silent":
        silent_s = (now_ns - book.last_sign_ns) / SECOND_NS
        line.append(f"silent for {duration_text(silent_s)}, links are down, learners train on", style="bold yellow")
    else:
        line.append(f"epoch {book.epoch}" if word == "up" else "stopped")
    durability = state.durability
    if durability.lapse is not None:
        line.append(" ")
        line.append(f" DURABILITY {durability.level.upper()}: {durability.lapse.reason} ", style=LOUD)
    if word == "up" and book.recovery is not None:
        line.append(f" · recovered from {source_text(book.recovery.source)}")
        if not book.recovery.exact:
            line.append(f" · {durability.healed_count} fragments healed", style="yellow")
    _append_kept(line, state)
    return line


def _append_kept(line: Text, state: RunState) -> None:
    book = state.durability
    if book.lapse is None and book.level not in ("", "none"):
        line.append(f" · durable: {book.level}", style="dim")
    if book.snapshots.count or book.snapshots_failed:
        count = book.snapshots.count
        line.append(f" · {count} snapshot{'s' if count != 1 else ''}", style="dim")
    if book.snapshots_failed:
        line.append(f", {book.snapshots_failed} failed", style="bold yellow")


def waiting_line(state: RunState) -> Text | None:
    """Said while the first round waits for learners that have not joined."""
    if not state.waits_for or state.finished is not None:
        return None
    text = f"waits for learners: {state.joined} of {state.waits_for} joined"
    return Text(text, style="bold yellow", no_wrap=True, overflow="ellipsis")


def data_line(state: RunState) -> Text | None:
    """The chunks of the data streams, added up; None where data is not leased."""
    ledgers = list(state.durability.data.values())
    if not ledgers:
        return None
    names = ledgers[0].stream if len(ledgers) == 1 else f"{len(ledgers)} streams"
    chunks = sum(ledger.chunks for ledger in ledgers) if all(ledger.chunks for ledger in ledgers) else 0
    line = Text(no_wrap=True, overflow="ellipsis", style="dim")
    line.append(f"data {names}: {sum(ledger.done for ledger in ledgers):,}")
    line.append(f" of {chunks:,} chunks done" if chunks else " chunks done")
    line.append(f", {sum(ledger.in_hand for ledger in ledgers):,} in hand")
    lost = sum(ledger.lost for ledger in ledgers)
    back = sum(ledger.pool for ledger in ledgers) - lost
    if back:
        line.append(f", {back:,} handed back")
    if lost:
        line.append(f", {lost:,} to be issued again", style="yellow")
    reissued, repeated = sum(e.reissued for e in ledgers), sum(e.repeated for e in ledgers)
    if reissued:
        line.append(f", {reissued:,} re-issued")
    if repeated:
        line.append(f", {repeated:,} done twice", style="yellow")
    return line
