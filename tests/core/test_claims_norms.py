"""A contribution that is far too long harms nobody but its learner: before norms are known, and in a merge."""

from __future__ import annotations

import math

import pytest
from world import World, config

from atoll.core import effects as fx
from atoll.core.config import SyncConfig
from atoll.core.events import ContributionRefused
from atoll.core.messages import Reseed
from atoll.core.policy import CROWD_AHEAD_MAX, NORM_PERIODS_MAX, crowd_outliers, norm_limit, norm_limit_absolute


def lying(world: World, name: str, norm: float) -> None:
    """What this learner pushes has another norm than it should."""
    real = world.complete_push
    world.complete_push = lambda h, v, n=1.0, finite=True: real(h, v, norm if h.learner == name else n, finite)  # type: ignore[method-assign]


def merged_of(world: World, name: str) -> int:
    return sum(identity.learner == name for identity in world.merged_ids)


def codes(world: World, name: str) -> set[str]:
    return {event.code for event in world.noted(ContributionRefused) if event.learner == name}


def test_an_absurd_norm_is_refused_from_the_first_contribution_on() -> None:
    world = World(config(quorum="1"), 2)
    lying(world, "l1", 1e30)
    world.join_all()
    world.everyone_steps(20)
    assert merged_of(world, "l0") > 3 and not merged_of(world, "l1")
    assert codes(world, "l1") == {"norm_outlier"}
    world.check_ledger()


def test_before_norms_are_known_the_others_in_a_merge_judge() -> None:
    """A hundred times the others' way is not absurd by itself."""
    world = World(config(quorum="all", learners_expected=4), 4)
    lying(world, "l3", 100.0)
    world.join_all()
    world.everyone_steps(4)
    assert len(world.merges) >= 4 and not merged_of(world, "l3")
    assert codes(world, "l3") == {"norm_outlier"} and not codes(world, "l0")
    assert any(isinstance(said, fx.ToLearner) and isinstance(said.message, Reseed) for said in world.driver.said)
    world.check_ledger()


def far(settings: SyncConfig, norms: list[float], steps: list[int], learners: str = "") -> list[int]:
    return crowd_outliers(settings, list(learners) or [str(number) for number in range(len(norms))], norms, steps)


def test_who_is_ahead_in_a_warm_up_may_have_gone_further() -> None:
    settings = SyncConfig(sync_every=8)
    assert far(settings, [0.01, 0.01, 0.36], [1, 1, 8]) == []
    assert far(settings, [0.01, 0.01, 0.36], [1, 1, 1]) == [2]
    most = 10 * CROWD_AHEAD_MAX**2
    assert far(settings, [1.0, 1.0, 1.0, most, most + 1], [1, 1, 1, 10**9, 10**9]) == [4]
    assert far(settings, [1.0, 1e9], [8, 8]) == [], "two cannot say which of them is wrong"
    assert far(settings, [0.0, 0.0, 1.0], [8, 8, 8]) == [], "nobody else has moved at all"
    assert far(settings, [2.9, 0.03, 0.0], [8, 1, 8]) == [], "one has just begun, and one lies low"
    assert far(settings, [2.9, 0.03, 1e-9], [8, 1, 8]) == []
    assert far(settings, [1.0] * 200 + [11.0], [8] * 201) == [200]
    assert far(settings, [1e-9] * 4 + [1.0, 1.0], [8] * 6, "aaaabc") == [], "copies of a lie are one learner's"
    assert far(settings, [1.0, 1.0, 11.0, 0.5], [8] * 4, "abcc") == [2], "and a short one beside it hides nothing"


def test_a_claim_of_many_steps_does_not_lift_the_limit_without_end() -> None:
    settings = SyncConfig(sync_every=8)
    assert norm_limit(settings, [1.0] * 20, 2**60) == 10 * NORM_PERIODS_MAX
    assert norm_limit_absolute(settings, 256) == 1000 * 16


def test_one_learner_cannot_raise_the_limit_by_repeating_itself() -> None:
    world = World(config(quorum="1"), 2)
    world.join_all()
    world.everyone_steps(60)
    lying(world, "l1", 200.0)
    for _ in range(60):
        world.everyone_steps(1)
    before = merged_of(world, "l1")
    world.everyone_steps(40)
    assert merged_of(world, "l1") == before and max(world.syncer.book.tracks[0].norms) == 1.0


@pytest.mark.parametrize("bad", ["l0", "l2"])
def test_a_merge_that_is_not_finite_drops_the_culprit_and_merges_the_rest(bad: str) -> None:
    world = World(config(quorum="all", learners_expected=3, fragments=1), 3)
    host = world.driver._host
    merge = host.merge  # type: ignore[attr-defined]

    def overflows(effect: fx.Merge, payloads: list[float], done: object) -> None:
        if any(identity.learner == bad for identity in effect.contributions):
            world.queue.append(lambda: done(fx.MergeFinished(effect.fragment, finite=False)))  # type: ignore[operator]
        else:
            merge(effect, payloads, done)

    host.merge = overflows  # type: ignore[attr-defined,method-assign]
    lying(world, bad, 9.0)  # below what the others in the merge would object to
    world.join_all()
    world.everyone_steps(16)
    assert len(world.merges) >= 3 and not merged_of(world, bad)
    assert all(len(merge.contributions) == 2 and math.isclose(sum(merge.weights), 1.0) for merge in world.merges)
    assert codes(world, bad) == {"not_finite"}
    world.check_ledger()


def test_a_merge_of_which_nothing_is_finite_ends_and_the_run_goes_on() -> None:
    world = World(config(quorum="all", learners_expected=2, fragments=1), 2)
    host = world.driver._host
    merge = host.merge  # type: ignore[attr-defined]
    broken = [3]

    def overflows(effect: fx.Merge, payloads: list[float], done: object) -> None:
        if broken[0]:
            broken[0] -= 1
            world.queue.append(lambda: done(fx.MergeFinished(effect.fragment, finite=False)))  # type: ignore[operator]
        else:
            merge(effect, payloads, done)

    host.merge = overflows  # type: ignore[attr-defined,method-assign]
    world.join_all()
    world.everyone_steps(24)
    assert len(world.merges) >= 2 and not world.driver.held
    world.check_ledger()


@pytest.mark.parametrize("lost", [{"l1"}, {"l0", "l1"}])
def test_what_a_relay_has_lost_is_given_again_and_the_rest_is_merged(lost: set[str]) -> None:
    world = World(config(quorum="all", learners_expected=2, fragments=1), 2)
    host = world.driver._host
    merge = host.merge  # type: ignore[attr-defined]
    broken = [2]

    def without(effect: fx.Merge, payloads: list[float], done: object) -> None:
        gone = tuple(identity for identity in effect.contributions if identity.learner in lost)
        if broken[0] and gone:
            broken[0] -= 1
            answer = fx.MergeFinished(effect.fragment, finite=False, lost=gone)
            world.queue.append(lambda: done(answer))  # type: ignore[operator]
        else:
            merge(effect, payloads, done)

    host.merge = without  # type: ignore[attr-defined,method-assign]
    world.join_all()
    world.everyone_steps(40)
    assert not broken[0] and not world.driver.held
    assert all(codes(world, name) == {"relay_gone"} for name in lost)
    books = world.syncer.ledger.fragment_totals(0)  # what was lost came again, in a later contribution
    assert books.merged >= 0.8 * books.processed and not sum(books.discarded.values())
    world.check_ledger()
