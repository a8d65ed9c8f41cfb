"""No message that the wire lets through makes a machine raise, or a ledger that does not add up."""

from __future__ import annotations

from random import Random

import pytest
from fuzz_engine import soak_cases, soak_seed
from fuzz_learner_storm import LearnerStorm
from fuzz_machines import INPUTS_MIN, LEARNER_STORMS, STEPS, SYNCER_STORMS
from fuzz_syncer_storm import SyncerStorm

STORMS = {"syncer": (SyncerStorm, SYNCER_STORMS), "learner": (LearnerStorm, LEARNER_STORMS)}


def brave(kind: str, seed: int, storms: int) -> int:
    inputs = 0
    for number in range(storms):
        storm = STORMS[kind][0](Random(f"{kind}/{seed}/{number}"))
        try:
            inputs += storm.run(STEPS)
        except Exception as error:
            again = f'{type(storm).__name__}(Random("{kind}/{seed}/{number}")).run({STEPS})'
            raise AssertionError(f"after {storm.inputs} inputs; again: {again}") from error
    return inputs


@pytest.mark.parametrize("kind", STORMS)
def test_no_message_breaks_a_machine(kind: str) -> None:
    assert brave(kind, 0, STORMS[kind][1]) >= INPUTS_MIN[kind]


@pytest.mark.soak
@pytest.mark.parametrize("kind", STORMS)
def test_soak(kind: str) -> None:
    brave(kind, soak_seed(), soak_cases() // STEPS)
