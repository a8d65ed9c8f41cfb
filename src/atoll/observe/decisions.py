"""What the run decided by itself, and why: the newest decisions of its policies, each with its reason."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from atoll.observe import events

DECISIONS_KEPT = 200
"""As many as somebody scrolls through; all are in the events."""


@dataclass(frozen=True, slots=True)
class SeenDecision:
    t_ns: int
    what: str
    why: str


class DecisionBook:
    """`closed` counts why rounds were closed: that is decided too often to be listed."""

    def __init__(self) -> None:
        self.newest: deque[SeenDecision] = deque(maxlen=DECISIONS_KEPT)
        self.closed: Counter[str] = Counter()

    def apply(self, t_ns: int, event: events.Event) -> None:
        match event:
            case events.RoundClosed():
                self.closed[event.reason] += 1
            case events.RoundsFolded():
                self.closed.update(event.closed)
            case events.MemberAside(learner, _, aside, reason):
                what = "rounds do not wait for" if aside else "rounds count again on"
                self._add(t_ns, f"{what} {learner}", reason)
            case events.PaceChanged(fragment, _, period, reason):
                self._add(t_ns, f"fragment {fragment}: a round every {period} steps", reason)
            case events.RoundAborted(round, _, fragment, _, _, reason):
                self._add(t_ns, f"round {round} of fragment {fragment} is launched again", reason)
            case events.ContributionRefused(fragment, learner, _, _, _, code, detail):
                self._add(
                    t_ns, f"{learner}: fragment {fragment} is not merged", f"{code}: {detail}" if detail else code
                )
            case events.NormGuardReset(fragment, refused):
                self._add(
                    t_ns, f"fragment {fragment}: the norm guard begins anew", f"{refused} refused from most learners"
                )
            case events.DurabilityChanged(level, wanted, reason):
                self._add(t_ns, f"durability is {level}" + (f", not {wanted}" if level != wanted else ""), reason)
            case events.MemberChanged(learner, _, state, reason) if state in ("away", "lost"):
                self._add(t_ns, f"{learner} counts as {state}", reason)
            case _:
                pass

    def _add(self, t_ns: int, what: str, why: str) -> None:
        self.newest.append(SeenDecision(t_ns, what, why))
