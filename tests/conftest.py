"""Makes tests/cluster.py and tests/core/world.py importable, and cleans up what a failing test leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "core")]


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    if (cluster := sys.modules.get("cluster")) is not None:
        cluster.kill_leftovers()
