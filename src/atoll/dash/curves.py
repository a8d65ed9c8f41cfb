"""The report's curves: loss over tokens and over time, tokens per second, contributors per commit, rho."""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.core import SECOND_NS
from atoll.dash.svg import CHAR_PX, Canvas, Points, Scale, clock_ticks, thin, ticks
from atoll.dash.text import clock_text, count_text, duration_text, loss_text
from atoll.observe import TRACKED, RunState

HUES = 8
"""Learners beyond this share colours with earlier ones; they are told apart by their labels."""
PANELS_MAX = 16
PANEL_GAP_PX = 13.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 26.0, 40.0
TRAIN_POINTS_MAX = 300
GAP_SHARE = 0.04
"""A curve is cut where it has no point for this share of the axis."""
SETTLED_SHARE = 0.03
"""The loss axis begins with what was reached after this share of the run."""
RATE_BINS = 150
COMMITS_DRAWN_MAX = 240

_TOKENS = TRACKED.index("tokens")


def hue(state: RunState, learner: str) -> str:
    """The style class of a learner's colour."""
    return f"l{list(state.learners).index(learner) % HUES}"


def drawn(state: RunState) -> list[str]:
    """The learners that get a lane of their own: at most PANELS_MAX, those with a fault first of all."""
    hit = {fault.target for fault in state.faults}
    chosen = set(sorted(state.learners, key=lambda learner: learner not in hit)[:PANELS_MAX])
    return [learner for learner in state.learners if learner in chosen]


def run_seconds(state: RunState) -> float:
    return max(1e-3, state.elapsed_s(state.end_ns))


def shown_seconds(state: RunState) -> float:
    """The length of the time axes: the last rounds and the last test may come after the last step."""
    last_ns = max([0, *(entry.commit_ns for entry in state.rounds.recent)])
    if state.last_evaluation is not None:
        last_ns = max(last_ns, state.last_evaluation.t_ns)
    return max(run_seconds(state), to_s(state, last_ns))


def lane_left(width: float) -> float:
    """Where lanes and panels begin: the same in both, so that they can be compared down the page."""
    return 104.0 if width > 600 else 94.0


def to_s(state: RunState, t_ns: float) -> float:
    """On the clock of the report: since the first step, without the times in which the run was stopped."""
    return state.elapsed_s(t_ns)


def pause_marks(canvas: Canvas, state: RunState, x: Scale, y: tuple[float, float]) -> None:
    """A dashed line where the run was stopped and resumed: the time between is cut out."""
    for pause in state.pauses:
        if pause.end_ns is not None:
            at = x(to_s(state, pause.start_ns))
            away = duration_text((pause.end_ns - pause.start_ns) / SECOND_NS)
            canvas.line(at, y[0], at, y[1], "zero", f"the run was stopped for {away} and resumed")


def time_axis(canvas: Canvas, scale: Scale, y: float, title: str = "time since the first step (min:s)") -> None:
    count = max(3, int((scale.end_px - scale.start_px) / 70))
    marks = [(s, clock_text(s)) for s in clock_ticks(scale.high, count)]
    canvas.x_axis(scale, y, marks, title if scale.high < 3600 else title.replace("min:s", "h:min:s"))


def fault_bands(canvas: Canvas, state: RunState, x: Scale, y: tuple[float, float]) -> None:
    """A pale band for as long as each fault lasted, with its name above where there is room."""
    pause_marks(canvas, state, x, y)
    free_px = [-math.inf, -math.inf]  # where the next label may begin: above the picture, else in its first line
    for fault in state.faults:
        left = x(max(0.0, to_s(state, fault.start_ns)))
        right = x(min(x.high, to_s(state, fault.end_by(state.end_ns))))
        word = "killed" if fault.ended_process else fault.name
        tip = f"{fault.target} {fault.text}, {clock_text(to_s(state, fault.start_ns))}"
        canvas.rect(left, y[0], (max(1.5, right - left), y[1] - y[0]), "fault", tip)
        label = f"{fault.target} {word}"
        start = min(left, x.end_px - len(label) * CHAR_PX)
        for row, free in enumerate(free_px):
            if start > free:
                canvas.text(start, y[0] - 4 + 15 * row, label, "note")
                free_px[row] = start + len(label) * CHAR_PX
                break


# ---------------------------------------------------------------- loss


def loss_over_tokens(state: RunState, width: float, height: float) -> str:
    evals = [(float(e.tokens), e.loss) for e in state.evaluations]
    if state.finished is not None and math.isfinite(state.finished.eval_loss):
        evals.append((float(state.tokens), state.finished.eval_loss))
    trains = {learner: one.loss_by_tokens.points for learner, one in state.learners.items()}
    canvas = Canvas(width, height, "Loss over tokens processed")
    x = Scale(0, max([1.0, state.tokens, *(t for t, _ in evals)]), LEFT, width - RIGHT)
    _loss(canvas, state, (x, evals, trains))
    marks = [(v, count_text(v)) for v in ticks(0, x.high, int(width / 90))]
    canvas.x_axis(x, height - BOTTOM, marks, "tokens processed by all learners")
    return str(canvas)


