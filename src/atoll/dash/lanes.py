"""The report's lanes: what each learner was doing and when it contributed, with the syncer's absences above them."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from atoll.core import SECOND_NS
from atoll.dash.bars import MEANING
from atoll.dash.curves import BOTTOM, RIGHT, drawn, hue, lane_left, pause_marks, shown_seconds, time_axis, to_s
from atoll.dash.svg import Canvas, Scale
from atoll.dash.text import clock_text, duration_text
from atoll.observe import CATEGORIES, SLOW_SHARE, TRACKED, ObservedFault, RunState, TimeAccount

LANE_PX, LANE_GAP_PX = 34.0, 20.0
SYNCER_LANE_PX = 12.0
LANE_BINS = 240
SPEED_REACH_S = 2.0
"""Speed is taken over this long on both sides: a single slow step does not make a learner slow."""
MARKS_DRAWN_MAX = 260

_TOKENS = TRACKED.index("tokens")
_FIRST_CATEGORY = TRACKED.index(CATEGORIES[0])


def syncer_troubled(state: RunState) -> bool:
    """Whether the syncer has a lane of its own: it was away, or could not write."""
    return bool(state.syncer.away_times(state.end_ns) or state.durability.lapses)


def timeline(state: RunState, width: float) -> str:
    """One lane per learner: what it was doing, each contribution as a dot (hollow: late), faults as flags. A thin lane
    on top shows when there was no syncer, or one that could not write."""
    learners = drawn(state)
    top = 24.0 + (SYNCER_LANE_PX + LANE_GAP_PX + 6 if syncer_troubled(state) else 0.0)
    height = top + len(learners) * (LANE_PX + LANE_GAP_PX) + BOTTOM - 6
    canvas = Canvas(width, height, "What each learner was doing, its contributions and the faults")
    x = Scale(0, shown_seconds(state), lane_left(width), width - RIGHT)
    pause_marks(canvas, state, x, (22.0, height - BOTTOM))
    if syncer_troubled(state):
        _syncer_lane(canvas, state, x, (24.0, height - BOTTOM - 8))
    for i, learner in enumerate(learners):
        y = top + i * (LANE_PX + LANE_GAP_PX)
        canvas.text(0, y + LANE_PX / 2 + 4, learner, f"strong {hue(state, learner)}")
        _lane(canvas, state, x, (learner, y))
        _marks(canvas, state, x, (learner, y))
        _cuts(canvas, state, x, (learner, y))
        _flags(canvas, state, x, (learner, y))
    time_axis(canvas, x, height - BOTTOM)
    return str(canvas)


def _syncer_lane(canvas: Canvas, state: RunState, x: Scale, y: tuple[float, float]) -> None:
    """Up, away, or up and not able to write; a pale band through all lanes for as long as it was away."""
    top, bottom = y
    size = SYNCER_LANE_PX
    canvas.text(0, top + size / 2 + 4, "syncer", "strong")
    canvas.rect(x(0), top, (x(x.high) - x(0), size), "lane serving", "the syncer serves")
    free_px = x.start_px
    for lapse in state.durability.lapses:
        start_s, end_s = to_s(state, lapse.start_ns), to_s(state, lapse.end_ns or state.end_ns)
        tip = f"durability {lapse.level}, {clock_text(start_s)} to {clock_text(end_s)}: {lapse.reason}"
        canvas.rect(x(start_s), top, (max(1.5, x(end_s) - x(start_s)), size), "degraded", tip)
    for start_ns, end_ns in state.syncer.away_times(state.end_ns):
        start_s, end_s = max(0.0, to_s(state, start_ns)), to_s(state, end_ns)
        away = duration_text(end_s - start_s)
        tip = f"no syncer for {away}, {clock_text(start_s)} to {clock_text(end_s)}"
        wide_px = max(1.5, x(end_s) - x(start_s))
        canvas.rect(x(start_s), top + size, (wide_px, bottom - top - size), "fault", tip)
        canvas.rect(x(start_s), top, (wide_px, size), "down", tip)
        free_px = _flag(canvas, x, (x(start_s), top), (f"no syncer for {away}", tip), free_px)


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


def _stretches(state: RunState, account: TimeAccount) -> list[tuple[float, float, tuple[tuple[str, float], ...]]]:
    """(start, end, shares): bins of equal time, neighbours that look the same made one. Where the slot was given back
    there is none."""
    if account.track.start_ns is None:
        return []
    begin_s = to_s(state, account.track.start_ns)
    size_s = (to_s(state, state.end_ns) - begin_s) / LANE_BINS
    if size_s <= 0:
        return []
    edges_s = [begin_s + i * size_s for i in range(LANE_BINS + 1)]
    edges_ns = [state.moment_ns(edge_s) for edge_s in edges_s]
    bins = [account.track.between(a, b) for a, b in pairwise(edges_ns)]
    reach_s = max(size_s, SPEED_REACH_S)
    speeds = [
        _speed(
            account.track.between(state.moment_ns(s + size_s / 2 - reach_s), state.moment_ns(s + size_s / 2 + reach_s))
        )
        for s in edges_s[:-1]
    ]
    usual = median([speed for speed in speeds if speed > 0] or [0.0])
    gaps_s = _gaps_s(state, account)
    stretches: list[tuple[float, float, tuple[tuple[str, float], ...]]] = []
    for i, totals in enumerate(bins):
        start_s, end_s = edges_s[i], edges_s[i + 1]
        gone_s = sum(max(0.0, min(end_s, b) - max(start_s, a)) for a, b in gaps_s)
        if gone_s > size_s / 2:
            continue
        here_ns = (size_s - gone_s) * SECOND_NS
        shares = _shares(totals, account, here_ns, slow=speeds[i] < SLOW_SHARE * usual)
        if stretches and stretches[-1][2] == shares and stretches[-1][1] == start_s:
            stretches[-1] = (stretches[-1][0], end_s, shares)
        else:
            stretches.append((start_s, end_s, shares))
    return stretches


def _gaps_s(state: RunState, account: TimeAccount) -> list[tuple[float, float]]:
    """When the learner had given its slot back, on the clock of the report."""
    gaps_ns = list(account.gaps)
    if account.absent_ns is not None:
        gaps_ns.append((account.absent_ns, max(state.last_ns, account.absent_ns)))
    return [(to_s(state, a), to_s(state, b)) for a, b in gaps_ns]


def _training_ns(totals: tuple[float, ...]) -> float:
    spent = dict(zip(CATEGORIES, totals[_FIRST_CATEGORY:], strict=True))
    return spent["compute"] + spent["adopt"] + spent["snapshot"] + spent["overhead"]


def _speed(totals: tuple[float, ...]) -> float:
    """Tokens per nanosecond of training, so that a bin that is only half filled does not look slow."""
    training_ns = _training_ns(totals)
    return totals[_TOKENS] / training_ns if training_ns > 0 else 0.0


def _shares(
    totals: tuple[float, ...], account: TimeAccount, size_ns: float, slow: bool
) -> tuple[tuple[str, float], ...]:
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


def _cuts(canvas: Canvas, state: RunState, x: Scale, place: tuple[str, float]) -> None:
    """A strip under the lane for as long as the learner had no link."""
    learner, y = place
    for name, start_ns, end_ns in state.comebacks.cut_off(state.end_ns):
        if name == learner:
            start_s, end_s = max(0.0, to_s(state, start_ns)), min(x.high, to_s(state, end_ns))
            tip = f"{learner} without a link, {clock_text(start_s)} to {clock_text(end_s)}"
            canvas.rect(x(start_s), y + LANE_PX - 4, (max(1.5, x(end_s) - x(start_s)), 4.0), "cut", tip)


def _flags(canvas: Canvas, state: RunState, x: Scale, place: tuple[str, float]) -> None:
    learner, y = place
    free_px = x.start_px
    for fault in state.faults:
        if fault.target == learner:
            at = x(max(0.0, to_s(state, fault.start_ns)))
            free_px = _flag(canvas, x, (at, y), (_flag_words(state, fault, canvas.width > 600), fault.text), free_px)


def _flag_words(state: RunState, fault: ObservedFault, roomy: bool) -> str:
    word = "killed" if fault.ended_process else fault.name
    if fault.ended_process and fault.end_ns is not None:
        away_s = to_s(state, fault.end_ns) - to_s(state, fault.start_ns)
        rung = f" ({fault.rung})" if fault.rung and roomy else ""
        return f"{word}, training again after {duration_text(away_s)}{rung}"
    return f"{word}: {fault.detail}" if fault.detail and roomy else word


def _flag(canvas: Canvas, x: Scale, at: tuple[float, float], words: tuple[str, str], free_px: float) -> float:
    """A flag with its words, if they do not run into those of the flag before, which end at `free_px`."""
    px, y = at
    text, tip = words
    canvas.path([(px - 4.5, y - 8), (px + 4.5, y - 8), (px, y - 0.5)], "flag", tip, close=True)
    # A flag near the right edge has its words on its left.
    wide_px = 5.6 * len(text)
    right = px + 8 + wide_px > x.end_px
    begin_px = px - 8 - wide_px if right else px + 8
    if begin_px < free_px:
        return free_px
    canvas.text(px - 8 if right else px + 8, y - 4, text, "note bad", "end" if right else "start")
    return max(px + 5, begin_px + wide_px + 8)
