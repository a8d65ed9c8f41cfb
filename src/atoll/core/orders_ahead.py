"""What a learner of several processes does at its next step boundary, fixed one boundary ahead.

All processes of an island must copy and adopt the same things between the same two steps. So the one that speaks says
at each boundary what will be done at the next, the word travels while everybody trains, and then exactly that is done:

    boundary n      fix()        these versions, these fragments; told to all processes
    boundary n + 1  carry_out()  that, with the counters of now

What would take an ordered version away meanwhile (a re-seed, another run, news of a contribution) waits until the
orders are carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.core.config import parse_adopt
from atoll.core.contribution_maker import ContributionMaker
from atoll.core.effects import Adopt, FromSyncer, LearnerEffect, LearnerInput, LinkDown, NotFinite, PushDone
from atoll.core.learner_state import LearnerState
from atoll.core.messages import NO_VERSION, Fate, Reseed, Start, Welcome
from atoll.core.progress import FragmentProgress
from atoll.core.version_follower import VersionFollower


@dataclass(frozen=True, slots=True)
class BoundaryOrders:
    """In this order."""

    given: tuple[int, ...] = ()
    """Fragments that are copied before anything is adopted, and contributed at once."""
    adopts: tuple[Adopt, ...] = ()
    takes: tuple[int, ...] = ()
    """Fragments that are copied afterwards, for whoever asks."""

    def __bool__(self) -> bool:
        return bool(self.given or self.adopts or self.takes)


class OrdersAhead:
    """Ranks compute at their own pace. What one did a step earlier than another would be another model."""

    def __init__(self, state: LearnerState, contributions: ContributionMaker, versions: VersionFollower) -> None:
        self._state = state
        self._contributions = contributions
        self._versions = versions
        self._fixed = BoundaryOrders()
        self._held_back: list[LearnerInput] = []

    # ------------------------------------------------------------ fixing

    def wanted(self, *, standing: bool) -> list[Adopt]:
        """What could be adopted next, one version of each fragment; `standing`: without a step before it."""
        incomplete = self._versions.reseed_incomplete()
        found = []
        for progress in self._state.fragments:
            if progress.reseed and incomplete:
                continue
            version = progress.prepared[0] if progress.prepared else progress.base
            late = not progress.prepared and self._rebases and bool(progress.merged_in(progress.base))
            if progress.prepared or late:
                found.append(self._versions.plan_adopt(progress.index, version, ahead=not standing))
        return found

    @property
    def _rebases(self) -> bool:
        return parse_adopt(self._state.config.adopt)[0] == "rebase"

    def fix(self, ready: Callable[[Adopt], bool], *, standing: bool) -> BoundaryOrders:
        """`ready` says of an adopt whether every process has its values where they are needed."""
        fragments = self._state.fragments
        wanted = self.wanted(standing=standing)
        adopts = {adopt.fragment: adopt for adopt in wanted if ready(adopt)}
        if any(p.reseed and p.index not in adopts for p in fragments):  # a re-seed is adopted at one boundary, whole
            adopts = {index: adopt for index, adopt in adopts.items() if not fragments[index].reseed}
        given = self._given(adopts)
        takes = () if self._state.closing is not None else self._takes(adopts, given, standing)
        self._fixed = BoundaryOrders(given, tuple(adopts.values()), takes)
        return self._fixed

    def _given(self, adopts: dict[int, Adopt]) -> tuple[int, ...]:
        if self._state.closing is not None:
            flushed = self._contributions.flushable()
            return tuple(p.index for p in flushed if p.index not in adopts)
        return tuple(p.index for p in self._contributions.overwritten_next() if p.index in adopts)

    def _takes(self, adopts: dict[int, Adopt], given: tuple[int, ...], standing: bool) -> tuple[int, ...]:
        if not self._state.joined:
            return ()
        wanted = self._contributions.wanted()
        chosen = [p for p in self._state.fragments if p.index in wanted or self._contributions.is_asked(p)]
        return tuple(
            p.index for p in chosen if p.index not in given and self._will_give(p, adopts.get(p.index), standing)
        )

    def _will_give(self, progress: FragmentProgress, adopt: Adopt | None, standing: bool) -> bool:
        """Whether a copy will be of use: `may_contribute`, as it will be then."""
        outstanding, prepared = len(progress.outstanding), len(progress.prepared)
        if adopt is not None:
            outstanding -= len(progress.merged_in(adopt.version))
            prepared -= adopt.version != progress.base
        elif progress.reseed or progress.base == NO_VERSION:
            return False
        if outstanding or prepared:
            return False
        if adopt is not None and adopt.rule == "overwrite":
            return False  # there will be nothing to give
        return not standing or (progress.local.steps > 0 and progress.snapshot != progress.local)

    # ------------------------------------------------------------ carrying out

    def carry_out(self, out: list[LearnerEffect], *, stepped: bool) -> None:
        """Exactly what was fixed. Every process does the same."""
        orders, self._fixed = self._fixed, BoundaryOrders()
        if stepped and self._state.config.synchronous:
            # What was copied before this step is no answer to what will be asked: it is copied again, standing here.
            for progress in self._state.fragments:
                self._contributions.drop_snapshot(progress, out)
        for fragment in orders.given:
            self._contributions.give_now(self._state.fragments[fragment], out)
        self._versions.adopt_ordered(orders.adopts, out)
        self._contributions.take_ordered(orders.takes, out)

    def holds_back(self, event: LearnerInput) -> bool:
        """Whether this must wait until the orders are carried out; if so, it does."""
        if isinstance(event, LinkDown):  # what was said in that session is said again in the next
            self._held_back = [held for held in self._held_back if not isinstance(held, FromSyncer)]
            return False
        if not self._must_wait(event):
            return False
        self._held_back.append(event)
        return True

    def _must_wait(self, event: LearnerInput) -> bool:
        if isinstance(event, FromSyncer) and any(isinstance(held, FromSyncer) for held in self._held_back):
            return True  # in their order
        if not self._fixed.adopts and not self._fixed.given:
            return False
        if isinstance(event, FromSyncer):
            return isinstance(event.message, Welcome | Start | Fate | Reseed)
        return isinstance(event, NotFinite) or (isinstance(event, PushDone) and not event.reply.accepted)

    def released(self) -> list[LearnerInput]:
        """What was held back, in its order."""
        held, self._held_back = self._held_back, []
        return held
