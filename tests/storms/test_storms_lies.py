"""A storm with a learner that lies: how its lies are put in, and what of its word the checks do without."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path

from atoll.instruments.chaos import Fault, load_plan
from atoll.instruments.chaos.injector import Injector
from atoll.instruments.check import facts
from atoll.instruments.storms.checks import TOKENS_MAX, RunFacts, _of_calm, _of_learners, _of_ledger
from atoll.instruments.storms.control import ChaosControl
from atoll.instruments.storms.files import FaultFiles
from atoll.observe import events as ev

ROOT = Path(__file__).parents[2]


class Running(ChaosControl):
    """Everybody runs."""

    def __init__(self, folder: Path) -> None:
        self._files = FaultFiles(folder)

    def pid_of(self, target: str) -> int | None:
        return 1


class Cuts:
    def __init__(self) -> None:
        self.cuts: list[str] = []

    def hold(self, learner: str, faults: Sequence[Fault]) -> None:
        """No weather here."""

    def cut(self, learner: str) -> None:
        self.cuts.append(learner)


def test_a_learner_is_told_all_of_its_lies_and_says_hello_again_where_one_is_told_there(tmp_path: Path) -> None:
    links = Cuts()
    injector = Injector(Running(tmp_path), links=links)
    file = tmp_path / "lie-learner-1"
    flipped, epoch = (
        Fault("lie", "learner-1", at_s=0.0, lasts_s=9.0, amount=amount, variant=variant)
        for variant, amount in (("flipped", 1.0), ("epoch", 1000.0))
    )
    assert injector.begin(flipped) == "" and not links.cuts
    assert injector.begin(epoch) == "" and links.cuts == ["learner-1"]
    assert json.loads(file.read_text()) == {"flipped": 1.0, "epoch": 1000.0}
    assert injector.end(flipped) and json.loads(file.read_text()) == {"epoch": 1000.0}
    assert injector.end(epoch) and not file.exists()
    injector.begin(flipped)
    FaultFiles(tmp_path).clear()
    assert not file.exists()


def test_the_ledger_is_not_held_against_what_a_liar_did() -> None:
    run = RunFacts(["a", "b"], 1, 8, 0.1, 10)
    told = [
        ev.FaultInjected(fault="lie", target="b", detail="", until_ns=1, lasts_s=1.0),
        ev.LearnerFinished("a", 10, 100, "finished"),
        ev.LearnerFinished("b", 10, 100, "finished"),
    ]
    for liars, expected in ((told, (100, TOKENS_MAX)), (told[1:], (200, 200))):
        stamped = [(number, f"source-{number}", event) for number, event in enumerate(liars)]
        (fact,) = _of_ledger(stamped, run)
        assert isinstance(fact, facts.Processed) and (fact.known, fact.total) == expected


def test_a_liar_is_promised_nothing_after_the_storm() -> None:
    run = RunFacts(["a", "b"], 1, 8, 0.1, 10)
    told = [
        ev.FaultInjected(fault="lie", target="b", detail="", until_ns=1, lasts_s=1.0),
        ev.FaultEnded(fault="lie", target="b"),
        ev.LearnerSteps("a", 1, 8, 8, 80, 80, 1.0, 0, 0, 0, 0, 0, 0),
    ]
    stamped = [(number, "source", event) for number, event in enumerate(told)]
    calm = next(iter(_of_calm(stamped, run)))
    assert isinstance(calm, facts.Calm) and calm.learners == ("a",)


def test_what_was_left_out_of_a_merge_is_an_event_that_says_so() -> None:
    for code, told in (("quarantined", True), ("norm_outlier", True), ("because", False)):
        stamped = [(1, "syncer", ev.ContributionRefused(0, "b", 1, 0, 32, code, "why"))]
        (fact,) = _of_learners(stamped)
        assert isinstance(fact, facts.Refused) and fact == facts.Refused("b", code, told)


def test_the_plan_of_the_trust_benchmark_tells_every_lie_and_two_at_a_time(tmp_path: Path) -> None:
    trust = runpy.run_path(str(ROOT / "benchmarks" / "trust.py"))
    path = tmp_path / "plan.toml"
    path.write_text(trust["plan_text"]([*trust["VALUES"], *trust["CLAIMS"]]))
    faults = load_plan(path, learners=trust["LEARNERS"], seconds=600.0).faults
    lies = [fault for fault in faults if fault.kind == "lie"]
    assert {fault.variant for fault in lies} == {*trust["VALUES"], *trust["CLAIMS"]}
    assert {fault.target for fault in lies} == {trust["LIAR"]}
    thin = [fault for fault in faults if fault.target == trust["THIN"]]
    assert [(fault.kind, fault.amount * 1000 / 8) for fault in thin] == [("limit", 2000.0)]  # 2 kB/s
    assert sum(one.at_s <= 300.0 <= one.end_s for one in lies) == 2
