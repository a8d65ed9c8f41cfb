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


def rebalance(sizes: Sequence[int], owners: Sequence[str], shards: Sequence[str]) -> dict[int, str]:
    """Which fragments move where, so that these shards have about as many bytes each. From the one that has most to the
    one that has least, what halves their difference best, as long as that helps: so few move, and none twice."""
    loads = dict.fromkeys(shards, 0)
    owned: dict[str, list[int]] = {name: [] for name in shards}
    for fragment, name in enumerate(owners):
        if name in loads:
            loads[name] += sizes[fragment]
            owned[name].append(fragment)
    moves: dict[int, str] = {}
    while len(loads) > 1:
        low, high = min(loads, key=loads.__getitem__), max(loads, key=loads.__getitem__)
        gap = loads[high] - loads[low]
        fits = [f for f in owned[high] if f not in moves and 0 < sizes[f] < gap]
        if not fits:
            break
        moved = min(fits, key=lambda f: (abs(gap - 2 * sizes[f]), f))
        moves[moved] = low
        owned[high].remove(moved)
        loads[high] -= sizes[moved]
        loads[low] += sizes[moved]
    return moves


def reassign(
    recorded: Sequence[str],
    held: Mapping[str, frozenset[int]],
    *,
    absent: int = 0,
    successors: Mapping[str, str] | None = None,
    moved_from: Mapping[int, str] | None = None,
    leftovers: Mapping[str, frozenset[int]] | None = None,
) -> tuple[str, ...]:
    """The recorded shard of each fragment, with the shards that are here now (each with the fragments that it holds).
    Of `absent` ones it is not known who they are; what is recorded of shards that are missing stays then.

    A shard that came back without its disk has a new name and holds nothing. It takes the place of one that is missing:
    the one whose address it has (`successors`: old name -> new), and if nobody is absent any.
    If two hold a fragment, a move of it was cut short, and the record says which of them counts. One that has moved and
    is not where it went goes on where it came from (`moved_from`, its last move), if it is still there. `leftovers` are
    copies that do not count, of fragments that others have now. Raises ConfigError if one holds what is another's who
    has not got it, or too few are here.
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
    chosen = tuple(_came_or_stayed(f, now[name], held, moved_from or {}) for f, name in enumerate(recorded))
    for name, own in held.items():
        counts = [f for f in own if f < len(chosen) and f not in (leftovers or {}).get(name, ())]
        wrong = sorted(f for f in counts if chosen[f] != name and f not in held.get(chosen[f], own))
        if wrong:
            raise ConfigError(
                f"shard {name} holds fragments {wrong} of this run, which the run's record gives to another shard; "
                "start each shard on the folder that it had"
            )
    return chosen


def _came_or_stayed(
    fragment: int, owner: str, held: Mapping[str, frozenset[int]], moved_from: Mapping[int, str]
) -> str:
    before = moved_from.get(fragment, "")
    lost = owner in held and fragment not in held[owner]
    return before if lost and fragment in held.get(before, ()) else owner
