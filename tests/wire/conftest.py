from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fast_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without long waits; the shape of the waits has a test of its own."""
    monkeypatch.setattr("atoll.wire.channel.BACKOFF_S_MIN", 0.01)
    monkeypatch.setattr("atoll.wire.channel.BACKOFF_S_MAX", 0.05)
