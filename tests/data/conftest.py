from __future__ import annotations

from collections.abc import Iterator

import pytest
from data_fakes import FakeRun

from atoll.data import dry_wait, lease_client


@pytest.fixture
def run() -> FakeRun:
    return FakeRun()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody in here answers after two seconds what was not answered at once."""
    monkeypatch.setattr(dry_wait, "DRY_GRACE_S", 0.3)
    monkeypatch.setattr(lease_client, "ASK_AGAIN_S", 0.02)
    monkeypatch.setattr(dry_wait, "LINGER_S_MAX", 0.2)
    monkeypatch.setattr(dry_wait, "SLICE_S", 0.01)
    yield
