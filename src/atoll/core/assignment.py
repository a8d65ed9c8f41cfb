"""Which shard has which fragment. Decided from the sizes, and then kept: a fragment's arrays are on its shard, until it
is moved."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from atoll.errors import ConfigError


def assign(sizes: Sequence[int], shards: Sequence[str]) -> tuple[str, ...]:
    """The shard of each fragment, balanced by bytes: the largest first, each to the shard that has least."""
    if not shards:
        raise ConfigError("a run with shards needs at least one; give --shards HOST:PORT")
    return tuple(share_out(sizes, range(len(sizes)), dict.fromkeys(shards, 0)).values())


def share_out(sizes: Sequence[int], fragments: Sequence[int], loads: Mapping[str, int]) -> dict[int, str]:
    """A shard for each of these fragments, where shards have these loads already."""
    heap = [(load, place, name) for place, (name, load) in enumerate(loads.items())]
    heapq.heapify(heap)
    chosen: dict[int, str] = {}
    for fragment in sorted(fragments, key=lambda f: (-sizes[f], f)):
        load, place, name = heapq.heappop(heap)
        chosen[fragment] = name
        heapq.heappush(heap, (load + sizes[fragment], place, name))
    return dict(sorted(chosen.items()))


def reassign(
    recorded: Sequence[str],
    held: Mapping[str, frozenset[int]],
    *,
    absent: int = 0,
    successors: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """The recorded shard of each fragment, with the shards that are here now (each with the fragments that it holds).
    Of `absent` ones it is not known who they are; what is recorded of shards that are missing stays then.

    A shard that came back without its disk has a new name and holds nothing. It takes the place of one that is missing:
    the one whose address it has (`successors`: old name -> new), and if nobody is absent any.
    If two hold a fragment, a move of it was cut short, and the record says which of them counts. Raises ConfigError if
    one holds what is another's who has not got it, or too few are here.
    """
    missing = sorted(set(recorded) - held.keys())
    spare = sorted(name for name in held.keys() - set(recorded) if not held[name])
    now = {old: old for old in recorded}
    now |= {old: new for old, new in (successors or {}).items() if old in missing and new in spare}
    if not absent:
        open_places = [old for old in missing if now[old] == old]
        free = [new for new in spare if new not in now.values()]
        if len(open_places) > len(free):
            raise ConfigError(
                f"the run has its fragments on {len(set(recorded))} shards, and {len(open_places) - len(free)} of them "
                f"({', '.join(open_places[:4])}) are not among those given; give all of them with --shards"
            )
        now |= dict(zip(open_places, free, strict=False))
    chosen = tuple(now[name] for name in recorded)
    for name, own in held.items():
        wrong = sorted(f for f in own if f < len(chosen) and chosen[f] != name and f not in held.get(chosen[f], own))
        if wrong:
            raise ConfigError(
                f"shard {name} holds fragments {wrong} of this run, which the run's record gives to another shard; "
                "start each shard on the folder that it had"
            )
    return chosen
