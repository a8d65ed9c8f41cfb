"""Whole sets of synchronisation settings under one name, as `--preset` takes them. docs/PAPER.md compares them.

A preset lies on SyncConfig's defaults. What a method means, a settings file or an option says lies on the preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.core.config import one_of

SYNC_PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Decoupled DiLoCo, arXiv 2604.21428. Where its text leaves a setting open (codecs, outer step), ours stays.
    "paper": {
        "sync_every": 24,
        "fragments": 24,
        "overlap": 2,
        "quorum": "1",
        "grace_cap_steps": 1.0,
        "weights": "tokens2_per_step",
        "merge": "rda",
        "adopt": "overwrite",
    },
}
"""By the names of SyncConfig's fields. A preset says what it means even where that is the default of today."""


def sync_preset(name: str) -> Mapping[str, Any]:
    """The settings that a preset stands for, by the names of SyncConfig's fields."""
    return SYNC_PRESETS[one_of("preset", name, tuple(SYNC_PRESETS))]
