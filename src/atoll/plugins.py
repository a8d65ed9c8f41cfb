"""A user's own codecs, merge methods, outer optimizers and pacing policies, by name.

Every process of a run looks its names up for itself, so each must know them. In one process a call is enough, before
anything starts (ATOLL_PRELOAD names modules that make it in every process); or put the module into an installed package
and name it there:

    [project.entry-points."atoll.codecs"]
    mine = "my_package.my_codec:MINE"

The command line and `atoll.Learner` read these groups when they start. A module is imported when its name is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from atoll.core import CODECS, MERGES, OUTERS, PACING, Pacing, Registry

if TYPE_CHECKING:
    from atoll.codec import Codec, MergeMethod, OuterOptimizer

GROUPS: Mapping[str, Registry[Any]] = {
    "atoll.codecs": CODECS,
    "atoll.merges": MERGES,
    "atoll.outer": OUTERS,
    "atoll.pacing": PACING,
}
"""Groups of entry points, and where their names go."""


@cache
def load_entry_points() -> None:
    """Take up what installed packages offer, once per process. ConfigError for a name that is taken already."""
    installed = entry_points()
    for group, registry in GROUPS.items():
        for entry in installed.select(group=group):
            registry.register(entry.name, entry.value)


def register_codec(name: str, codec: Codec) -> None:
    """`codec_up` and `codec_down` may be `name` from now on, in this process."""
    CODECS.register(name, codec)


def register_merge(name: str, method: MergeMethod) -> None:
    """`merge` may be `name` from now on, in this process. Only the syncer's needs to know it."""
    MERGES.register(name, method)


def register_outer(name: str, optimizer: OuterOptimizer) -> None:
    """`outer` may be `name` from now on, in this process. Only the syncer's needs to know it."""
    OUTERS.register(name, optimizer)


def register_pacing(name: str, policy: Pacing) -> None:
    """`pacing` may be `name` from now on, in this process. Only the syncer's needs to know it."""
    PACING.register(name, policy)
