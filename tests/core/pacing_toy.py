"""A pacing policy of a user's own: one small class, and its registration."""

from __future__ import annotations

from atoll.core.config import SyncConfig
from atoll.core.pacing import PACING, Pace


class Patient:
    """Twice the steps between rounds once a fragment has some versions."""

    def period(self, config: SyncConfig, pace: Pace) -> tuple[int, str]:
        if pace.version < 2:
            return config.sync_every, "the run is young"
        return 2 * config.sync_every, "the run is under way"


class Mad:
    def period(self, config: SyncConfig, pace: Pace) -> tuple[int, str]:
        return -(10**30) * (-1) ** pace.version, "no reason"


PACING.register("patient", Patient())
PACING.register("mad", Mad())
