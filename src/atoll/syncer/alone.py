"""A run that no launcher of this machine keeps: its syncer says that it began, and that it is over.

Views, `atoll logs --follow` and trackers know a run's beginning and end by these two events. A launcher (`atoll run`,
`atoll train`) writes them itself; it has written RUN/config.json before it starts a syncer.
"""

from __future__ import annotations

from collections.abc import Iterator

from atoll.core import SyncConfig
from atoll.observe import RunFinished, RunStarted
from atoll.syncer.options import SyncerOptions


def is_alone(options: SyncerOptions) -> bool:
    return options.run_folder is not None and not (options.run_folder / "config.json").exists()


def begun(options: SyncerOptions, config: SyncConfig, *, continues: bool) -> Iterator[RunStarted]:
    """Only when a run begins: for one that goes on after a crash this would be another launch of it."""
    if is_alone(options) and not continues:
        assert options.run_folder is not None
        yield RunStarted(
            method="decoupled",
            learners=config.learners_expected,
            parameters=0,
            sync_every=config.sync_every,
            fragments=config.fragments,
            codec_up=config.codec_up,
            codec_down=config.codec_down,
            tokens_budget=config.tokens_budget,
            title=options.title or options.run_folder.resolve().name,
        )


def over(options: SyncerOptions, reason: str, wall_s: float) -> Iterator[RunFinished]:
    """A syncer that was overtaken or failed has no last word: another one goes on."""
    if is_alone(options):
        yield RunFinished(reason, float("nan"), wall_s)
