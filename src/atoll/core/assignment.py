"""Which shard has which fragment. Decided once, from the sizes, and then kept: a fragment's arrays are on its shard."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from atoll.errors import ConfigError


def assign(sizes: Sequence[int], shards: Sequence[str]) -> tuple[str, ...]:
    """The shard of each fragment, balanced by bytes: the largest first, each to the shard that has least."""
    if not shards:
        raise ConfigError("a run with shards needs at least one; give --shards HOST:PORT")
    loads = [(0, place) for place in range(len(shards))]
    chosen = [0] * len(sizes)
    for fragment in sorted(range(len(sizes)), key=lambda f: (-sizes[f], f)):
        load, place = heapq.heappop(loads)
        chosen[fragment] = place
        heapq.heappush(loads, (load + sizes[fragment], place))
    return tuple(shards[place] for place in chosen)


def reassign(recorded: Sequence[str], held: Mapping[str, frozenset[int]]) -> tuple[str, ...]:
    """The recorded shard of each fragment, with the shards that are here now (each with the fragments that it holds).

    A shard that came back without its disk has a new name and holds nothing: it takes the place of one that is missing.
    Raises ConfigError if two shards hold one fragment, or one holds what is another's, or too few are here.
    """
    fragments = range(len(recorded))
    for fragment in fragments:
        holders = sorted(name for name, own in held.items() if fragment in own)
        if len(holders) > 1:
            raise ConfigError(
                f"shards {holders[0]} and {holders[1]} both hold fragment {fragment} of this run; one of them was "
                "started on a copy of the other's folder: end it, and start it on its own"
            )
    missing = sorted(set(recorded) - held.keys())
    spare = sorted(name for name in held.keys() - set(recorded) if not held[name])
    if len(missing) > len(spare):
        raise ConfigError(
            f"the run has its fragments on {len(set(recorded))} shards, and {len(missing) - len(spare)} of them "
            f"({', '.join(missing[:4])}) are not among those given; give all of them with --shards"
        )
    now = {old: old for old in held} | dict(zip(missing, spare, strict=False))
    chosen = tuple(now[name] for name in recorded)
    for name, own in held.items():
        wrong = sorted(fragment for fragment in own if fragment < len(chosen) and chosen[fragment] != name)
        if wrong:
            raise ConfigError(
                f"shard {name} holds fragments {wrong} of this run, which the run's record gives to another shard; "
                "start each shard on the folder that it had"
            )
    return chosen
