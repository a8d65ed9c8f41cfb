"""Faults drawn from dice: the same dice give the same faults on every machine and in every process.

Only `dice.random()` is used, because it is the one method whose numbers Python promises to keep between versions, and
nothing iterates over a set. The rules, besides the ranges in the table of kinds:

- every wanted kind once before any kind twice, then every form of it (target, variant), then all kinds evenly;
- the run begins (5%) and ends (10%) undisturbed, and what lasts is over at 95%: a report needs a clean start and end;
- at most `down_max` learners are down at one moment, and never all of them: with all down nothing is left to observe;
- nothing that is down is hit by another fault that takes it down, and the syncer has one fault at a time with time to
  recover: a disk that is full and a SIGKILL together may lose commits, which is a fault budget of two;
- at most one learner is poisoned at a time: f of M learners that lie is survivable only for f < M/2.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from atoll.errors import ConfigError
from atoll.instruments.chaos.fault import SECONDS_MAX, Fault
from atoll.instruments.chaos.kinds import DIRECTIONS, DRAWN_KINDS, GUEST_PREFIX, KINDS, SYNCER

T = TypeVar("T")

FAULTS_MAX = 10_000
"""Faults in one plan: a fault every second for almost three hours, and a plan file of about a megabyte."""
FAULTS_PER_MINUTE = 3.0
"""Of a storm: 60 in the 20 minutes of the recorded one."""
BEGIN_SHARE_MIN = 0.05
BEGIN_SHARE_MAX = 0.90
END_SHARE_MAX = 0.95
LASTS_SHARE_MAX = 0.10
"""In a short run faults are shorter than their kind's range: one that takes half of the run shows nothing else."""
REST_S = 10.0
"""Time to start a process, join and be useful again (import of torch, Theta, healing): 5 to 10 s on two cores."""
REST_SHARE_MAX = 0.02
"""In a short run the rest shrinks along: no run shorter than 500 s gives a killed process the full 10 s."""
SYNCER_SHARE = 1 / 3
"""Of kills and freezes after the first of each: the syncer is one process among several, but the critical one."""
TOGETHER_MAX = {"poison": 1, "lie": 1, "join": 2}
"""Faults of one kind at one moment over all learners. Guests share the machine with the run's own learners."""
TRIES_IN_SLOT = 8
TRIES = 64
"""A fault that finds no place in its part of the run is tried anywhere; then another one takes its turn."""


@dataclass(frozen=True, slots=True)
class _Form:
    kind: str
    role: str
    variant: str


def learner_names(learners: int) -> tuple[str, ...]:
    """Ids of a run's own learners: learner-0, learner-1, ..."""
    return tuple(f"learner-{index}" for index in range(learners))


