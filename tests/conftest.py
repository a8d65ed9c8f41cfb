"""Makes helpers in tests, tests/core and tests/learner importable, and cleans up what a failing test leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent / place) for place in ("", "core", "learner", "fabric")]


HEAVY = ("bakeoff", "compat", "conform", "engines", "examples", "fabric", "integrations", "jax", "page")
"""Folders whose tests start whole clusters, frameworks or browsers. scripts/test runs them apart, fewer at a time:
beside others they wait for the cores and not for what they test."""
HEAVY_FILES = (
    "test_hosts_page.py",
    "test_island.py",
    "test_island_models.py",
    "test_island_parts.py",
    "test_storms_islands.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for item in items:
        place = item.path.relative_to(tests)
        if place.parts[0] in HEAVY or place.name in HEAVY_FILES:
            item.add_marker("heavy")


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    if (cluster := sys.modules.get("cluster")) is not None:
        cluster.kill_leftovers()


@pytest.fixture(autouse=True)
def no_learner_speaks_for_pytest() -> Iterator[None]:
    """A learner that failed in this process has not made the tests fail."""
    yield
    if (exit_status := sys.modules.get("atoll.learner.exit_status")) is not None:
        exit_status.forget()
