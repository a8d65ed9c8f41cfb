"""The report's pictures made of bars: where the time went, and the bytes."""

from __future__ import annotations

from atoll.dash.curves import BOTTOM, drawn
from atoll.dash.svg import Canvas, Scale, ticks
from atoll.dash.text import bytes_text, duration_text, percent_text
from atoll.observe import CATEGORIES, RunState

MEANING = {
    "compute": "training",
    "stall": "waiting on Atoll",
    "adopt": "taking over published versions",
    "snapshot": "copying fragments and checkpoints out",
    "overhead": "the rest of Atoll's own work in the loop",
    "evaluate": "testing the published model",
    "recovery": "restarted, not yet training",
    "down": "no process",
    "idle": "up but not stepping",
}


# ---------------------------------------------------------------- where the time went


def where_the_time_went(state: RunState, width: float) -> str:
    """Two panels: the whole allocated time, and what was not training, enlarged. Side by side where there is room."""
    learners = state.goodput().learners
    names = [name for name in drawn(state) if name in learners]
    row, left, panel_top = 24.0, 78.0, 26.0
    block = panel_top + row * len(names) + BOTTOM
    wide = width > 600
    canvas = Canvas(width, block if wide else 2 * block + 14, "Where the time of each learner went")
    split = width * 0.5
    rest_of = {name: learners[name].allocated_s - learners[name].seconds["compute"] for name in names}
    whole_end = split - 56 if wide else width - 50
    whole = Scale(0, max([1e-9, *(learners[name].allocated_s for name in names)]), left, whole_end)
    rest_start = split + 16 if wide else left
    rest = Scale(0, max([1e-9, *rest_of.values()]), rest_start, width - (58 if wide else 54))
    shift = 0.0 if wide else block + 14
    canvas.text(left, 12, "all of it", "title")
    canvas.text(rest_start, 12 + shift, "what was not training, enlarged", "title")
    for i, name in enumerate(names):
        y, one = panel_top + i * row, learners[name]
        canvas.text(0, y + 13, name, "strong")
        if not wide:
            canvas.text(0, y + shift + 13, name, "strong")
        _stack(canvas, whole, y, {c: one.seconds[c] for c in CATEGORIES})
        canvas.text(whole(one.allocated_s) + 6, y + 13, percent_text(one.shares["compute"]), "tick")
        _stack(canvas, rest, y + shift, {c: one.seconds[c] for c in CATEGORIES if c != "compute"})
        canvas.text(rest(rest_of[name]) + 6, y + shift + 13, duration_text(rest_of[name]), "tick")
    for scale, down in ((whole, 0.0), (rest, shift)):
        count = max(2, int((scale.end_px - scale.start_px) / 80))
        marks = [(v, f"{v:g}") for v in ticks(0, scale.high, count)]
        canvas.x_axis(scale, panel_top + row * len(names) + down, marks, "seconds")
    return str(canvas)


def _stack(canvas: Canvas, scale: Scale, y: float, seconds: dict[str, float]) -> None:
    at = 0.0
    for name, spent in seconds.items():
        tip = f"{name}, {MEANING[name]}: {duration_text(spent)}"
        canvas.rect(scale(at), y, (scale(at + spent) - scale(at), 17.0), f"bar {name}", tip)
        at += spent


# ---------------------------------------------------------------- bytes


def bytes_sent(state: RunState, width: float) -> str:
    """Bars on one honest linear scale."""
    bars = [
        ("data-parallel", state.data_parallel_bytes, "theirs"),
        ("Atoll, up", state.bytes_up, "up"),
        ("Atoll, down", state.bytes_down, "down-bytes"),
    ]
    bars = [bar for bar in bars if bar[1]]
    bottom = 8 + 34.0 * len(bars)
    canvas = Canvas(width, bottom + 40, "Bytes sent, against data-parallel training")
    top = max([1.0, *(float(count) for _, count, _ in bars)])
    x = Scale(0, top, 92.0, width - 74)
    for i, (name, count, css) in enumerate(bars):
        y = 8 + i * 34.0
        canvas.text(0, y + 15, name, "strong")
        canvas.rect(x(0), y, (max(1.0, x(count) - x(0)), 22.0), css, f"{name}: {count:,} bytes")
        canvas.text(max(x(0) + 1, x(count)) + 6, y + 15, bytes_text(count), "tick")
    marks = [(v, bytes_text(v)) for v in ticks(0, top, max(2, int(width / 130)))]
    canvas.x_axis(x, bottom, marks, "bytes sent by everybody during the run")
    return str(canvas)
