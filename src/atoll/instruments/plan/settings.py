"""The settings that a plan is about: the synchronisation's, and how soon a commit is on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.core import SyncConfig, one_of
from atoll.errors import ConfigError

DURABILITIES = ("commit", "interval", "none")
"""The levels of `atoll run --durability`."""
DURABILITY_INTERVAL_S = 30.0
"""The default of `--durability-interval`."""
OWN = ("durability", "durability_interval")
_DERIVED = ("learners_expected", "tokens_budget")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a plan chooses. `sync.fragments` is known, never 0."""

    sync: SyncConfig
    durability: str = "commit"
    durability_interval: float = DURABILITY_INTERVAL_S
    codecs_up: tuple[tuple[str, str], ...] = ()
    """By region, where `adaptive` has decided for another one than the run's."""

    def codec_up(self, place: str) -> str:
        """What learners of this region send."""
        return dict(self.codecs_up).get(place, self.sync.codec_up)

    def __post_init__(self) -> None:
        one_of("durability", self.durability, DURABILITIES)
        seconds = self.durability_interval
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0.1 <= seconds <= 2.6e6:
            raise ConfigError(f"durability_interval must be from 0.1 to 2.6e6 seconds; not {seconds!r}")


def settings_from(values: Mapping[str, Any], *, learners: int) -> Settings:
    """Settings from a mapping by name. A quorum may be a number."""
    sync = {name: value for name, value in values.items() if name not in OWN}
    if isinstance(sync.get("quorum"), int) and not isinstance(sync["quorum"], bool):
        sync["quorum"] = str(sync["quorum"])
    own = {name: values[name] for name in OWN if name in values}
    return Settings(SyncConfig.from_dict({**sync, "learners_expected": learners}), **own)


def changed(settings: Settings, **changes: Any) -> Settings:
    """The same settings with some changed."""
    sync = {name: value for name, value in settings.sync.to_dict().items() if name not in _DERIVED}
    own = {name: getattr(settings, name) for name in OWN}
    return settings_from({**sync, **own, **changes}, learners=settings.sync.learners_expected)
