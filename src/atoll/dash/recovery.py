"""What was lost and what was not, in words: restarts, durability, snapshots, data, and learners that were cut off.

The report and the closing summary share these. Nothing is said about what did not happen.
"""

from __future__ import annotations

import re

from atoll.core import SECOND_NS
from atoll.dash.text import bytes_text, clock_text, count_text, duration_text, percent_text
from atoll.observe import (
    TRACKED,
    DataLedger,
    Lapse,
    LearnerRecovery,
    Return,
    RunState,
    SyncerRestart,
    adapted_text,
    exit_text,
    rung_text,
    source_text,
    thin_text,
)

HEALED_NAMED_MAX = 6
LEVELS = {
    "commit": "every commit is on disk before it is published",
    "interval": "the state is written to disk from time to time",
    "none": "the state is in memory only",
}
RUNGS_OF_MANY = {
    "checkpoint": "their own checkpoints",
    "peer": "the optimizer state of peers",
    "parameters": "the published parameters alone",
}
RESTART_HEAD = ("at", "who", "what happened", "state from", "away for")
ASIDE_HEAD = ("since", "who", "for", "why", "contributions merged all the same")
RETURN_HEAD = (
    "merged at",
    "who",
    "cut off for",
    "steps in one contribution",
    "weight in that commit",
    "an equal share",
)

_STEPS = TRACKED.index("steps")


def happened(state: RunState) -> bool:
    """Whether there is anything to say."""
    return bool(restarts(state) or facts(state) or returns(state))


# ---------------------------------------------------------------- the sentence on top


def lead(state: RunState) -> str:
    """Lost: tokens by cause. Not lost: versions. Only where something happened that could have lost them."""
    parts = []
    discarded, whole = state.ledger.discarded, max(1, state.ledger.processed)
    failed = bool(state.faults or state.syncer.restarts_count or state.comebacks.recoveries)
    with_learners, rolled_back = discarded.get("learner_lost", 0), discarded.get("rolled_back", 0)
    lost = []
    if with_learners:
        lost.append(f"{_tokens(with_learners, whole)} with learners that ended before they could hand them over")
    if rolled_back:
        lost.append(f"{_tokens(rolled_back, whole)} in versions that nobody could bring back")
    if lost:
        parts.append(f"Lost: {', and '.join(lost)}.")
    elif failed and state.stats is not None:
        parts.append("No processed token was lost.")
    exact = [one for one in state.syncer.restarts if one.source and one.exact]
    inexact = [one for one in state.syncer.restarts if one.source and not one.exact]
    if exact:
        whole_run = "" if inexact else "Not lost: any committed version. "
        parts.append(f"{whole_run}The syncer went on from its very last commit {_times(len(exact))}.")
    if inexact:
        parts.append(f"{_times(len(inexact)).capitalize()} it had to go on from an older state; {_healed_text(state)}.")
    return " ".join(parts)


def _tokens(count: int, whole: int) -> str:
    return f"{count_text(count)} tokens ({percent_text(count / whole)})"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _healed_text(state: RunState) -> str:
    count = state.durability.healed_count
    if not count:
        return "no learner had to bring one back"
    return f"learners brought back {count} fragment{'s' if count != 1 else ''}"


# ---------------------------------------------------------------- restarts


def restarts(state: RunState, *, faults: bool = True) -> list[tuple[str, ...]]:
    """A row for each restart and each learner that joined with a state, in order of time; as in RESTART_HEAD. Without
    `faults` those are left out that follow a process that failed: what that cost is said elsewhere."""
    rows = [(one.down_ns, _syncer_row(state, one)) for one in state.syncer.restarts if faults or not one.exit_code]
    groups: dict[tuple[str, int], list[LearnerRecovery]] = {}
    for one in state.comebacks.recoveries:
        if one.exit_code and not faults:
            continue
        if one.resumed:
            # Everybody comes back at once when a run is resumed: one row for all with the same rung.
            groups.setdefault((one.rung, _launch(state, one.t_ns)), []).append(one)
        else:
            rows.append((one.t_ns - one.away_ns, _learner_row(state, one)))
    rows += [(group[0].t_ns, _resumed_row(state, group)) for group in groups.values()]
    return [row for _, row in sorted(rows, key=lambda item: item[0])]


def _launch(state: RunState, t_ns: int) -> int:
    return sum(1 for pause in state.pauses if pause.start_ns <= t_ns)


def _at(state: RunState, t_ns: int) -> str:
    return clock_text(state.elapsed_s(t_ns))


def _syncer_row(state: RunState, one: SyncerRestart) -> tuple[str, ...]:
    what = "run resumed" if one.resumed else "ended; nobody saw how"
    if one.exit_code is not None:
        what = exit_text(one.exit_code) if one.exit_code else "stopped in order"
    source = "nothing: its state was in memory only"
    if one.source:
        source = f"{source_text(one.source)}, read in {duration_text(one.load_ns / SECOND_NS)}"
        source += "" if one.exact else "; newer versions came from learners, if they held any"
    away = duration_text(one.away_ns / SECOND_NS) if one.away_ns else "-"
    return _at(state, one.down_ns), f"syncer, epoch {one.epoch}", what, source, away


