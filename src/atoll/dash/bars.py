"""The report's pictures made of rectangles: the lanes of the learners, where the time went, the bytes."""

from __future__ import annotations

from statistics import median

from atoll.core.config import SECOND_NS
from atoll.dash.curves import BOTTOM, RIGHT, drawn, hue, lane_left, shown_seconds, time_axis, to_s
from atoll.dash.svg import Canvas, Scale, ticks
from atoll.dash.text import bytes_text, clock_text, duration_text, percent_text
from atoll.observe.goodput import CATEGORIES, TRACKED, Account
from atoll.observe.summary import SLOW_SHARE, RunState

LANE_PX, LANE_GAP_PX = 34.0, 20.0
LANE_BINS = 240
SPEED_REACH_NS = 2 * SECOND_NS
"""Speed is taken over this long on both sides: a single slow step does not make a learner slow."""
MARKS_DRAWN_MAX = 260
MEANING = {
    "compute": "training",
    "stall": "waiting on Atoll",
    "adopt": "taking over published versions",
    "snapshot": "copying fragments out",
    "overhead": "the rest of Atoll's own work in the loop",
    "evaluate": "testing the published model",
    "recovery": "restarted, not yet training",
    "down": "no process",
    "idle": "up but not stepping",
}

_TOKENS = TRACKED.index("tokens")
_FIRST_CATEGORY = TRACKED.index(CATEGORIES[0])


# ---------------------------------------------------------------- the lanes


def timeline(state: RunState, width: float) -> str:
    """One lane per learner: what it was doing, each contribution as a dot (hollow: late), faults as flags."""
    learners = drawn(state)
    top = 24.0
    height = top + len(learners) * (LANE_PX + LANE_GAP_PX) + BOTTOM - 6
    canvas = Canvas(width, height, "What each learner was doing, its contributions and the faults")
    x = Scale(0, shown_seconds(state), lane_left(width), width - RIGHT)
    for i, learner in enumerate(learners):
        y = top + i * (LANE_PX + LANE_GAP_PX)
        canvas.text(0, y + LANE_PX / 2 + 4, learner, f"strong {hue(state, learner)}")
        _lane(canvas, state, x, (learner, y))
        _marks(canvas, state, x, (learner, y))
        _flags(canvas, state, x, (learner, y))
    time_axis(canvas, x, height - BOTTOM)
    return str(canvas)


def _lane(canvas: Canvas, state: RunState, x: Scale, place: tuple[str, float]) -> None:
    learner, y = place
    account = state.account(learner)
    if account is None:
        return
    for start_s, end_s, shares in _stretches(state, account):
        base = y + LANE_PX
        for name, share in shares:
            tip = f"{learner} {MEANING.get(name, 'training slowly')}, {clock_text(start_s)} to {clock_text(end_s)}"
            base -= share * LANE_PX
            canvas.rect(x(start_s), base, (x(end_s) - x(start_s), share * LANE_PX), f"lane {name}", tip)


def _stretches(state: RunState, account: Account) -> list[tuple[float, float, tuple[tuple[str, float], ...]]]:
    """(start, end, shares): bins of equal time, neighbours that look the same made one."""
    if account.track.start_ns is None:
        return []
    begin_ns = account.track.start_ns
    end_ns = account.finished_ns if account.finished_ns is not None else state.end_ns
    end_ns = min(end_ns, state.end_ns)
    size_ns = (end_ns - begin_ns) / LANE_BINS
    if size_ns <= 0:
        return []
    bins = [account.track.between(begin_ns + i * size_ns, begin_ns + (i + 1) * size_ns) for i in range(LANE_BINS)]
    reach_ns = max(size_ns, SPEED_REACH_NS)
    middles_ns = [begin_ns + (i + 0.5) * size_ns for i in range(LANE_BINS)]
    speeds = [_speed(account.track.between(t_ns - reach_ns, t_ns + reach_ns)) for t_ns in middles_ns]
    usual = median([speed for speed in speeds if speed > 0] or [0.0])
    stretches: list[tuple[float, float, tuple[tuple[str, float], ...]]] = []
    for i, totals in enumerate(bins):
        start_s, end_s = to_s(state, begin_ns + i * size_ns), to_s(state, begin_ns + (i + 1) * size_ns)
        shares = _shares(totals, account, size_ns, slow=speeds[i] < SLOW_SHARE * usual)
        if stretches and stretches[-1][2] == shares:
            stretches[-1] = (stretches[-1][0], end_s, shares)
        else:
            stretches.append((start_s, end_s, shares))
    return stretches


