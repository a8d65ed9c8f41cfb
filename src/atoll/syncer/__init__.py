"""The syncer: a CPU process that merges what a quorum has sent, takes an outer step and publishes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.core.config import SyncConfig

__all__ = ["SyncerOptions", "run_syncer"]


@dataclass(frozen=True, slots=True)
class SyncerOptions:
    """How to run one syncer."""

    listen: str
    """host:port; port 0 takes a free one. Anything but loopback needs a token and TLS."""
    config: SyncConfig
    run_folder: Path | None = None
    """Where events, `syncer.json` (the real address) and `model.safetensors` go; None keeps nothing."""
    token: str = ""
    tls_certificate: str | None = None
    tls_key: str | None = None


def run_syncer(options: SyncerOptions) -> int:
    """Run a syncer until SIGTERM or SIGINT; returns the exit status."""
    from atoll.syncer.serve import run

    return run(options)
