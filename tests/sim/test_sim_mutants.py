"""The fuzzer finds bugs: every defect that is put in on purpose is caught, and by which invariant is printed.

The short form runs a few chosen seeds for each. The long one (`pytest -m soak`) counts from seed 0, which is what a
user of `atoll sim fuzz` does, and holds each defect to a stated number of seeds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sim_mutants import KEPT, MUTANTS, Mutant, hunt

from atoll.codec import get_codec
from atoll.instruments.sim.drawing import draw
from atoll.instruments.sim.run import run_scenario
from atoll.instruments.sim.scenario import load
from atoll.learner.vault import Vault

DRAWN = [mutant for mutant in MUTANTS if mutant.name not in KEPT]
EACH = pytest.mark.parametrize("mutant", DRAWN, ids=[mutant.name for mutant in DRAWN])
RESIDUAL_SEED = 5
"""Arrays, int4, contributions that are dropped, and nobody is poisoned."""


@EACH
def test_the_defect_is_caught(mutant: Mutant) -> None:
    caught = hunt(mutant, mutant.seeds)
    assert caught is not None, f"{mutant.breaks}: none of the seeds {mutant.seeds} shows it any more; find others"
    print(f"{mutant.name}: seed {caught.seed}: {caught.violation}")


@pytest.mark.parametrize("name", KEPT)
def test_the_defect_is_caught_by_a_kept_scenario(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = load(Path(__file__).parent / "scenarios" / f"{KEPT[name]}.json")
    next(mutant for mutant in MUTANTS if mutant.name == name).apply(monkeypatch)
    assert any(run_scenario(replace(scenario, seed=seed)).violations for seed in range(5))


@pytest.mark.soak
@EACH
def test_the_defect_is_caught_within_its_number_of_seeds(mutant: Mutant) -> None:
    caught = hunt(mutant, range(mutant.within))
    assert caught is not None, f"{mutant.breaks}: not seen in the first {mutant.within} seeds"
    print(f"| {mutant.name} | {caught.seed} | {caught.violation.invariant} | {mutant.within} |")


def test_the_seeds_are_sound_without_a_defect() -> None:
    """Those that test_sim_seeds does not run."""
    found = {(mutant.draw, seed) for mutant in MUTANTS for seed in mutant.seeds if seed >= 200}
    for version, seed in sorted(found):
        report = run_scenario(draw(seed, version))
        assert not report.violations, f"seed {seed}: {report.violations[0]}"


def test_the_set_is_large_and_its_names_are_unique() -> None:
    assert len(MUTANTS) >= 12
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


# ---------------------------------------------------------------- residuals, which no invariant of a run can see


class Owed:
    """What a residual must be: all progress that was merged, less what its payloads said of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wrong = 0
        self.dropped = 0
        self._owed: dict[tuple[Vault, int], Any] = {}
        settle = Vault.settle

        def watched(vault: Vault, fragment: int, seq: int, merged: bool) -> Any:
            sending = vault.sending.get((fragment, seq))
            settled = settle(vault, fragment, seq, merged)
            if sending is None or sending.payload is None:
                return settled
            key = (vault, fragment)
            if merged:
                progress = sending.snapshot.values() - sending.origin
                said = get_codec(vault.config.codec_up).decode(sending.payload, progress.size)
                self._owed[key] = (self._owed.get(key, 0.0) if sending.feedback else 0.0) + progress - said
            self.dropped += not merged
            found = vault.residuals[fragment]
            self.wrong += not np.allclose(0.0 if found is None else found, self._owed.get(key, 0.0), atol=1e-5)
            return settled

        patch.setattr(Vault, "settle", watched)


def _reset_on_drop(vault: Vault, fragment: int, sending: Any, merged: bool) -> None:
    if not merged:
        vault.residuals[fragment] = None


def _replaced_on_drop(vault: Vault, fragment: int, sending: Any, merged: bool) -> None:
    if not merged and sending is not None:
        vault.residuals[fragment] = sending.residual


def _kept_after_merge(vault: Vault, fragment: int, sending: Any, merged: bool) -> None:
    if merged and sending is not None:
        vault.residuals[fragment] = None


@pytest.mark.parametrize("defect", [None, _reset_on_drop, _replaced_on_drop, _kept_after_merge])
def test_a_residual_is_what_merged_payloads_left_out(defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = draw(RESIDUAL_SEED, 5)
    assert scenario.arrays and not get_codec(scenario.config.codec_up).lossless
    if defect is not None:
        settle = Vault.settle

        def broken(vault: Vault, fragment: int, seq: int, merged: bool) -> Any:
            sending = settle(vault, fragment, seq, merged)
            defect(vault, fragment, sending, merged)
            return sending

        monkeypatch.setattr(Vault, "settle", broken)
    owed = Owed(monkeypatch)
    report = run_scenario(scenario)
    assert not report.violations, "an invariant sees residuals now: make this a mutant like the others"
    assert owed.dropped > 3
    assert (owed.wrong > 0) == (defect is not None)
