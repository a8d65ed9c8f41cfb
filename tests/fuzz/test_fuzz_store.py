"""Nothing on a disk or in a bucket stops a syncer or an export but by a documented error."""

from __future__ import annotations

import pytest
from fuzz_corpus import targets_of
from fuzz_engine import Target, run, soak_cases, soak_seed

TARGETS = targets_of("store")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.name}-{target.cases}")
def test_bytes_are_refused_or_harmless(target: Target) -> None:
    run(target, 0, target.cases)


@pytest.mark.soak
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_soak(target: Target) -> None:
    run(target, soak_seed(), soak_cases())