def _training_ns(totals: tuple[float, ...]) -> float:
    spent = dict(zip(CATEGORIES, totals[_FIRST_CATEGORY:], strict=True))
    return spent["compute"] + spent["adopt"] + spent["snapshot"] + spent["overhead"]


def _speed(totals: tuple[float, ...]) -> float:
    """Tokens per nanosecond of training, so that a bin that is only half filled does not look slow."""
    training_ns = _training_ns(totals)
    return totals[_TOKENS] / training_ns if training_ns > 0 else 0.0


def _shares(totals: tuple[float, ...], account: Account, size_ns: float, slow: bool) -> tuple[tuple[str, float], ...]:
    """What a bin shows: down, recovery and the like if that was most of it; else training with its stalls on top, in
    steps of a tenth so that neighbours can be equal."""
    spent = dict(zip(CATEGORIES, totals[_FIRST_CATEGORY:], strict=True))
    # Time that nobody has been charged with yet: the tail of a learner that never came back.
    spent[account.mood] += max(0.0, size_ns - sum(spent.values()))
    trouble = max(("down", "recovery", "evaluate", "idle"), key=lambda name: spent[name])
    if spent[trouble] >= size_ns / 2:
        return ((trouble, 1.0),)
    busy_ns = _training_ns(totals) + spent["stall"]
    stall = round(10 * spent["stall"] / busy_ns) / 10 if busy_ns > 0 else 0.0
    parts = (("slow" if slow else "compute", 1.0 - stall), ("stall", stall))
    return tuple((name, share) for name, share in parts if share > 0)


def _marks(canvas: Canvas, state: RunState, x: Scale, place: tuple[str, float]) -> None:
    learner, y = place
    marks = list(state.rounds.marks.get(learner, ()))
    for late in (False, True):
        shown = [mark for mark in marks if mark.late is late]
        drawn_max = int(MARKS_DRAWN_MAX * min(1.0, canvas.width / 900))
        for mark in shown[:: max(1, -(-len(shown) // drawn_max))]:
            what = "late, carried into the next round" if late else "merged"
            tip = f"{learner} fragment {mark.fragment}: {what}, {clock_text(to_s(state, mark.t_ns))}"
            height = y + LANE_PX * (0.3 if late else 0.62)
            canvas.circle(x(to_s(state, mark.t_ns)), height, 2.6 if late else 1.9, "late" if late else "merged", tip)


def _flags(canvas: Canvas, state: RunState, x: Scale, place: tuple[str, float]) -> None:
    learner, y = place
    for fault in state.faults:
        if fault.target != learner:
            continue
        at = x(max(0.0, to_s(state, fault.start_ns)))
        canvas.path([(at - 4.5, y - 8), (at + 4.5, y - 8), (at, y - 0.5)], "flag", fault.text, close=True)
        word = "killed" if fault.ended_process else fault.name
        if fault.ended_process and fault.end_ns is not None:
            word += f", training again after {duration_text((fault.end_ns - fault.start_ns) / SECOND_NS)}"
        elif fault.detail and canvas.width > 600:
            word += f": {fault.detail}"
        # A flag near the right edge has its words on its left.
        right = at + 8 + 6 * len(word) > x.end_px
        canvas.text(at - 8 if right else at + 8, y - 4, word, "note bad", "end" if right else "start")


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
