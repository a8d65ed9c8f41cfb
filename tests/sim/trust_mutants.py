"""What keeps a liar small, taken out one by one: each must be missed by some seed that has a liar.

As in `sim_mutants`, each is applied by patching, for the length of one test.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pytest import MonkeyPatch
from sim_mutants import Apply, Mutant

from atoll.core import (
    SyncConfig,
    admission,
    contribution_intake,
    hello_intake,
    membership,
    progress_intake,
    round_scheduler,
    sizes,
    spending,
)
from atoll.core.contribution_intake import ContributionIntake
from atoll.core.healing import Healing
from atoll.core.lease_table import StreamTable
from atoll.core.ledger import Ledger
from atoll.core.messages import Refusal
from atoll.core.plausible import PACE_FACTOR
from atoll.core.syncer_driver import SyncerDriver
from atoll.core.syncer_machine import SyncerMachine
from atoll.core.syncer_recovery import SyncerRecovery
from atoll.instruments.sim.drawing import draw
from atoll.instruments.sim.scenario import LearnerSpec, Scenario, SimFault

LASTS_S = 1e6


@dataclass(frozen=True, slots=True)
class Mend:
    """A defect, and the lies that show it."""

    mutant: Mutant
    lies: frozenset[str]
    scenario: Scenario | None = None
    """Where so few seeds show it that none of the first hundreds does: a scenario that does."""

    def seeds(self, count: int) -> Iterator[int]:
        """Of the first so many seeds, those in which one of the lies is told: the others cannot show it."""
        for seed in range(count):
            if any(fault.kind == "lie" and fault.variant in self.lies for fault in draw(seed).faults):
                yield seed


# ---------------------------------------------------------------- who somebody is


def _secrets_unchecked(patch: MonkeyPatch) -> None:
    patch.setattr(admission, "same_secret", lambda given, known: True)
    patch.setattr(SyncerMachine, "of_session", lambda self, session, header: header)


def _ids_unchecked(patch: MonkeyPatch) -> None:
    patch.setattr(hello_intake, "check_learner", lambda identity, learner: None)


def _epoch_believed(patch: MonkeyPatch) -> None:
    patch.setattr(SyncerDriver, "_look_for_newer", lambda self: self.fence("a learner says so"))


# ---------------------------------------------------------------- what it says of itself


def _steps_believed(patch: MonkeyPatch) -> None:
    patch.setattr(progress_intake.ProgressIntake, "_counted", lambda self, member, step, now_ns: step)


def _sizes_believed(patch: MonkeyPatch) -> None:
    patch.setattr(sizes.LearnerSizes, "limit", lambda self, learner, usual: math.inf)
    patch.setattr(ContributionIntake, "_check_counters", lambda self, header, now_ns: None)


def _budget_counts_claims(patch: MonkeyPatch) -> None:
    patch.setattr(Ledger, "spent", property(lambda self: self.processed))


def _budget_by_pace(patch: MonkeyPatch) -> None:
    """What is unasked is as much as the clock believes: sixteen times the others' pace."""
    let_pass = spending.Spending._let_pass

    def quickly(self: Any, spend: Any, now_ns: int, size: float) -> None:
        let_pass(self, spend, now_ns, PACE_FACTOR * size)

    patch.setattr(spending.Spending, "_let_pass", quickly)


def _budget_grows_at_once(patch: MonkeyPatch) -> None:
    """What contributions claim counts, however little there was time for."""
    patch.setattr(spending, "rate_limit", lambda declared, confirmed, usual: math.inf)


def _everybody_counts(patch: MonkeyPatch) -> None:
    """Ids that never answered anything raise the quorum and hold the clock."""
    look = membership.Membership._look

    def all_of_them(self: Any) -> None:
        if self._known_at != self.stamp:
            for member in self.members.values():
                member.proven = True
        look(self)

    patch.setattr(membership.Membership, "_look", all_of_them)
    patch.setattr(round_scheduler.RoundScheduler, "_set_absent_aside", lambda self, opened, now_ns, out: None)


# ---------------------------------------------------------------- what it gives