def storm_down_max(learners: int) -> int:
    """Learners of a storm that may be down at one moment: half, which is the default quorum's share."""
    return max(1, learners // 2)


def draw_faults(
    dice: random.Random,
    *,
    learners: Sequence[str],
    seconds: float,
    count: int,
    kinds: Sequence[str] = DRAWN_KINDS,
    down_max: int,
    among: Sequence[Fault] = (),
) -> tuple[Fault, ...]:
    """`count` faults for a run of `seconds`, in order of their beginning.

    There are fewer when the rules leave no place for more. `among` are faults that are planned already (with `at_s`):
    the drawn ones keep the rules together with them, and are returned without them.
    """
    _check(learners, seconds, count, kinds, down_max)
    down_max = min(down_max, len(learners) - 1)
    forms = _forms([kind for kind in KINDS if kind in kinds], down_max)
    board = _Board(seconds, down_max)
    for planned in among:
        board.put(planned)
    drawn: list[Fault] = []
    full: list[_Form] = []
    slots = _shuffled(dice, range(count))
    for turn, form in enumerate(_turns(dice, forms, count)):
        slot = (slots[turn] / count, (slots[turn] + 1) / count)
        for candidate in (form, *_shuffled(dice, forms)):
            if candidate in full:
                continue
            fault = _place(dice, candidate, learners, slot, board)
            if fault is not None:
                board.put(fault)
                drawn.append(fault)
                break
            # The board only gets fuller, so what found no place once is not tried again: this bounds the work.
            full.append(candidate)
    taken = [fault.target for fault in among]
    return _name_guests(sorted(drawn, key=lambda fault: (fault.at_s, fault.kind, fault.target)), taken)


def _check(learners: Sequence[str], seconds: float, count: int, kinds: Sequence[str], down_max: int) -> None:
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        wrong = f"unknown kind of fault {unknown[0]!r}" if unknown else "no kinds of faults to draw from"
        raise ConfigError(f"{wrong}; use some of {', '.join(KINDS)}")
    if not 0 <= count <= FAULTS_MAX:
        raise ConfigError(f"a plan has 0 to {FAULTS_MAX} faults; not {count!r}: draw fewer, or use a shorter run")
    if not 1.0 <= seconds <= SECONDS_MAX:
        raise ConfigError(f"faults are drawn for a run of 1 to {SECONDS_MAX:.0f} seconds; not {seconds!r}")
    if not learners or len(set(learners)) != len(learners) or SYNCER in learners:
        raise ConfigError(f"faults need the ids of the run's learners, each once and none called {SYNCER}")
    if down_max < 0:
        raise ConfigError(f"down_max must be 0 or more; not {down_max!r}")


def _forms(kinds: Sequence[str], down_max: int) -> list[_Form]:
    """Every (kind, what it hits, variant) that this run can have."""
    return [
        _Form(name, role, variant)
        for name in kinds
        for role in KINDS[name].targets
        if down_max > 0 or role != "learner" or not KINDS[name].down
        for variant in KINDS[name].variants[: KINDS[name].variants_drawn] or ("",)
    ]


def _turns(dice: random.Random, forms: list[_Form], count: int) -> list[_Form]:
    """What is to be placed, in order: each kind once, then each form that has not had its turn, then at random."""
    if not forms:
        return []
    by_kind: dict[str, list[_Form]] = {}
    for form in forms:
        by_kind.setdefault(form.kind, []).append(form)
    first = [_pick(dice, of_kind) for of_kind in by_kind.values()]
    rest = [form for form in forms if form not in first]
    turns = _shuffled(dice, first) + _shuffled(dice, rest)
    while len(turns) < count:
        # A shuffled deck of all kinds at a time, so that none is rare by chance.
        turns += [_any_form(dice, of_kind) for of_kind in _shuffled(dice, list(by_kind.values()))]
    return turns[:count]


def _any_form(dice: random.Random, of_kind: list[_Form]) -> _Form:
    on_syncer = [form for form in of_kind if form.role == SYNCER]
    others = [form for form in of_kind if form.role != SYNCER]
    hit_syncer = bool(on_syncer) and (not others or dice.random() < SYNCER_SHARE)
    return _pick(dice, on_syncer if hit_syncer else others)


def _place(
    dice: random.Random, form: _Form, learners: Sequence[str], slot: tuple[float, float], board: _Board
) -> Fault | None:
    kind = KINDS[form.kind]
    seconds = board.seconds
    for attempt in range(TRIES):
        low, high = slot if attempt < TRIES_IN_SLOT else (0.0, 1.0)
        share = BEGIN_SHARE_MIN + (BEGIN_SHARE_MAX - BEGIN_SHARE_MIN) * (low + (high - low) * dice.random())
        at_s = _clamped(round(share * seconds, 3), BEGIN_SHARE_MIN * seconds, BEGIN_SHARE_MAX * seconds)
        lasts_s = 0.0
        if kind.lasts_s:
            longest = min(kind.lasts_s[1], LASTS_SHARE_MAX * seconds)
            lasts_s = _between(dice, min(kind.lasts_s[0], longest / 2), longest)
            lasts_s = math.floor(1000 * min(lasts_s, END_SHARE_MAX * seconds - at_s)) / 1000
        target = SYNCER if form.role == SYNCER else GUEST_PREFIX + "0"
        fault = Fault(
            kind=form.kind,
            target=_pick(dice, learners) if form.role == "learner" else target,
            at_s=at_s,
            lasts_s=lasts_s,
            amount=_clamped(float(f"{_between(dice, *kind.amount):.3g}"), *kind.amount) if kind.amount else 0.0,
            direction=_pick(dice, DIRECTIONS) if kind.directional else "both",
            variant=form.variant,
            detail=kind.doc,
        )
        if board.fits(fault):
            return fault
    return None


@dataclass(order=True, slots=True)
class _Entry:
    at_s: float
    over_s: float = field(compare=False)
    fault: Fault = field(compare=False)


class _Board:
    """What is planned so far, by its beginning, and whether one more fault keeps the rules."""

    def __init__(self, seconds: float, down_max: int) -> None:
        self.seconds = seconds
        self._down_max = down_max
        self._rest_s = min(REST_S, REST_SHARE_MAX * seconds)
        self._entries: list[_Entry] = []
        self._longest_s = 0.0

    def put(self, fault: Fault) -> None:
        entry = self._entry(fault)
        self._longest_s = max(self._longest_s, entry.over_s - entry.at_s)
        insort(self._entries, entry)

    def fits(self, fault: Fault) -> bool:
        new = self._entry(fault)
        meanwhile = self._overlapping(new)
        together = [entry for entry in meanwhile if entry.fault.kind == fault.kind]
        if len(together) >= TOGETHER_MAX.get(fault.kind, len(together) + 1):
            return False
        if fault.kind == "join":
            return True
        same_target = [entry.fault for entry in meanwhile if entry.fault.target == fault.target]
        if any(other.kind == fault.kind or (_exclusive(other) and _exclusive(fault)) for other in same_target):
            return False
        if not KINDS[fault.kind].down or fault.target == SYNCER:
            return True
        down = [e for e in meanwhile if KINDS[e.fault.kind].down and e.fault.target != SYNCER]
        # The number of learners that are down only grows where one goes down, so those moments are enough to look at.
        moments = [new.at_s, *(entry.at_s for entry in down if entry.at_s > new.at_s)]
        return all(
            len({e.fault.target for e in down if e.at_s <= t < e.over_s} | {fault.target}) <= self._down_max
            for t in moments
        )

    def _entry(self, fault: Fault) -> _Entry:
        rests = fault.target == SYNCER or fault.kind in ("kill", "away")
        # Instants have a width too, so that two of them never fall together.
        return _Entry(fault.at_s, fault.end_s + (self._rest_s if rests else 0.001), fault)

    def _overlapping(self, new: _Entry) -> list[_Entry]:
        first = bisect_left(self._entries, new.at_s - self._longest_s, key=lambda entry: entry.at_s)
        last = bisect_left(self._entries, new.over_s, key=lambda entry: entry.at_s)
        return [entry for entry in self._entries[first:last] if entry.over_s > new.at_s]


def _exclusive(fault: Fault) -> bool:
    return KINDS[fault.kind].down or fault.target == SYNCER


def _name_guests(faults: list[Fault], taken: list[str]) -> tuple[Fault, ...]:
    names = (f"{GUEST_PREFIX}{number}" for number in range(len(faults) + len(taken) + 1))
    free = iter([name for name in names if name not in taken])
    return tuple(replace(fault, target=next(free)) if fault.kind == "join" else fault for fault in faults)


def _pick(dice: random.Random, items: Sequence[T]) -> T:
    return items[int(dice.random() * len(items))]


def _shuffled(dice: random.Random, items: Sequence[T]) -> list[T]:
    result = list(items)
    for last in range(len(result) - 1, 0, -1):
        other = int(dice.random() * (last + 1))
        result[last], result[other] = result[other], result[last]
    return result


def _between(dice: random.Random, low: float, high: float) -> float:
    """Evenly on a logarithmic scale: as many between 2 and 4 as between 10 and 20."""
    return float(low * (high / low) ** dice.random())


def _clamped(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