def _learner_row(state: RunState, one: LearnerRecovery) -> tuple[str, ...]:
    number = state.nth(one.learner, one.generation)
    joined = "joined" if number <= 1 else "started again"
    what = joined if one.exit_code is None else exit_text(one.exit_code) if one.exit_code else "left in order"
    away = duration_text(one.away_ns / SECOND_NS) if one.away_ns else "-"
    who, detail = f"{one.learner}, generation {number}", state.in_words(one.learner, one.detail)
    return _at(state, one.t_ns - one.away_ns), who, what, rung_text(one.rung, detail), away


def _resumed_row(state: RunState, group: list[LearnerRecovery]) -> tuple[str, ...]:
    who = group[0].learner if len(group) == 1 else f"{len(group)} learners"
    text = rung_text(group[0].rung, state.in_words(group[0].learner, group[0].detail))
    if len(group) > 1:
        text = RUNGS_OF_MANY.get(group[0].rung, group[0].rung)
    return _at(state, group[0].t_ns), who, "run resumed", text, "-"


# ---------------------------------------------------------------- facts


def facts(state: RunState) -> list[tuple[str, str]]:
    """(name, sentence) for all that was measured and happened."""
    found = [
        ("run", _stops(state)),
        ("syncer", _absences(state)),
        ("healed", _healed(state)),
        ("durability", _durability(state)),
        *(("degraded", _lapse(state, lapse)) for lapse in state.durability.lapses),
        ("snapshots", _snapshots(state)),
        ("checkpoints", _checkpoints(state)),
        *(("data", data_sentence(ledger)) for ledger in state.durability.data.values()),
    ]
    return [(name, text) for name, text in found if text]


def problems(state: RunState) -> list[str]:
    """What syncers found damaged or missing, and why snapshots failed."""
    found = [(one.t_ns, text) for one in state.syncer.restarts for text in one.problems]
    found += [(t_ns, f"snapshot failed: {text}") for t_ns, text in state.durability.snapshot_failures]
    return [f"{_at(state, t_ns)} {text}" for t_ns, text in sorted(found)]


def _stops(state: RunState) -> str:
    over = [(p.end_ns - p.start_ns) / SECOND_NS for p in state.pauses if p.end_ns is not None]
    if not over:
        return ""
    return (
        f"stopped and resumed {_times(len(over))}; the {duration_text(sum(over))} from last to first step are in no "
        "figure here"
    )


def _absences(state: RunState) -> str:
    times = state.syncer.away_times(state.end_ns)
    if not times:
        return ""
    accounts = [account for name in state.learners if (account := state.account(name)) is not None]
    steps = sum(account.track.between(a, b)[_STEPS] for a, b in times for account in accounts)
    longest = max(b - a for a, b in times) / SECOND_NS
    most = f", at most {duration_text(longest)} at a time" if len(times) > 1 else ""
    return (
        f"gone {_times(len(times))} while the run went on, {duration_text(state.syncer_away_s)} in all{most}; "
        f"learners made {steps:,.0f} steps meanwhile"
    )


def _healed(state: RunState) -> str:
    healed, count = state.durability.healed, state.durability.healed_count
    if not count:
        return ""
    named = [
        f"fragment {e.fragment} from version {e.version_before} to {e.version} by {e.learner}"
        for _, e in healed[:HEALED_NAMED_MAX]
    ]
    more = f", and {count - len(named)} more" if count > len(named) else ""
    return f"{', '.join(named)}{more}; the momentum of these is the older one of the disk"


def _durability(state: RunState) -> str:
    book = state.durability
    if book.wanted in ("", "none") and not book.commits.count:
        return ""
    text = f"level {book.wanted}: {LEVELS.get(book.wanted, '')}".rstrip(": ")
    cost = book.commits
    if cost.count:
        text += (
            f". {cost.count:,} of {state.rounds.commits:,} commits were written: {bytes_text(cost.bytes_mean)} and "
            f"{cost.ns_mean / 1e6:.1f} ms each on average, {cost.ns_max / 1e6:.1f} ms at most, "
            f"{bytes_text(cost.bytes)} in all"
        )
    return text


def _lapse(state: RunState, lapse: Lapse) -> str:
    end_ns = lapse.end_ns if lapse.end_ns is not None else state.end_ns
    for_s = max(0.0, state.elapsed_s(end_ns) - state.elapsed_s(lapse.start_ns))
    over = "" if lapse.end_ns is not None else ", and it did not come back"
    level = "" if lapse.level == "degraded" else f"level {lapse.level} "
    return f"{level}from {_at(state, lapse.start_ns)} for {duration_text(for_s)}{over}: {lapse.reason}"


def _snapshots(state: RunState) -> str:
    book, last = state.durability, state.durability.last_snapshot
    parts = []
    if last is not None:
        parts.append(
            f"{book.snapshots.count} written to {shown_url(last.url)}, the newest ({last.label}) with "
            f"{bytes_text(last.bytes)} in {duration_text(last.write_ns / SECOND_NS)}"
        )
    if book.snapshots_failed:
        parts.append(f"{book.snapshots_failed} failed")
    return "; ".join(parts)


