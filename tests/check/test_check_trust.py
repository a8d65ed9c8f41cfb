"""I15: what one learner that lies may cost the others, and what it must not."""

from __future__ import annotations

from atoll.instruments.check import BoundedInfluence, BoundedTrust, Checker, Checkers
from atoll.instruments.check.facts import (
    Charged,
    Committed,
    Fact,
    Kept,
    Overtaken,
    Rested,
    Spent,
    TurnedAway,
    Unlied,
)


def said(checker: Checker, *facts: Fact) -> list[str]:
    group = Checkers([checker])
    for fact in facts:
        group.feed(fact)
    return [violation.text for violation in group.violations]


def merged(version: int, *tokens: int, learner: str = "a") -> Committed:
    names = tuple((learner, 1, version * 10 + n) for n in range(len(tokens)))
    each = (1.0,) * len(tokens)
    weights = tuple(1.0 / len(tokens) for _ in tokens)
    return Committed(1, 0, version, version + 100, names, tokens, each, (8,) * len(tokens), True, weights)


def test_a_syncer_ends_for_a_newer_one_and_for_nothing_else() -> None:
    assert said(BoundedTrust(), Overtaken(1, 2)) == []
    assert "there is none" in said(BoundedTrust(), Overtaken(2, 2))[0]


def test_nobody_is_fenced_out_by_another() -> None:
    assert said(BoundedTrust(), TurnedAway("a", "run_closed")) == []
    assert "a was fenced out" in said(BoundedTrust(), TurnedAway("a", "fenced"))[0]


def test_nobody_is_charged_with_tokens_that_it_did_not_process() -> None:
    assert said(BoundedTrust(), Charged("a", 10, 10), Charged("a", 9, 10)) == []
    assert said(BoundedTrust(), Charged("a", 11, 10)) == ["the ledger has a process 11 tokens, and it did 10"]


def test_an_honest_learners_books_are_exact() -> None:
    seed = Committed(1, 0, 0, 100)
    story = (seed, merged(1, 30), merged(2, 50))
    assert said(BoundedTrust(), *story, Kept("a", 1, 0, 90, 10), Rested(True)) == []
    (text,) = said(BoundedTrust(), *story, Kept("a", 1, 0, 100, 10), Rested(True))
    assert text.endswith("80 are merged and 10 discarded: 10 are missing")
    assert said(BoundedTrust(), *story, Kept("a", 1, 0, 100, 10), Rested(False)) == [], "a disk has lost something"


def test_another_generation_and_another_learner_are_not_counted() -> None:
    story = (Committed(1, 0, 0, 100), merged(1, 30), merged(2, 50, learner="b"))
    checker = BoundedTrust()
    assert said(checker, *story, Kept("a", 1, 0, 40, 10), Rested(True)) == []
    assert checker.merged_share == 0.75


def test_the_share_that_is_merged_is_that_of_the_run_without_lies() -> None:
    assert said(BoundedTrust(), Unlied(0.95, 0, (1.0, 1.0), (0, 0)), Unlied(0.3, 0, (1.0, 0.31), (0, 0))) == []
    assert "without the lies 0.990" in said(BoundedTrust(), Unlied(0.94, 0, (1.0, 0.99), (0, 0)))[0]


def test_the_rhythm_is_that_of_the_run_without_lies() -> None:
    for versions in (20, 100, 410):
        assert said(BoundedTrust(), Unlied(1, versions, (1, 1), (200, 40))) == []
    for versions in (9, 411):
        (text,) = said(BoundedTrust(), Unlied(1, versions, (1, 1), (200, 40)))
        assert text == f"{versions} versions were made, without the lies (200, 40)"


def test_a_budget_is_spent_by_work() -> None:
    assert said(BoundedTrust(), Spent(100, 100)) == []
    assert "called spent after 99" in said(BoundedTrust(), Spent(100, 99))[0]


def test_a_merge_is_no_longer_than_what_is_in_it() -> None:
    good = Committed(1, 0, 1, 1, (("a", 1, 0), ("b", 1, 0)), (8, 8), (2.0, 4.0), (8, 8), True, (0.5, 0.5), 1.0, 3.0)
    assert said(BoundedTrust(), good) == []
    far = Committed(1, 0, 1, 1, (("a", 1, 0), ("b", 1, 0)), (8, 8), (2.0, 4.0), (8, 8), True, (0.5, 0.5), 1.0, 3.1)
    assert "moved by 3.1, and its contributions are 3 long" in said(BoundedTrust(), far)[0]


def test_nothing_is_longer_than_anything_may_be() -> None:
    def committed(norm: float) -> Committed:
        return Committed(1, 0, 1, 1, (("a", 1, 0),), (8,), (norm,), (8,), True, (1.0,))

    assert said(BoundedTrust(1e3), committed(1e3)) == []
    assert "and 1e+03 is the most for anybody" in said(BoundedTrust(1e3), committed(1e30))[0]


def test_a_liar_weighs_no_more_than_its_size_explains() -> None:
    def committed(weight: float) -> Committed:
        return Committed(1, 0, 1, 1, (("a", 1, 0),), (8,), (2.0,), (8,), liar_weight=weight, liar_weight_max=0.6)

    assert said(BoundedTrust(), committed(0.6)) == []
    assert "0.9 of the weight of version 1" in said(BoundedTrust(), committed(0.9))[0]


def test_a_liars_norms_are_judged_by_those_of_the_others() -> None:
    def committed(version: int, *norms: tuple[str, float]) -> Committed:
        names = tuple((learner, 1, version) for learner, _ in norms)
        sizes = tuple(norm for _, norm in norms)
        return Committed(1, 0, version, version, names, (8,) * len(norms), sizes, (8,) * len(norms))

    honest = [committed(version, ("a", 1.0), ("x", 9.0)) for version in range(1, 20)]
    story = (*honest, committed(20, ("x", 80.0)))
    assert said(BoundedInfluence(10.0, sync_every=8), *story) == [], "its own norms have moved the median"
    assert "norm 80" in said(BoundedInfluence(10.0, sync_every=8, liar="x"), *story)[0]
