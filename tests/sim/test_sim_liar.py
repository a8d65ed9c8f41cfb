"""A learner that lies, in the simulator: no invariant breaks, and with `robust` nothing of it is merged."""

from __future__ import annotations

import pytest

from atoll.core.config import SyncConfig
from atoll.core.messages import Discard
from atoll.instruments.check import Checker, Checkers
from atoll.instruments.check.facts import Committed
from atoll.instruments.sim.run import run_scenario
from atoll.instruments.sim.scenario import LearnerSpec, Scenario
from atoll.instruments.sim.world import World

LIAR = "learner-3"


class Contributors(Checker):
    """Who was in which version."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[set[str]] = []

    def on_committed(self, fact: Committed) -> None:
        self.found += [{learner for learner, _, _ in fact.contributions}] if fact.version else []


def scenario(robust: str, *, arrays: bool = False) -> Scenario:
    config = SyncConfig(sync_every=4, fragments=2, learners_expected=5, robust=robust)
    learners = tuple(LearnerSpec(lies="flip" if index == 3 else "") for index in range(5))
    return Scenario(1, config, learners, seconds=20.0, arrays=arrays)


@pytest.mark.parametrize("arrays", [True, False])
@pytest.mark.parametrize("robust", ["off", "cosine"])
def test_a_liar_breaks_no_invariant(robust: str, arrays: bool) -> None:
    assert not run_scenario(scenario(robust, arrays=arrays)).violations


@pytest.mark.parametrize("robust", ["off", "cosine"])
def test_nothing_of_a_liar_is_merged_with_robust(robust: str) -> None:
    """The directions of the others agree here: there are no arrays, and a contribution has only a sign."""
    contributors = Contributors()
    world = World(scenario(robust), checkers=Checkers([contributors]))
    world.begin()
    world.clock.run(30 * 10**9)
    assert len(contributors.found) > 20
    assert any(LIAR in names for names in contributors.found) == (robust == "off")
    assert world.syncer is not None
    assert (Discard.QUARANTINED in world.syncer.machine.ledger.totals().discarded) == (robust == "cosine")