def _checkpoints(state: RunState) -> str:
    costs = state.comebacks.checkpoints
    count = sum(cost.count for cost in costs.values())
    if not count:
        return ""
    size = sum(cost.bytes for cost in costs.values()) / count
    paid_ns = sum(cost.ns for cost in costs.values())
    return (
        f"{count:,} by {len(costs)} learner{'s' if len(costs) != 1 else ''}, {bytes_text(size)} each; copying one out "
        f"held training up for {paid_ns / count / 1e6:.1f} ms, {duration_text(paid_ns / SECOND_NS)} in all, which the "
        "goodput counts as snapshot"
    )


def data_sentence(ledger: DataLedger) -> str:
    """ "train: 729 of 5,000 chunks issued = 713 done + 10 in hand + 6 leased ahead and handed back; ..."."""
    of = f" of {ledger.chunks:,}" if ledger.chunks else ""
    text = f"{ledger.stream}: {ledger.issued:,}{of} chunks issued = {ledger.done:,} done + {ledger.in_hand:,} in hand"
    if ledger.pool > ledger.lost:
        text += f" + {ledger.pool - ledger.lost:,} leased ahead and handed back"
    if ledger.lost:
        text += f" + {ledger.lost:,} lost with a learner, to be issued again"
    if ledger.reissued:
        text += f"; {ledger.reissued:,} issued again after a loss"
    if ledger.repeated:
        text += f"; {ledger.repeated:,} finished by two learners"
    return text


def shown_url(url: str) -> str:
    """Without a password, should somebody have put one in."""
    return re.sub(r"//[^/@]*@", "//", url)


# ---------------------------------------------------------------- learners that rounds did not wait for


def asides(state: RunState) -> list[tuple[str, ...]]:
    """A row for each time that rounds went on without an active learner; as in ASIDE_HEAD."""
    rows: list[tuple[str, ...]] = []
    for one in state.notices.spells:
        end_ns = one.end_ns if one.end_ns is not None else max(state.end_ns, one.start_ns)
        for_s = max(0.0, state.elapsed_s(end_ns) - state.elapsed_s(one.start_ns))
        lasts = duration_text(for_s) + ("" if one.end_ns is not None else ", to the end")
        rows.append((_at(state, one.start_ns), one.learner, lasts, one.reason, f"{one.merged:,}"))
    return rows


def thin_links(state: RunState) -> list[str]:
    """What each link that was too thin needed and got, by the last word on it."""
    return [f"{learner}: {thin_text(event)}" for (learner, _), event in sorted(state.notices.thin_ever.items())]


def adapted(state: RunState) -> list[str]:
    """Every decision about what is sent, with when it was taken and why."""
    return [f"{_at(state, t_ns)} {adapted_text(event)}" for t_ns, event in state.notices.adapted]


def warnings(state: RunState) -> list[str]:
    """Every warning once, with when it was first given and how often."""
    return [
        f"{_at(state, one.t_ns)} {one.source}: {one.text}{f' ({one.count} times)' if one.count > 1 else ''}"
        for one in state.notices.warnings
    ]


# ---------------------------------------------------------------- learners that were cut off


def returns(state: RunState) -> list[tuple[str, ...]]:
    """A row for each learner that lost its link and is in a commit again, and one for all that missed the same syncer;
    as in RETURN_HEAD."""
    merged = [one for one in state.comebacks.returns if one.commit_ns]
    rows = [(one.commit_ns, _return_row(state, one)) for one in merged if not state.missed_syncer(one)]
    groups: dict[int, list[Return]] = {}
    for one in merged:
        if state.missed_syncer(one):
            until_ns = [restart.t_ns for restart in state.syncer.restarts if restart.t_ns <= one.up_ns]
            groups.setdefault(max(until_ns, default=0), []).append(one)
    rows += [(group[0].commit_ns, _group_row(state, group)) for group in groups.values()]
    return [row for _, row in sorted(rows, key=lambda item: item[0])]


def _return_row(state: RunState, one: Return) -> tuple[str, ...]:
    away = duration_text((one.up_ns - one.down_ns) / SECOND_NS)
    share = f"{1 / max(1, one.contributors):.2f}"
    return _at(state, one.commit_ns), one.learner, away, f"{one.steps:,}", f"{one.weight:.2f}", share


def _group_row(state: RunState, group: list[Return]) -> tuple[str, ...]:
    if len(group) == 1:
        return _return_row(state, group[0])
    steps, weights = [one.steps for one in group], [one.weight for one in group]
    away = duration_text(max(one.up_ns - one.down_ns for one in group) / SECOND_NS)
    share = f"{1 / max(1, *(one.contributors for one in group)):.2f}"
    return (
        _at(state, group[0].commit_ns),
        f"{len(group)} learners, without a syncer",
        away,
        _range(f"{min(steps):,}", f"{max(steps):,}"),
        _range(f"{min(weights):.2f}", f"{max(weights):.2f}"),
        share,
    )


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"
