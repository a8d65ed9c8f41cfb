"""What one learner alone says it holds after a restart is believed as far as it loses nothing honest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from world import FakeLearner, World, checksum_of, config

from atoll.core import effects as fx
from atoll.core.config import SyncConfig
from atoll.core.events import ContributionRefused, FragmentHealed
from atoll.core.healing import (
    HEAL_PUSH_NS,
    HEAL_WAIT_NS,
    LONE_PUSH_NS,
    LONE_VERSIONS_MAX,
    Healing,
    VersionClaim,
)
from atoll.core.messages import Refusal
from atoll.core.policy import heal_limit


def asked(healing: Healing, now_ns: int = HEAL_WAIT_NS) -> dict[str, list[tuple[int, VersionClaim]]]:
    return healing.ask(now_ns)


def healing(*, disk: int = 50, tape: VersionClaim | None = None, **holds: tuple[int, int]) -> Healing:
    made = Healing([disk], {0: tape} if tape is not None else {}, set())
    for learner, (version, checksum) in holds.items():
        made.hear(learner, (version,), (checksum,), 0)
    return made


def test_a_lone_absurd_version_never_wins() -> None:
    assert asked(healing(liar=(2**40, 7), a=(52, 1), b=(52, 1))) == {"a": [(0, VersionClaim(52, 1))]}
    assert asked(healing(liar=(2**40, 7), a=(50, 1))) == {}
    assert asked(healing(liar=(2**40, 7))) == {}, "not even where nobody else is"
    assert healing(liar=(2**61, 7), disk=-1).best(0) is None


def test_another_checksum_for_what_two_others_hold_never_wins() -> None:
    assert asked(healing(a=(52, 9), b=(52, 9), liar=(52, 1))) == {"a": [(0, VersionClaim(52, 9))]}


def test_what_is_on_the_tape_needs_no_second_holder() -> None:
    tape = VersionClaim(5000, 9)
    assert asked(healing(a=(5000, 9), b=(50, 1), tape=tape)) == {"a": [(0, tape)]}
    assert not healing(a=(5000, 9), tape=tape).is_lone(0, tape)


def test_a_lone_honest_holder_brings_the_newest_version_back() -> None:
    assert asked(healing(a=(53, 1), b=(52, 2), c=(51, 2))) == {"a": [(0, VersionClaim(53, 1))]}
    assert asked(healing(disk=2, a=(90, 1), b=(80, 2)))["a"], "the disk is old, and another learner is near"
    assert asked(healing(disk=2, a=(9000, 1)))["a"], "the disk is old, and nobody else is left"
    assert not asked(healing(disk=2, a=(9000, 1), b=(2, 5)))
    assert not asked(healing(disk=52, a=(55, 1), b=(52, 2), c=(51, 2))), "two others are far behind it"
    most = 52 + LONE_VERSIONS_MAX
    assert asked(healing(liar=(most, 1), b=(52, 2)))["liar"] and "liar" not in asked(
        healing(liar=(most + 1, 1), b=(52, 2))
    )


def test_one_that_claims_and_does_not_deliver_holds_the_run_up_once() -> None:
    made = healing(liar=(53, 7), a=(52, 1), b=(51, 1))
    assert asked(made) == {"liar": [(0, VersionClaim(53, 7))]}
    assert made.next_wake_ns() == HEAL_WAIT_NS + LONE_PUSH_NS
    assert asked(made, HEAL_WAIT_NS + LONE_PUSH_NS) == {"a": [(0, VersionClaim(52, 1))]}
    made.hear("liar", (54,), (8,), HEAL_WAIT_NS + LONE_PUSH_NS)
    made.take(0, "a")
    made.done(0, 52)
    assert made.over(HEAL_WAIT_NS + LONE_PUSH_NS) and made.best(0) is None


def test_what_nobody_else_could_replace_is_waited_for_longer() -> None:
    made = healing(a=(53, 7), b=(52, 1))
    assert asked(made)["a"]
    assert made.next_wake_ns() == HEAL_WAIT_NS + HEAL_PUSH_NS


def test_one_that_goes_away_whenever_it_is_asked_is_not_waited_for_for_ever() -> None:
    made = healing(liar=(53, 7), a=(50, 1))
    for attempt in range(3):
        assert "liar" in asked(made, HEAL_WAIT_NS + attempt)
        made.forget("liar")
        made.hear("liar", (53,), (7,), HEAL_WAIT_NS + attempt)
    assert made.over(HEAL_WAIT_NS + 9)


def test_each_version_goes_about_as_far_as_a_contribution() -> None:
    settings = SyncConfig()
    assert heal_limit(settings, [2.0] * 20, 3) == 60.0
    assert heal_limit(settings, [2.0] * 3, 3) == 16 * 60.0, "a warm-up may have gone further than what is known"
    assert heal_limit(settings, [], 3) == heal_limit(settings, [0.0] * 20, 3) == float("inf")


# ---------------------------------------------------------------- in a run


def running(learners: int = 3) -> World:
    world = World(config(fragments=1, learners_expected=learners), learners)
    world.join_all()
    world.everyone_steps(60)
    return world


def brings(world: World, distance: float) -> None:
    """What learners bring back is so far from the disk."""
    real = world.driver.complete_push
    world.driver.complete_push = lambda h, p, **given: real(h, p, **{**given, "norm": distance})  # type: ignore[method-assign]


def lies(learner: FakeLearner, versions: int) -> None:
    """It holds versions that nobody ever made."""
    for progress in learner.machine.fragments:
        progress.base, progress.base_checksum, progress.prepared = progress.newest + versions, 99, []


@pytest.mark.parametrize(("versions", "learners"), [(2, 2), (2, 3), (2**40, 2), (2**40, 3)])
def test_a_liar_with_parameters_of_its_own_changes_nothing_and_the_run_goes_on(versions: int, learners: int) -> None:
    """Beside one other it is asked, and what it brings is too far from the disk. Beside two it is not asked."""
    world = running(learners)
    world.crash_syncer()
    before = world.syncer.book.tracks[0].version
    lies(world.learners["l0@l0-1"], versions)
    world.restart_syncer(reconnect=False)
    brings(world, 1e6)
    world.reconnect_refused()
    world.advance(HEAL_WAIT_NS)
    assert not world.noted(FragmentHealed) and world.syncer.committed
    assert world.syncer.book.tracks[0].version == before
    refused = {event.code for event in world.noted(ContributionRefused)}
    assert refused == ({Refusal.NORM_OUTLIER} if versions == learners == 2 else set())


def test_a_lone_holder_whose_parameters_are_near_brings_them_back() -> None:
    world = running(2)
    world.disk_works = False
    world.everyone_steps(8)
    world.crash_syncer()
    world.disk_works = True
    world.learners["l1@l1-1"].dead = True
    world.restart_syncer(exact=False)
    brings(world, 1.0)
    world.advance(HEAL_WAIT_NS)
    assert world.noted(FragmentHealed)
    track = world.syncer.book.tracks[0]
    assert track.checksum == checksum_of(track.version, world.theta[0])


def test_a_run_that_somebody_claims_to_hold_and_does_not_bring_keeps_nobody_out() -> None:
    world = running(2)
    world.lose_state()
    liar = world.add_later("liar")
    hello = replace(liar.machine.hello(), run="mine", generation=3, bases=(9,), checksums=(7,), epoch=2)
    world.sessions += 1
    world.to_syncer(fx.SessionOpened(world.sessions, hello))
    assert world.syncer.run == "mine"
    world.advance(HEAL_WAIT_NS + 1)
    world.advance(HEAL_PUSH_NS + 1)
    assert world.syncer.healing is None and world.syncer.run == "mine-again"
    newcomer = world.add("new")
    world.join_all()
    assert newcomer.machine.joined


def test_who_does_not_bring_what_others_hold_as_well_is_asked_for_a_minute() -> None:
    """Each that is asked next has twice as long: links may be slow. The last one has all the time there is."""
    made = healing(a=(52, 9), b=(52, 9), c=(52, 9))
    now_ns, waited = HEAL_WAIT_NS, []
    assert list(asked(made, now_ns)) == ["a"]
    for then in ("b", "c"):
        begun_ns = now_ns
        while not (found := asked(made, now_ns)):
            now_ns += LONE_PUSH_NS // 4
        waited.append(now_ns - begun_ns)
        assert list(found) == [then]
    assert waited == [LONE_PUSH_NS, 2 * LONE_PUSH_NS]
    assert not asked(made, now_ns + HEAL_PUSH_NS - 1) and made.asked(0, "c") is not None


@pytest.mark.parametrize("disk", [-1, 0, 3, 4])
@pytest.mark.parametrize("beyond", [1, 2])
def test_where_two_agree_one_that_is_beyond_them_needs_a_second_holder_or_the_tape(disk: int, beyond: int) -> None:
    """Draw 3, seed 2810: four held version 4, and one learner's 6 became the run's."""
    claim = VersionClaim(4 + beyond, 7)
    four = dict.fromkeys("abcd", (4, 9))
    ask = {} if disk == 4 else {"a": [(0, VersionClaim(4, 9))]}
    assert asked(healing(disk=disk, liar=(4 + beyond, 7), **four)) == ask
    assert asked(healing(disk=disk, e=(4 + beyond, 7), f=(4 + beyond, 7), **four)) == {"e": [(0, claim)]}
    assert asked(healing(disk=disk, e=(4 + beyond, 7), tape=claim, **four)) == {"e": [(0, claim)]}
    behind = {"a": (1, 9), "b": (1, 9)}
    assert not asked(healing(disk=4, liar=(4 + beyond, 7), **behind)), "two that agree may be behind the disk"


def test_one_version_under_two_checksums_is_no_agreement() -> None:
    assert asked(healing(disk=3, a=(5, 7), b=(4, 8), c=(4, 9)))["a"]
    assert asked(healing(disk=3, a=(5, 7), b=(-1, 0), c=(-1, 0)))["a"], "nor is having nothing"


def test_where_nothing_is_on_the_disk_two_that_agree_are_believed_and_not_one_beyond_them() -> None:
    assert asked(healing(disk=-1, liar=(3, 7), a=(1, 9), b=(1, 9), c=(0, 2))) == {"a": [(0, VersionClaim(1, 9))]}
    assert asked(healing(disk=-1, a=(3, 7), b=(2, 9), c=(1, 8)))["a"], "no two agree: the newest is believed"
