"""Every checker of an invariant: facts that it accepts, and one story per rule that it must not accept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from atoll.instruments.check import (
    AtMostOnce,
    BlastRadius,
    Bounded,
    BoundedInfluence,
    Checker,
    Checkers,
    CommitFirst,
    Finite,
    LedgerAddsUp,
    Liveness,
    Loud,
    ReplayIsExact,
    SingleWriter,
    VersionChain,
    all_checkers,
)
from atoll.instruments.check.checker import PROBLEMS_MAX
from atoll.instruments.check.facts import (
    Adopted,
    Books,
    Calm,
    Committed,
    Durable,
    Ended,
    Fact,
    GuardReset,
    Healed,
    Identity,
    Lived,
    Opened,
    Processed,
    Progressed,
    Refused,
    Replayed,
    Rested,
    Restored,
    Sizes,
    Told,
    WentBack,
)
from atoll.instruments.check.influence import MEDIANS_KEPT


def said(checker: Checker, *facts: Fact) -> list[str]:
    """What the checker complains about after these facts."""
    group = Checkers([checker])
    for fact in facts:
        group.feed(fact)
    assert group.broken == bool(group.violations)
    assert all(violation.invariant == checker.invariant for violation in group.violations)
    return [violation.text for violation in group.violations]


def made(version: int, *contributions: Identity, line: int = 0, fragment: int = 0, tokens: int = 10) -> Committed:
    """A version of one of the lines; its checksum names both."""
    return Committed(
        1,
        fragment,
        version,
        100 * line + version + 1,
        contributions,
        (tokens,) * len(contributions),
        (1.0,) * len(contributions),
        (4,) * len(contributions),
    )


def back(version: int, line: int = 0, *, exact: bool = False) -> Restored:
    return Restored(2, {0: (version, 100 * line + version + 1)}, exact)


def healed(version: int, line: int = 0) -> Healed:
    return Healed(2, 0, version, 100 * line + version + 1)


def adopted(version: int, line: int = 0, *, instance: str = "a#1") -> Adopted:
    return Adopted("a", instance, 0, version, 100 * line + version + 1)


# ---------------------------------------------------------------- I1


def test_versions_follow_one_another() -> None:
    assert not said(VersionChain(), made(0), made(1), made(2), made(0, fragment=1), adopted(0), adopted(2), adopted(2))


def test_a_run_that_is_begun_anew_starts_at_version_0_again() -> None:
    assert not said(VersionChain(), made(0), made(1), made(0, line=1), made(1, line=1))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ((made(1),), "version 1 was made after version -1"),
        ((made(0), made(2)), "version 2 was made after version 0"),
        ((made(0), made(1), made(1, line=1)), "version 1 was made after version 1"),
        ((made(0), made(1), adopted(1), adopted(0)), "a went from version 1 of fragment 0 to 0"),
        ((made(0), adopted(1)), "never made"),
        ((made(0), made(1), adopted(1, line=1)), "never made"),
        ((made(0), back(1)), "came from disk and was never made"),
        ((made(0), made(1), back(1, line=1)), "came from disk and was never made"),
        ((made(0), healed(1)), "brought back version 1"),
    ],
)
def test_a_broken_chain(facts: Sequence[Fact], words: str) -> None:
    (text,) = said(VersionChain(), *facts)
    assert words in text


def test_a_chain_goes_on_from_what_the_disk_still_had() -> None:
    story = [made(0), made(1), made(2), back(1)]
    assert not said(VersionChain(), *story, made(2, line=1), adopted(2, line=1))
    assert said(VersionChain(), *story, made(3, line=1)) == ["fragment 0: version 3 was made after version 1"]


def test_a_learner_that_brings_a_lost_version_back_moves_the_chain() -> None:
    story = [made(0), made(1), made(2), back(1), healed(2)]
    assert not said(VersionChain(), *story, made(3))
    assert said(VersionChain(), *story, made(2, line=1)) == ["fragment 0: version 2 was made after version 2"]


def test_a_learner_goes_back_only_when_it_was_told_to() -> None:
    story = [made(0), made(1), adopted(1), back(0)]
    assert len(said(VersionChain(), *story, adopted(0))) == 1
    assert not said(VersionChain(), *story, WentBack("a", "a#1", 0), adopted(0))
    assert len(said(VersionChain(), *story, WentBack("a", "a#1", 1), adopted(0))) == 1
    assert not said(VersionChain(), *story, adopted(0, instance="a#2+")), "another process begins anywhere"


def test_a_checksum_that_nobody_computed_proves_nothing() -> None:
    assert not said(VersionChain(), made(0), Adopted("a", "a#1", 0, 0, 0))


# ---------------------------------------------------------------- I2

ONE, TWO = ("a", 1, 1), ("b", 1, 1)


def test_a_contribution_is_merged_once() -> None:
    facts = [made(0), made(1, ONE, TWO), made(2, ("a", 1, 2)), made(3, ("a", 2, 1))]
    assert not said(AtMostOnce(), *facts, made(0, fragment=1), made(1, ONE, fragment=1))


@pytest.mark.parametrize(
    "facts",
    [
        (made(0), made(1, ONE, ONE)),
        (made(0), made(1, ONE), made(2, TWO, ONE)),
        (made(0), made(1, ONE), made(2, TWO), back(1), made(2, ONE, line=1)),
        (made(0), made(1, ONE), back(0), healed(1), made(2, ONE)),
        (made(0), made(1, TWO), made(2, ONE), back(1), made(2, line=1), back(2), made(3, ONE)),
    ],
    ids=["twice in one", "in the next", "kept by the restored line", "came back with a heal", "came back from a disk"],
)
def test_a_contribution_is_merged_twice(facts: Sequence[Fact]) -> None:
    (text,) = said(AtMostOnce(), *facts)
    assert "contribution 1 of a (generation 1)" in text


def test_what_was_lost_with_its_version_may_be_merged_again() -> None:
    assert not said(AtMostOnce(), made(0), made(1, ONE), back(0), made(1, ONE, line=1))
    assert not said(AtMostOnce(), made(0), made(1, ONE), back(0), made(1, ONE, line=1), healed(1), made(2, TWO))
    another_run = [made(0), made(1, ONE), made(0, line=1)]
    assert not said(AtMostOnce(), *another_run, made(1, ONE, line=1))
    assert not said(AtMostOnce(), *another_run, made(1, TWO, line=1), back(0, line=1), made(1, ONE, line=2))


def test_a_restart_that_lost_nothing_forgives_nothing() -> None:
    assert len(said(AtMostOnce(), made(0), made(1, ONE), back(1), made(2, ONE))) == 1


# ---------------------------------------------------------------- I3


def books(merged: int, pending: int = 0, **discarded: int) -> Books:
    return Books(0, merged + pending + sum(discarded.values()), merged, pending, discarded)


def test_books_that_add_up() -> None:
    facts: list[Fact] = [made(0), made(1, ONE, TWO), books(20, 5, lost=3), Processed(28, 30), Processed(20, 28)]
    assert not said(LedgerAddsUp(), *facts, books(20, lost=8), Rested(True))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ((Books(0, 10, 5, 4),), "10 tokens processed, 9 accounted for"),
        ((Books(0, 10, 5, 5, {"lost": 1}),), "10 tokens processed, 11 accounted for"),
        ((Books(0, 10, 11, -1),), "negative"),
        ((Books(0, 10, 11, 0, {"lost": -1}),), "negative"),
        ((books(10), Processed(11, 20)), "knows of 10 processed tokens"),
        ((books(10), Processed(0, 9)), "learners did 9"),
        ((made(0), made(1, ONE), books(9, lost=1), Rested(True)), "10 tokens are in the parameters, merged says 9"),
        ((made(0), made(1, ONE), books(11), Rested(True)), "merged says 11"),
        ((made(0), made(1, ONE), books(10, 2), Rested(True)), "2 tokens are pending"),
        ((made(0), made(1, ONE), books(10, 2), Rested(False)), "2 tokens are pending"),
        ((made(0), made(1, ONE), made(2, TWO), back(1), books(20), Rested(True)), "10 tokens are in the parameters"),
        ((made(0), made(1, ONE), back(0), healed(1), books(0), Rested(True)), "10 tokens are in the parameters"),
    ],
)
def test_books_that_do_not(facts: Sequence[Fact], words: str) -> None:
    (text,) = said(LedgerAddsUp(), *facts)
    assert words in text


def test_at_rest_the_line_of_versions_counts_that_is_the_runs() -> None:
    story = [made(0), made(1, ONE), made(2, TWO)]
    assert not said(LedgerAddsUp(), *story, back(1), books(10), Rested(True))
    assert not said(LedgerAddsUp(), *story, back(1), healed(2), books(20), Rested(True))
    assert not said(LedgerAddsUp(), *story, made(0, line=1), books(0), Rested(True)), "a run that was begun anew"
    assert not said(LedgerAddsUp(), *story, books(5, lost=15), Rested(False)), "a record of merges was lost"
    assert not said(LedgerAddsUp(), *story, books(25), Rested(False)), "or came back after it was made up for"


# ---------------------------------------------------------------- I4


def told(version: int, *, promised: bool = True) -> Told:
    return Told(1, 0, version, version + 1, promised)


def test_word_goes_out_after_the_commit() -> None:
    facts = [made(0), Durable(1, 0, 0), told(0), made(1), Durable(1, 0, 1), told(1), told(0), back(1, exact=True)]
    assert not said(CommitFirst(), *facts, told(1))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ((made(0), told(0)), "version 0 was published, the disk has version -1"),
        ((made(0), Durable(1, 0, 0), made(1), told(1)), "version 1 was published, the disk has version 0"),
        ((Durable(1, 0, 1), told(1), back(0, exact=True)), "came back with 0"),
        ((Durable(1, 0, 1), told(1), back(0), told(1)), "version 1 was published, the disk has version 0"),
        ((Durable(1, 0, 5), told(5), made(0), told(0)), "version 0 was published, the disk has version -1"),
        ((Durable(1, 1, 5), told(5)), "the disk has version -1"),
    ],
)
def test_word_goes_out_too_early(facts: Sequence[Fact], words: str) -> None:
    (text,) = said(CommitFirst(), *facts)
    assert words in text


def test_a_promise_that_was_not_made_is_not_broken() -> None:
    assert not said(CommitFirst(), made(0), told(0, promised=False), back(0, exact=True))
    assert not said(CommitFirst(), Durable(1, 0, 1), told(1), back(0, exact=False)), "the disk lost it"
    lost = [Durable(1, 0, 1), told(1), back(0, exact=False)]
    assert not said(CommitFirst(), *lost, told(0), back(0, exact=True)), "what was lost once is not missed again"


# ---------------------------------------------------------------- I5

CALM = Calm(100, 200, 2, ("a", "b"))


def progress(at_ns: int, *fragments: int, learners: str = "") -> list[Fact]:
    return [*(Progressed(at_ns, f) for f in fragments), *(Progressed(at_ns, learner=each) for each in learners)]


def test_everything_moves_again() -> None:
    assert not said(Liveness(), CALM, *progress(150, 0, 1, learners="ab"), Ended(200))
    assert not said(Liveness(), CALM, *progress(200, 0, 1, learners="ab"), Ended(300))
    assert not said(Liveness(), Ended(200)), "nobody has asked for calm"
    assert not said(Liveness(), CALM, Ended(150)), "the time is not over"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (progress(150, 0, learners="ab"), "fragments [1] were not committed"),
        (progress(150, 0, 1, learners="b"), "nothing of a was merged"),
        ([*progress(150, 0, 1, learners="b"), *progress(201, learners="a")], "nothing of a was merged"),
    ],
)
def test_something_stands_still(facts: Sequence[Fact], words: str) -> None:
    (text,) = said(Liveness(), CALM, *facts, Ended(200))
    assert words in text


def test_progress_from_before_the_calm_does_not_count() -> None:
    assert len(said(Liveness(), *progress(50, 0, 1, learners="ab"), CALM, Ended(200))) == 2


# ---------------------------------------------------------------- I6


def lived(steps: int, *, waits: bool = False, step_ns: int = 10) -> Lived:
    return Lived("a", "a#1", steps, 10_000, step_ns, waits)


def test_a_learner_keeps_its_pace() -> None:
    """1,000 steps fit in; 2% and two steps may be missing."""
    assert not said(BlastRadius(), lived(1000), lived(978), lived(0, waits=True), lived(0, step_ns=0))
    assert said(BlastRadius(), lived(977)) == ["a took 977 steps in 0.0 s that had room for 1000"]


# ---------------------------------------------------------------- I7


def test_parameters_stay_finite() -> None:
    assert not said(Finite(), made(0), made(1, ONE))
    assert said(Finite(), Committed(1, 3, 7, 1, finite=False)) == ["version 7 of fragment 3 holds NaN or Inf"]


# ---------------------------------------------------------------- I8


def normed(version: int, *norms: float, steps: int = 4) -> Committed:
    ids = tuple(("abcdefghijkl"[index], 1, 10 * version + index) for index in range(len(norms)))
    return Committed(1, 0, version, version, ids, (1,) * len(norms), norms, (steps,) * len(norms))


def influence() -> BoundedInfluence:
    return BoundedInfluence(factor=10.0, sync_every=4)


BEGINNING = [normed(0), normed(1, *[1.0] * 8)]
"""Eight norms of 1: the limit is 10."""
SETTLED = [*BEGINNING, *(normed(2 + index, 1.0) for index in range(MEDIANS_KEPT))]
"""Nothing in the air can be from before there was a limit."""


def test_contributions_of_the_usual_size() -> None:
    assert not said(influence(), *SETTLED, normed(40, 10.0))
    assert not said(influence(), *SETTLED, normed(40, 30.0, steps=12)), "three times the steps, three times the size"
    assert not said(influence(), normed(0), normed(1, 1e6)), "nobody knows yet what is usual"


def test_a_contribution_that_is_too_large() -> None:
    (text,) = said(influence(), *SETTLED, normed(40, 10.1))
    assert "a contribution of norm 10.1 was merged into version 40, the limit is 10" in text
    assert len(said(influence(), *SETTLED, normed(40, 31.0, steps=12))) == 1
    assert len(said(influence(), *SETTLED, normed(40, math.inf))) == 1


def test_one_that_may_have_come_in_before_there_was_a_limit() -> None:
    assert not said(influence(), *BEGINNING, normed(2, 1e6))


def test_contributions_of_few_steps_do_not_make_the_limit() -> None:
    short = [normed(0), *(normed(1 + index, 0.001, steps=1) for index in range(20))]
    assert not said(influence(), *short, normed(40, 1.0)), "only short ones are known"
    half = [normed(0), *(normed(1 + index, 1.0, steps=2) for index in range(20))]
    assert not said(influence(), *half, normed(40, 20.0)), "as if they had gone on: 2 for 4 steps"
    assert len(said(influence(), *half, normed(40, 20.1))) == 1


def test_the_limit_begins_anew_only_when_the_guard_did() -> None:
    assert not said(influence(), *SETTLED, GuardReset(0), normed(40, 1e6))
    assert len(said(influence(), *SETTLED, GuardReset(1), normed(40, 1e6))) == 1
    assert not said(influence(), *SETTLED, back(39), normed(40, 1e6)), "its guard was not on the disk"


def test_the_limit_grows_with_the_steps_but_not_without_end() -> None:
    assert not said(influence(), *SETTLED, normed(40, 20.0, steps=8)), "two periods"
    assert not said(influence(), *SETTLED, normed(40, 160.0, steps=64))
    assert len(said(influence(), *SETTLED, normed(40, 161.0, steps=10**9))) == 1


def test_the_seed_of_another_run_forgets_the_norms() -> None:
    assert not said(influence(), *SETTLED, normed(0), normed(1, 1e6))


# ---------------------------------------------------------------- I9, I10, I13


def test_a_replay_gives_the_recorded_bits() -> None:
    assert not said(ReplayIsExact(), Replayed(0, 1, 7, 7))
    (text,) = said(ReplayIsExact(), Replayed(2, 1, 7, 8))
    assert text == "fragment 2, version 1: the tape gives 0000000000000008, the run had 0000000000000007"


def test_nothing_grows() -> None:
    assert not said(Bounded(), Sizes("rows", 3, 3), Sizes("files", 0, 0))
    assert said(Bounded(), Sizes("rows", 4, 3)) == ["4 rows, at most 3 are allowed"]


def test_refusals_are_named() -> None:
    assert not said(Loud(), Refused("a", "too_old", True))
    assert said(Loud(), Refused("a", "", True)) == ["something of a was refused without a reason"]
    assert said(Loud(), Refused("a", "too_old", False)) == ["something of a was refused (too_old) and no event says so"]


# ---------------------------------------------------------------- I11


def test_the_model_moves_with_its_learners_or_by_the_runs_own_schedule() -> None:
    """Ten merges of whole steps; of steps that are too small; and of steps that the schedule has made so small."""
    for share, step_factor_min, complaints in ((1.0, 1.0, 0), (0.2, 1.0, 1), (0.2, 0.1, 0), (0.02, 0.1, 1)):
        group = all_checkers(sync_every=24, step_factor_min=step_factor_min)
        for version in range(1, 11):
            who = (("a", 1, version),)
            merged = Committed(1, 0, version, version, who, (24,), (1.0,), (24,), weights=(1.0,), share=share)
            group.feed(merged)
        assert len([each for each in group.violations if each.invariant == "I14"]) == complaints


def test_one_that_brings_many_periods_at_once_is_not_held_against_the_model() -> None:
    """After an outage one contribution is hundreds of steps long, and weighs as much less (seed 482). Nobody holds the
    model back by that; merges of too small a share still do, beside it."""
    for share, complaints in ((1.0, 0), (0.4, 1)):
        group = all_checkers(sync_every=1)
        for version in range(1, 11):
            steps, weights = {"a": 2, "b": 154 if version == 1 else 3}, {"a": 0.75, "b": 0.25}
            if version % 2 == 0:
                steps, weights = {"b": 1}, {"b": 1.0}
            who, counts, ones = tuple((name, 1, version) for name in steps), tuple(steps.values()), (1.0,) * len(steps)
            shares = tuple(weights.values())
            group.feed(Committed(1, 0, version, version, who, counts, ones, counts, weights=shares, share=share))
        assert len([each for each in group.violations if each.invariant == "I14"]) == complaints


def test_one_writer_after_the_other() -> None:
    first = [Opened(1), Durable(1, 0, 0), Told(1, 0, 0, 1)]
    assert not said(SingleWriter(), *first, Opened(2), Durable(2, 0, 1), Told(2, 0, 1, 1), Opened(7))
    assert not said(SingleWriter(), *first, Opened(2), Told(1, 0, 0, 1)), "what the newer one knows may be said"
    assert not said(SingleWriter(), *first, Opened(2), Told(1, 0, 1, 1, promised=False))
    assert not said(SingleWriter(), *first, Told(1, 0, 1, 1)), "too early, but its own: I4 is to complain"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ((Opened(1), Opened(1)), "epoch 1 was opened after epoch 1"),
        ((Opened(2), Opened(1)), "epoch 1 was opened after epoch 2"),
        ((Opened(1), Opened(2), Durable(1, 3, 4)), "epoch 1 wrote version 4 of fragment 3 after epoch 2"),
        ((Opened(1), Durable(1, 0, 0), Opened(2), Told(1, 0, 1, 1)), "fenced epoch 1 published version 1"),
    ],
)
def test_two_writers(facts: Sequence[Fact], words: str) -> None:
    (text,) = said(SingleWriter(), *facts)
    assert words in text


# ---------------------------------------------------------------- together


def test_every_invariant_has_its_checker() -> None:
    """I12, the loss, is the storm's to compare."""
    group = all_checkers(sync_every=24)
    assert [each.invariant for each in group.checkers] == [f"I{n}" for n in (*range(1, 12), *range(13, 21))]
    assert all(each.statement and each.handlers() for each in group.checkers)


def test_every_fact_is_somebodys() -> None:
    wanted = {name for checker in all_checkers(sync_every=24).checkers for name in checker.handlers()}
    assert wanted == {kind.__name__.lower() for kind in Fact.__args__}  # type: ignore[attr-defined]


def test_a_group_feeds_all_and_keeps_the_first_complaints() -> None:
    group = all_checkers(sync_every=24)
    group.feed(made(0))
    assert not group.broken and group.fed == 1
    for _ in range(PROBLEMS_MAX + 10):
        group.feed(Committed(1, 0, 5, 1, finite=False))
    by_invariant = [violation.invariant for violation in group.violations]
    assert group.broken and by_invariant.count("I1") == PROBLEMS_MAX and by_invariant.count("I7") == PROBLEMS_MAX
    assert str(group.violations[0]).startswith("I1: fragment 0: version 5")


def test_the_settings_of_the_run_reach_the_limit() -> None:
    for factor, complaints in ((10.0, 0), (2.0, 1)):
        group = all_checkers(outlier_factor=factor, sync_every=4)
        for fact in [*SETTLED, normed(34, 5.0)]:
            group.feed(fact)
        assert len([each for each in group.violations if each.invariant == "I8"]) == complaints
