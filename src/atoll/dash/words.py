"""Sentences about a run that a stranger understands; the report and the closing summary share them."""

from __future__ import annotations

import math

from atoll.core import Discard
from atoll.dash.text import bytes_text, clock_text, count_text, duration_text, percent_text, ratio_text
from atoll.observe import RUNGS, FaultCost, RunState, source_text

CAUSES: dict[str, str] = {
    Discard.LOST: "lost with a learner that died",
    Discard.OVERWRITTEN: "overwritten by a published version",
    Discard.STALE: "too old to be merged",
    Discard.QUARANTINED: "quarantined",
    Discard.EARLIER_RUN: "merged before a syncer came back without its state",
    Discard.ROLLED_BACK: "merged into versions that were lost with a syncer's disk",
    Discard.UNCERTAIN: "perhaps merged already by a syncer that lost its state",
    Discard.REFUSED: "refused by the syncer",
}
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
"""What a learner's time goes to, in words."""
STATE_WORDS = {"aside": "set aside", "active": "training"}
"""States of a learner as the page calls them, where that differs."""


def fault_headline(state: RunState, cost: FaultCost) -> str:
    """ "learner-2 killed (SIGKILL) at 00:32"."""
    return f"{cost.fault.target} {cost.fault.text}, at {clock_text(state.elapsed_s(cost.fault.start_ns))}"


def fault_own_cost(state: RunState, cost: FaultCost) -> str:
    """What it cost the learner that it hit."""
    fault = cost.fault
    if cost.duration_s <= 0:
        return "an instant, with no measured cost"
    if fault.role == "syncer" and fault.ended_process:
        return _syncer_cost(cost)
    if cost.lost_s <= 0:
        return f"lasted {duration_text(cost.duration_s)}"
    parts = f"cost it {duration_text(cost.lost_s)} of training, about {cost.lost_steps:.0f} steps"
    if fault.ended_process:
        if fault.end_ns is None:
            until = " before the run was stopped" if fault.cut_ns is not None else ""
            return f"it did not come back{until}; {parts}"
        nth = state.nth(fault.target, fault.joined_generation)
        joined = f" at step {fault.joined_step:,} (generation {nth})" if fault.joined_ns else ""
        rung = f", with {RUNGS.get(fault.rung, fault.rung)}" if fault.rung else ""
        return f"training again after {duration_text(cost.duration_s)}{joined}{rung}; {parts}"
    over = "" if fault.end_ns is not None else " so far"
    return f"lasted {duration_text(cost.duration_s)}{over}; {parts}"


def _syncer_cost(cost: FaultCost) -> str:
    fault = cost.fault
    if fault.end_ns is None:
        return f"it did not come back in the {duration_text(cost.duration_s)} that were left"
    source = f", from {source_text(fault.rung)}" if fault.rung else ""
    return f"serving again after {duration_text(cost.duration_s)} (epoch {fault.joined_generation}){source}"


def fault_others_cost(cost: FaultCost) -> str:
    """What it cost the others: the promise is nothing."""
    if not cost.others or not math.isfinite(cost.others_ratio):
        return "no other learner to compare with"
    before = sum(other.steps_s_before for other in cost.others)
    during = sum(other.steps_s_during for other in cost.others)
    who = "the other learner" if len(cost.others) == 1 else f"the {len(cost.others)} others"
    if cost.fault.role == "syncer":
        who = "the learner" if len(cost.others) == 1 else f"the {len(cost.others)} learners"
    speed = f"{who} made {during:.2f} steps/s against {before:.2f} before ({cost.others_ratio:.0%})"
    return f"{speed} and waited {duration_text(cost.others_stall_s)}"


def bytes_sentence(state: RunState) -> str:
    """Our bytes against what data-parallel would have sent."""
    ours, theirs = state.bytes_up + state.bytes_down, state.data_parallel_bytes
    if not ours and theirs and state.method == "dp":
        return f"{bytes_text(theirs)} of gradients by data-parallel (reckoned: a ring all-reduce in bf16 at every step)"
    if not ours:
        return "nothing was sent through a syncer"
    text = f"{bytes_text(ours)} in all ({bytes_text(state.bytes_up)} up, {bytes_text(state.bytes_down)} down)"
    if not theirs:
        return text
    return f"{text}; data-parallel would have sent {bytes_text(theirs)}, {ratio_text(theirs / ours)} as much"


def ledger_sentence(state: RunState) -> str:
    """The fate of every token."""
    ledger = state.ledger
    text = f"{count_text(ledger.processed)} processed = {count_text(ledger.merged)} merged"
    text += f" + {count_text(ledger.pending)} pending"
    lost = sum(ledger.discarded.values())
    text += f" + {count_text(lost)} discarded"
    if lost:
        share = percent_text(lost / max(1, ledger.processed))
        causes = ", ".join(
            f"{count_text(n)} {CAUSES.get(c, c.replace('_', ' '))}" for c, n in ledger.discarded.items() if n
        )
        text += f" ({share}: {causes})"
    return text


def goodput_sentence(state: RunState) -> str:
    goodput = state.goodput()
    seconds = goodput.seconds
    rest = {name: s for name, s in seconds.items() if name != "compute" and s >= 0.05}
    top = sorted(rest.items(), key=lambda item: -item[1])[:3]
    learner_time = duration_text(goodput.allocated_s)
    text = f"{percent_text(goodput.share)} of {learner_time} of learner time made progress that counts"
    if top:
        text += "; the rest: " + ", ".join(f"{name} {duration_text(s)}" for name, s in top)
    return text
