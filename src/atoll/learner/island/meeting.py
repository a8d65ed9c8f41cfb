"""How the ranks of one learner meet: what must be the same on all of them is compared before anything else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence

from atoll.errors import AtollError, ConfigError
from atoll.learner.island.link import SPEAKER, RankLink


def build() -> str:
    """Atoll's version, as the package says: it may run from a folder, where nothing is installed. (A room imports none
    above it, so it is asked for where it was loaded.)"""
    return str(sys.modules["atoll"].__version__)


def meet(link: RankLink, look: Callable[[], Mapping[str, str]], like: Sequence[int] = ()) -> None:
    """What must be the same on all ranks is compared before anything else. A rank that finds its own model wanting
    says so, and all of them end with that. `like`: for each rank, the one that it must be like; else all rank 0."""
    failed: AtollError | None = None
    about: Mapping[str, str] = {}
    try:
        about = look()
    except AtollError as error:
        failed = error
    told = [json.loads(text) for text in link.compare(json.dumps({"error": str(failed)} if failed else dict(about)))]
    if failed is not None:
        raise failed
    for rank, other in enumerate(told):
        if "error" in other:
            raise ConfigError(f"rank {rank} of this learner: {other['error']}")
        first = like[rank] if like else SPEAKER
        for what, mine in told[first].items():
            if other.get(what) != mine:
                raise ConfigError(
                    f"the ranks of this learner differ in their {what}: rank {first} has {mine}, rank {rank} has "
                    f"{other.get(what)}; start all ranks from the same script, environment and installation"
                )
