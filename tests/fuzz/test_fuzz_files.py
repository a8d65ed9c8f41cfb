"""Nothing in a run folder stops a launcher, a report or a resumed run but by a documented error."""

from __future__ import annotations

import pytest
from fuzz_corpus import targets_of
from fuzz_engine import Target, run, soak_cases, soak_seed

TARGETS = targets_of("files")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.name}-{target.cases}")
def test_bytes_are_refused_or_harmless(target: Target) -> None:
    assert run(target, 0, target.cases) <= target.cases  # raises at the first case that is neither


@pytest.mark.soak
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_soak(target: Target) -> None:
    run(target, soak_seed(), soak_cases())