def _norms_without_limit(patch: MonkeyPatch) -> None:
    """Before the guard knows any norms, anything is taken; and one that is not finite costs everybody theirs."""
    patch.setattr(contribution_intake, "norm_limit_absolute", lambda config, parameters: math.inf)
    patch.setattr(round_scheduler, "crowd_outliers", lambda config, learners, norms, steps: [])

    def drops_all(self: Any, track: Any, opened: Any, items: Any, now_ns: int, out: Any) -> None:
        for item in items:
            self.drop(item, Refusal.NOT_FINITE, out)

    patch.setattr(round_scheduler.RoundScheduler, "_merge_without_worst", drops_all)


def _kept_without_bound(patch: MonkeyPatch) -> None:
    patch.setattr(ContributionIntake, "_check_room", lambda self, header: None)


def _lone_heals_believed(patch: MonkeyPatch) -> None:
    """One learner's word for a version that nobody else has."""
    patch.setattr(Healing, "_is_near", lambda self, fragment, claim: True)
    patch.setattr(SyncerRecovery, "check_values", lambda self, header, distance: None)


def _chunks_believed(patch: MonkeyPatch) -> None:
    def learns(self: Any, chunk: int) -> bool:
        if self.knows(chunk):
            return False
        self.ahead.add(chunk)
        self.changed.add("")
        return True

    patch.setattr(StreamTable, "had", lambda self, learner, chunk: True)
    patch.setattr(StreamTable, "_learn", learns)


def _mend(apply: Apply, breaks: str, within: int, seeds: tuple[int, ...], lies: str, **fields: Any) -> Mend:
    mutant = Mutant(apply.__name__[1:], breaks, apply, within, seeds)
    return Mend(mutant, frozenset(lies.split()), _told(lies, **fields) if fields else None)


def _told(lies: str, amount: float, **settings: Any) -> Scenario:
    """Four learners of which one lies from the beginning on, while another is killed and comes back."""
    learners = tuple(LearnerSpec(step_ns=step_ns) for step_ns in (100_000_000, 110_000_000, 130_000_000, 120_000_000))
    told = [SimFault("lie", "learner-2", 2.0, LASTS_S, amount, variant=name) for name in lies.split()]
    faults = (*told, SimFault("kill", "learner-0", 10.0))
    config = SyncConfig(fragments=2, learners_expected=4, **settings)
    return Scenario(5, config, learners, seconds=30.0, faults=faults, arrays=False, keys=True)


MENDS: tuple[Mend, ...] = (
    _mend(_secrets_unchecked, "a push or fetch needs no secret of its session", 20, (10, 20), "names"),
    _mend(_ids_unchecked, "a key may be any learner's", 20, (10, 16), "ids"),
    _mend(_epoch_believed, "a learner's word of a newer syncer ends this one", 120, (59, 68, 74), "epoch"),
    _mend(_sizes_believed, "tokens weigh as they are claimed", 280, (141,), "tokens"),
    _mend(_everybody_counts, "ids that never answered raise the quorum", 10, (1,), "crowd"),
    _mend(_norms_without_limit, "a first contribution may be of any length", 120, (61,), "extreme"),
    _mend(_kept_without_bound, "any number of one learner's contributions wait for a merge", 10, (0,), "numbers"),
    _mend(_lone_heals_believed, "what one learner alone says it holds is the run's state", 80, (16,), "versions"),
    _mend(_chunks_believed, "data is done when anybody says so", 22, (11, 31), "chunks"),
    _mend(_steps_believed, "the clock goes by claimed steps", 0, (), "counters", amount=1000.0, quorum="1"),
    _mend(
        _budget_counts_claims, "claimed tokens spend the budget", 0, (), "counters", amount=1000.0, tokens_budget=20_000
    ),
    _mend(
        _budget_by_pace, "16 times the pace spends the budget", 0, (), "counters", amount=1000.0, tokens_budget=30_000
    ),
    _mend(_budget_grows_at_once, "merged claims spend it", 0, (), "tokens", amount=1000.0, tokens_budget=60_000),
)
"""What was mended against liars, each taken out. `within` and `seeds` as in `sim_mutants`, of draw 3."""