def loss_over_time(state: RunState, width: float, height: float) -> str:
    evals = [(to_s(state, e.t_ns), e.loss) for e in state.evaluations]
    if state.finished is not None and math.isfinite(state.finished.eval_loss):
        evals.append((shown_seconds(state), state.finished.eval_loss))
    trains = {
        learner: [(to_s(state, t), loss) for t, loss in one.loss_by_time.points]
        for learner, one in state.learners.items()
    }
    canvas = Canvas(width, height, "Loss over time, faults marked")
    x = Scale(0, shown_seconds(state), LEFT, width - RIGHT)
    fault_bands(canvas, state, x, (TOP, height - BOTTOM))
    _loss(canvas, state, (x, evals, trains), title="")
    time_axis(canvas, x, height - BOTTOM)
    return str(canvas)


def _loss(
    canvas: Canvas,
    state: RunState,
    data: tuple[Scale, list[tuple[float, float]], dict[str, list[tuple[float, float]]]],
    title: str = "loss (nats per token)",
) -> None:
    x, evals, trains = data
    low, high = _loss_range(state)
    y = Scale(low, high, canvas.height - BOTTOM, TOP)
    canvas.y_axis(y, (LEFT, canvas.width - RIGHT), [(v, f"{v:g}") for v in _rounded(ticks(low, high, 5))], title)
    css = "train many" if len(trains) > HUES else "train"
    for learner, points in trains.items():
        for piece in _pieces(thin(points, TRAIN_POINTS_MAX), GAP_SHARE * (x.high - x.low)):
            shown = [(x(a), y(b)) for a, b in _below(piece, high)]
            canvas.path(shown, f"{css} {hue(state, learner)}", f"{learner}: training loss")
    canvas.path([(x(a), y(b)) for a, b in _below(evals, high)], "eval")
    for a, b in _below(thin(evals, 60), high):
        canvas.circle(x(a), y(b), 2.6, "eval-dot", f"published model: {loss_text(b)}")
    if evals:
        last = evals[-1]
        canvas.text(canvas.width - RIGHT, y(last[1]) + 18, f"published model {loss_text(last[1])}", "strong", "end")
    if any(trains.values()):
        _train_label(canvas, (x, y, high), next(points for points in trains.values() if points))


def _train_label(canvas: Canvas, scales: tuple[Scale, Scale, float], points: Points) -> None:
    """Written once, above the faint curves at about a third of the way: they need no legend of their own."""
    x, y, high = scales
    near = [b for a, b in points if 0.25 <= (a - x.low) / (x.high - x.low or 1) <= 0.75]
    if near:
        at = x.low + 0.36 * (x.high - x.low)
        canvas.text(x(at), y(min(high, max(near))) - 8, "training loss of each learner (faint)", "note")


def _loss_range(state: RunState) -> tuple[float, float]:
    """From the lowest loss up to what was reached after the first few percent of the tokens: the fall from the random
    start would press flat what people want to see. What is above is cut off. The same for both pictures of the loss."""
    points = [(float(e.tokens), e.loss) for e in state.evaluations if math.isfinite(e.loss)]
    for one in state.learners.values():
        points += one.loss_by_tokens.points
    if not points:
        return 0.0, 1.0
    settled = [loss for tokens, loss in points if tokens >= SETTLED_SHARE * state.tokens]
    low, high = min(settled), max(settled)
    pad = max(0.06 * (high - low), 1e-3 * max(1.0, abs(high)), 1e-6)
    return low - 2 * pad, high + pad


def _pieces(points: Points, gap: float) -> list[list[tuple[float, float]]]:
    """The curve cut where nothing was reported for long: a line across the time that a learner was down would lie."""
    pieces: list[list[tuple[float, float]]] = []
    for point in points:
        if pieces and point[0] - pieces[-1][-1][0] <= gap:
            pieces[-1].append(point)
        else:
            pieces.append([point])
    return pieces


def _below(points: Points, high: float) -> list[tuple[float, float]]:
    return [(a, b) for a, b in points if b <= high]


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{v:.6g}") for v in values]


# ---------------------------------------------------------------- tokens per second


