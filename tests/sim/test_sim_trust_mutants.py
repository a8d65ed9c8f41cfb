"""The fuzzer's liars find what lets them in: every mend against them that is taken out is missed by some seed.

As `test_sim_mutants`: the short form runs chosen seeds, the long one (`pytest -m soak`) counts from seed 0.
"""

from __future__ import annotations

import pytest
from sim_mutants import Mutant, hunt
from trust_mutants import MENDS, Mend

from atoll.instruments.sim.drawing import draw
from atoll.instruments.sim.run import run_scenario

DRAWN = [mend for mend in MENDS if mend.scenario is None]
MADE = [mend for mend in MENDS if mend.scenario is not None]


def each(mends: list[Mend]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mend", mends, ids=[mend.mutant.name for mend in mends])


@each(DRAWN)
def test_the_mend_is_missed_when_it_is_gone(mend: Mend) -> None:
    mutant: Mutant = mend.mutant
    caught = hunt(mutant, mutant.seeds)
    assert caught is not None, f"{mutant.breaks}: none of the seeds {mutant.seeds} shows it any more; find others"
    print(f"{mutant.name}: seed {caught.seed}: {caught.violation}")


@each(DRAWN)
def test_its_seeds_are_sound_and_have_the_lie(mend: Mend) -> None:
    for seed in mend.mutant.seeds:
        assert mend.lies & {fault.variant for fault in draw(seed).faults}
        report = run_scenario(draw(seed))
        assert not report.violations, f"seed {seed}: {report.violations[0]}"


@each(MADE)
def test_the_mend_is_missed_in_a_scenario_that_was_made_for_it(mend: Mend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mend.scenario is not None
    assert not run_scenario(mend.scenario).violations
    mend.mutant.apply(monkeypatch)
    assert run_scenario(mend.scenario).violations, mend.mutant.breaks


@pytest.mark.soak
@each(DRAWN)
def test_the_mend_is_missed_within_its_number_of_seeds(mend: Mend) -> None:
    caught = hunt(mend.mutant, mend.seeds(mend.mutant.within))
    assert caught is not None, f"{mend.mutant.breaks}: not seen in the first {mend.mutant.within} seeds"
    print(f"| {mend.mutant.name} | {caught.seed} | {caught.violation.invariant} | {mend.mutant.within} |")


def test_names_are_unique_and_each_has_a_proof() -> None:
    assert len({mend.mutant.name for mend in MENDS}) == len(MENDS)
    assert all(mend.scenario is not None or mend.mutant.seeds for mend in MENDS)
