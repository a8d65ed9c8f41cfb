"""Carries a plan out on real processes: when each fault begins and ends. How is in `injector`.

It is told the run's progress and the time at every tick and owns no thread or clock. A fault that cannot be put in at
its moment, because its process is down, is tried again at every tick for a while; what is left out in the end is said,
with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.instruments.chaos.fault import Fault
from atoll.instruments.chaos.injector import Injector, Links, ProcessControl
from atoll.instruments.chaos.kinds import KINDS
from atoll.observe import FaultEnded, FaultInjected, FaultSkipped, InjectedFault

__all__ = ["ChaosExecutor", "InjectedFault", "Links", "ProcessControl"]

PATIENCE_NS = 60 * 10**9
"""How long a fault is tried: a learner that was killed is back within some 10 s, after several deaths within 40 s."""


@dataclass(slots=True)
class _Due:
    """A fault that has not begun."""

    fault: Fault
    since_ns: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Lasting:
    fault: Fault
    begun_ns: int

    def over(self, progress: float, now_ns: int) -> bool:
        if self.fault.until_progress:
            return progress >= self.fault.until_progress
        return now_ns - self.begun_ns >= self.fault.lasts_s * 1e9


class ChaosExecutor:
    """Each fault begins once, at its second since the first step or when the run's progress reaches it, and lasting
    ones end after their time or when progress passes their end."""

    def __init__(
        self,
        plan: Sequence[Fault],
        control: ProcessControl,
        *,
        emit: Callable[[FaultInjected | FaultEnded | FaultSkipped], None],
        links: Links | None = None,
        duty_cycle: bool = False,
    ) -> None:
        """`links` is where the learners' traffic can be touched; None where they talk to the syncer directly.
        `duty_cycle`: the learners do not heed a slow file, so that `slow` has to stop and continue them."""
        self._waiting = [_Due(fault) for fault in sorted(plan, key=lambda fault: (fault.at_progress, fault.at_s))]
        self._lasting: list[_Lasting] = []
        self._injector = Injector(control, links=links, duty_cycle=duty_cycle)
        self._emit = emit
        self._start_ns = 0
        self.injected: list[InjectedFault] = []
        self.skipped: list[FaultSkipped] = []

    def tick(self, progress: float, now_ns: int, *, begun: bool | None = None) -> None:
        """Begin and end what is due. `progress` is the share of tokens processed, `now_ns` the wall clock, `begun`
        whether any step was made (where there is no budget to have a share of)."""
        if not self._start_ns and (progress > 0.0 if begun is None else begun):
            self._start_ns = now_ns
        self._injector.tick(now_ns)
        for lasting in [one for one in self._lasting if one.over(progress, now_ns)]:
            self._end(lasting)
        for due in [one for one in self._waiting if self._is_due(one.fault, progress, now_ns)]:
            due.since_ns = due.since_ns or now_ns
            due.reason = self._injector.begin(due.fault)
            if not due.reason:
                self._begun(due.fault, progress, now_ns)
            elif now_ns - due.since_ns > PATIENCE_NS:
                self._skip(due.fault, due.reason)
            else:
                continue
            self._waiting.remove(due)

    def finish(self) -> None:
        """End the lasting faults, and say which were never put in."""
        for due in self._waiting:
            self._skip(due.fault, due.reason or "the run ended before its moment")
        self._waiting.clear()
        for lasting in list(self._lasting):
            self._end(lasting, last=True)
        self._injector.release()

    def _is_due(self, fault: Fault, progress: float, now_ns: int) -> bool:
        if fault.at_progress >= 0.0:
            return progress >= fault.at_progress
        return bool(self._start_ns) and now_ns - self._start_ns >= fault.at_s * 1e9

    def _begun(self, fault: Fault, progress: float, now_ns: int) -> None:
        elapsed_ns = now_ns - self._start_ns
        detail = describe(fault)
        self.injected.append(InjectedFault(fault.kind, fault.target, elapsed_ns / 1e9, detail))
        until_ns = 0
        if KINDS[fault.kind].lasting:
            self._lasting.append(_Lasting(fault, now_ns))
            until_ns = _planned_end_ns(fault, progress=progress, elapsed_ns=elapsed_ns, now_ns=now_ns)
        self._emit(
            FaultInjected(
                fault=fault.kind,
                target=fault.target,
                detail=detail,
                until_ns=until_ns,
                lasts_s=fault.lasts_s,
                amount=fault.amount,
                direction=fault.direction,
                variant=fault.variant,
            )
        )

    def _end(self, lasting: _Lasting, *, last: bool = False) -> None:
        # With the run, learners that are away or guests end anyway: nobody is to be started or asked any more.
        if (last and lasting.fault.kind in ("away", "join")) or self._injector.end(lasting.fault) or last:
            self._lasting.remove(lasting)
            self._emit(FaultEnded(lasting.fault.kind, lasting.fault.target))

    def _skip(self, fault: Fault, reason: str) -> None:
        self.skipped.append(FaultSkipped(fault.kind, fault.target, reason))
        self._emit(self.skipped[-1])


def describe(fault: Fault) -> str:
    """What a reader of the run's log should know: the plan's own words, else how strong it is, else what it does."""
    own = fault.detail if fault.detail != KINDS[fault.kind].doc else ""
    hit = f"rank {fault.rank}" if fault.rank >= 0 else ""
    return ": ".join(part for part in (hit, own or strength_text(fault) or fault.detail) if part)


def strength_text(fault: Fault) -> str:
    """How strong a fault is and where it hits, in words; empty for kinds that have nothing to choose."""
    kind = KINDS[fault.kind]
    amount = f"{fault.amount:,.0f}" if fault.amount >= 100.0 else f"{fault.amount:.3g}"
    parts = [f"{amount} {kind.amount_unit}" if kind.amount else "", fault.variant]
    if kind.directional:
        parts.append({"both": "both ways", "up": "learner to syncer", "down": "syncer to learner"}[fault.direction])
    return ", ".join(part for part in parts if part)


def _planned_end_ns(fault: Fault, *, progress: float, elapsed_ns: int, now_ns: int) -> int:
    """The end of a lasting fault: after its time, or if the run goes on at its mean pace so far."""
    if fault.lasts_s:
        return now_ns + int(fault.lasts_s * 1e9)
    return now_ns + int(elapsed_ns * max(0.0, fault.until_progress - progress) / max(progress, 1e-9))