def tokens_per_second(state: RunState, width: float, panel_height: float = 58.0) -> str:
    """One panel per learner on a common scale, so that a fault in one can be looked for in the others."""
    learners = [one for one in drawn(state) if _rate_points(state, one)]
    height = TOP + len(learners) * (panel_height + PANEL_GAP_PX) + BOTTOM
    canvas = Canvas(width, height, "Tokens per second of each learner over time")
    left = lane_left(width)
    x = Scale(0, shown_seconds(state), left, width - RIGHT)
    rates = {learner: _rate_points(state, learner) for learner in learners}
    top_rate = 1.08 * max([1.0, *(rate for points in rates.values() for _, rate in points)])
    pause_marks(canvas, state, x, (TOP, height - BOTTOM))
    for i, learner in enumerate(learners):
        top = TOP + i * (panel_height + PANEL_GAP_PX)
        y = Scale(0, top_rate, top + panel_height, top)
        _fault_shades(canvas, state, x, (learner, top, panel_height))
        marks = [(v, count_text(v)) for v in ticks(0, top_rate, 3)]
        canvas.y_axis(y, (left, width - RIGHT), marks, "tokens per second" if i == 0 else "")
        canvas.text(0, top + panel_height / 2 + 4, learner, f"strong {hue(state, learner)}")
        line = [(x(t), y(rate)) for t, rate in rates[learner]]
        canvas.path([(line[0][0], y(0)), *line, (line[-1][0], y(0))], f"area {hue(state, learner)}", close=True)
        canvas.path(
            line, f"rate {hue(state, learner)}", f"{learner}: {count_text(max(r for _, r in rates[learner]))}/s"
        )
    time_axis(canvas, x, height - BOTTOM)
    return str(canvas)


def _fault_shades(canvas: Canvas, state: RunState, x: Scale, panel: tuple[str, float, float]) -> None:
    """Dark behind the learner that was hit, pale behind the others."""
    learner, top, panel_height = panel
    for fault in state.faults:
        left = x(max(0.0, to_s(state, fault.start_ns)))
        right = x(min(x.high, to_s(state, fault.end_by(state.end_ns))))
        mine = fault.target == learner
        css = "fault mine" if mine else "fault"
        canvas.rect(left, top, (max(1.5, right - left), panel_height), css, f"{fault.target} {fault.text}")
        if mine:
            word = "killed" if fault.ended_process else fault.name
            canvas.text(min(left + 4, x.end_px - 40), top + 11, word, "note")


def _rate_points(state: RunState, learner: str) -> list[tuple[float, float]]:
    """Tokens per second in bins of equal time; a bin is never shorter than a second, which would only show noise."""
    account = state.account(learner)
    if account is None or account.track.start_ns is None or account.track.end_ns is None or account.tokens == 0:
        return []
    begin_s, end_s = to_s(state, account.track.start_ns), to_s(state, min(account.track.end_ns, state.end_ns))
    bins = max(2, min(RATE_BINS, int(end_s - begin_s)))
    size_s = (end_s - begin_s) / bins
    if size_s <= 0:
        return []
    points = []
    for i in range(bins):
        start_s = begin_s + i * size_s
        tokens = account.track.between(state.moment_ns(start_s), state.moment_ns(start_s + size_s))[_TOKENS]
        points.append((start_s + size_s / 2, tokens / size_s))
    return points


# ---------------------------------------------------------------- rounds


def contributors_per_commit(state: RunState, width: float, height: float) -> str:
    canvas = Canvas(width, height, "Contributors per commit over time")
    x = Scale(0, shown_seconds(state), LEFT, width - RIGHT)
    top = max(1, len(state.learners))
    y = Scale(0, 1.12 * top + 0.25, height - BOTTOM, TOP)
    fault_bands(canvas, state, x, (TOP, height - BOTTOM))
    marks = [(v, f"{v:g}") for v in ticks(0, top, min(top, 5)) if v == int(v)]
    canvas.y_axis(y, (LEFT, width - RIGHT), marks, "")
    rounds = list(state.rounds.sample)
    for entry in rounds[:: max(1, math.ceil(len(rounds) / COMMITS_DRAWN_MAX))]:
        count, at_s = len(set(entry.contributors)), to_s(state, entry.commit_ns)
        late = f"; not in time: {', '.join(entry.late)}" if entry.late else ""
        tip = f"fragment {entry.fragment} version {entry.version}: {', '.join(entry.contributors)}{late}"
        full = count >= len(entry.asked) and count > 0
        canvas.circle(x(at_s), y(count), 2.4, "commit" if full else "commit partial", tip)
    time_axis(canvas, x, height - BOTTOM)
    return str(canvas)


def rho_over_time(state: RunState, width: float, height: float) -> str:
    canvas = Canvas(width, height, "Cosine between successive merged gradients")
    points = [(to_s(state, t), rho) for t, rho in state.rounds.rho.points]
    x = Scale(0, shown_seconds(state), LEFT, width - RIGHT)
    low = min([0.0, *(rho for _, rho in points)])
    high = max([0.1, *(rho for _, rho in points)])
    y = Scale(low - 0.03, high + 0.03, height - BOTTOM, TOP)
    canvas.y_axis(y, (LEFT, width - RIGHT), [(v, f"{v:g}") for v in _rounded(ticks(y.low, y.high, 5))], "")
    canvas.line(LEFT, y(0), width - RIGHT, y(0), "zero")
    pause_marks(canvas, state, x, (TOP, height - BOTTOM))
    for t, rho in thin(points, COMMITS_DRAWN_MAX):
        canvas.circle(x(t), y(rho), 1.8, "rho-dot", f"{rho:.3f}")
    canvas.path([(x(t), y(rho)) for t, rho in thin(points, 24)], "rho")
    time_axis(canvas, x, height - BOTTOM)
    return str(canvas)
