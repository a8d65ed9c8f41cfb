"""Defects of the fabric put in on purpose: at least one for each party that is not a syncer or a learner.

As in `sim_mutants` each is a small mistake that a person could make, applied by patching for the length of one test.
The scenarios are made for them, so that the proof takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pytest import MonkeyPatch

from atoll.core import StoreOutcome, SyncConfig
from atoll.errors import AtollError
from atoll.instruments.sim import store
from atoll.instruments.sim.scenario import LearnerSpec, Scenario, SimFault
from atoll.syncer import (
    relay_merge,
    relay_peers,
    replica,
    replicate,
    shard_arrays,
    shard_changes,
    shard_moves,
    sharded,
    state,
)

LEARNERS = (
    LearnerSpec(step_ns=100_000_000, tokens=5),
    LearnerSpec(step_ns=100_000_000, tokens=16),
    LearnerSpec(step_ns=130_000_000, tokens=3),
)
SECONDS = 30.0


def scenario(
    *faults: SimFault,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    seconds: float = SECONDS,
    **changes: Any,
) -> Scenario:
    settings = {"fragments": 4, "learners_expected": 3, "sync_every": 8, **(config or {})}
    return Scenario(seed, SyncConfig(**settings), LEARNERS, seconds=seconds, faults=faults, **changes)


FREEZE = SimFault("freeze", "syncer", 8.0, 12.0)
"""A primary that sleeps while its standby takes over, and wakes up."""
CUT_OFF = SimFault("partition", "syncer~standby", 8.0, 15.0)
"""A primary that its standby cannot hear any more, and learners can."""
FOLDER = scenario(FREEZE, standby="folder", standby_after_s=5.0)
REPLICATED = scenario(FREEZE, standby="replicate", standby_after_s=5.0)
DIVIDED = scenario(CUT_OFF, standby="replicate", standby_after_s=5.0)
SHARDED = scenario(SimFault("kill", "shard-0", 8.0, 4.0), SimFault("kill", "shard-1", 16.0, 3.0), shards=2)
LED_TWICE = scenario(FREEZE, SimFault("cut", "syncer~shard-1", 20.0), shards=2, standby="folder", standby_after_s=5.0)
RELAYED = scenario(
    SimFault("kill", "relay-0", 8.0, 4.0),
    SimFault("freeze", "relay-0", 15.0, 3.0),
    SimFault("cut", "relay-0~syncer", 21.0),
    relayed=3,
)

WIPED_TWICE = scenario(
    SimFault("wipe", "syncer", 6.0), SimFault("kill", "syncer", 14.0), SimFault("wipe", "syncer", 20.0), relayed=3
)
"""Twice a syncer without a state goes on from what learners hold, under an epoch above those they have seen."""

HELD_LONG = scenario(
    SimFault("mute", "learner-2", 5.0, 6.0),
    SimFault("kill", "relay-0", 8.0, 4.0),
    config={"quorum": "all"},
    relayed=2,
)
"""Rounds wait for a learner whose contributions do not arrive; what they have of the others waits at the relay."""

SITE_AND_SHARDS = scenario(
    SimFault("kill", "relay-0", 30.0, 3.0),
    SimFault("kill", "shard-0", 53.0, 3.0),
    SimFault("cut", "relay-0~shard-1", 58.0),
    SimFault("partition", "relay-0~shard-1", 60.0, 4.0),
    SimFault("freeze", "relay-0", 66.0, 2.0),
    SimFault("move", "shard-0", 70.0, variant="1"),
    SimFault("kill", "syncer", 74.0),
    shards=2,
    relayed=2,
    seconds=100.0,
)
"""Learners look for their relay every 20 s."""
HELD_FOR_SHARDS = scenario(
    SimFault("mute", "learner-1", 25.0, 6.0),
    SimFault("kill", "relay-0", 28.0, 4.0),
    config={"quorum": "all"},
    relayed=2,
    shards=2,
    seconds=40.0,
)
QUIET = scenario(relayed=3)
MOVED = scenario(
    SimFault("move", "shard-1", 8.0, variant="0,2"),
    SimFault("add", "shard-2", 12.0),
    SimFault("remove", "shard-0", 16.0),
    SimFault("kill", "syncer", 20.0),
    SimFault("kill", "shard-1", 24.0, 3.0),
    shards=2,
    spares=1,
)
"""Fragments go from shard to shard and stay in use; then the coordinator and a shard come back."""
NOT_MOVED = scenario(
    SimFault("disk_full", "shard-1", 7.0, 3.0), SimFault("move", "shard-1", 8.0, variant="0,1,2,3"), shards=2
)
"""The shard that is to have the fragments cannot write them."""
CUT_SHORT = scenario(
    SimFault("disk_slow", "shard-1", 7.0, 20.0, 50.0),
    SimFault("move", "shard-1", 8.0, variant="0"),
    SimFault("cut", "syncer~shard-1", 12.0),
    seed=1,
    shards=2,
    commit_ns=100_000_000,
    sync_ns=100_000_000,
)
"""The link breaks while the shard that is to have a fragment writes it, which it does to the end."""
NOT_ADDED = scenario(
    SimFault("disk_full", "syncer", 7.0, 9.0),
    SimFault("add", "shard-2", 8.0),
    SimFault("kill", "shard-0", 10.0, 25.0),
    SimFault("give-up", "shard-0", 17.0),
    shards=2,
    spares=1,
)
"""A shard could not come in. It has nothing of the run, and no fragment may be given to it."""
NOT_REMOVED = scenario(
    SimFault("add", "shard-2", 6.0),
    SimFault("disk_full", "syncer", 8.0, 6.0),
    SimFault("remove", "shard-2", 9.0),
    SimFault("move", "shard-2", 16.0, variant="0"),
    SimFault("kill", "syncer", 19.0),
    config={"fragments": 2},
    shards=2,
    spares=1,
)
"""A shard could not be taken out, stays and is used; the next coordinator must know of it."""
BEGUN_TWICE = scenario(
    SimFault("kill", "syncer", 1.2), SimFault("remove", "shard-1", 3.2), shards=2, commit_ns=200_000_000
)
"""A coordinator dies while its shards write the first parameters; the next one begins a run on other shards."""
BEGUN_FULL = scenario(
    SimFault("kill", "syncer", 0.7),
    SimFault("disk_full", "syncer", 0.8, 8.0),
    SimFault("add", "shard-1", 2.6),
    shards=1,
    spares=1,
    commit_ns=200_000_000,
)
"""The same, and the tape of the first stays on a full disk."""
FORGOTTEN = scenario(
    SimFault("disk_full", "syncer", 0.55, 19.0),
    SimFault("partition", "learner-0", 0.75, 20.0),
    SimFault("kill", "syncer", 6.0),
    shards=2,
    config={"quorum": "all"},
)
"""A coordinator whose disk has nothing of the run goes on from what learners hold, with the shards that it leads."""
GIVEN_UP = scenario(SimFault("kill", "shard-1", 8.0, 15.0), SimFault("give-up", "shard-1", 10.0), shards=2)


@dataclass(frozen=True, slots=True)
class FabricMutant:
    breaks: str
    apply: Callable[[MonkeyPatch], None]
    scenario: Scenario
    invariants: tuple[str, ...]
    """Any of which shows it."""


# ---------------------------------------------------------------- a standby


def _fenced_primary_writes(patch: MonkeyPatch) -> None:
    patch.setattr(store.VirtualStore, "check_epoch", lambda self: None)


def _published_without_the_copy(patch: MonkeyPatch) -> None:
    commit = replicate.Replicator.commit

    async def at_once(self: Any, item: Any, arrays: Any) -> None:
        self._loop.create_task(commit(self, item, {name: array.copy() for name, array in arrays.items()}))

    patch.setattr(replicate.Replicator, "commit", at_once)


def _primary_goes_on_alone(patch: MonkeyPatch) -> None:
    def lost(self: Any, why: str, peer: Any) -> None:
        if peer is self._peer and not self._closed:
            self._go_alone(why)

    patch.setattr(replicate.Replicator, "_lost", lost)


def _standby_keeps_its_epoch(patch: MonkeyPatch) -> None:
    from atoll.instruments.sim import syncer_process

    patch.setattr(syncer_process, "epoch_of", lambda kept, found, hold, take_over: 1)


def _standby_has_nothing(patch: MonkeyPatch) -> None:
    async def nothing(self: Any, values: Any, data: Any) -> dict[str, Any]:
        return {"checksum": int(values["checksum"])}

    patch.setattr(replica.StandbyReplica, "_take_commit", nothing)


# ---------------------------------------------------------------- shards


def _told_before_the_shard_has_it(patch: MonkeyPatch) -> None:
    store_there = sharded.ShardedPlatform.store

    def at_once(self: Any, item: Any, done: Any) -> None:
        store_there(self, item, lambda outcome: None)
        done(StoreOutcome())

    patch.setattr(sharded.ShardedPlatform, "store", at_once)


def _shard_forgets_its_disk(patch: MonkeyPatch) -> None:
    """It begins with zeros and says that it has what it had."""
    lay_out = shard_arrays.ShardArrays.lay_out

    def forgets(self: Any, values: Any) -> None:
        for one in self._loaded.fragments.values():
            one.arrays = {}
        lay_out(self, values)

    patch.setattr(shard_arrays.ShardArrays, "lay_out", forgets)


def _shard_follows_anybody(patch: MonkeyPatch) -> None:
    """An older coordinator that comes back leads it again."""
    patch.setattr(shard_arrays.ShardArrays, "_check_leader", lambda self, values: None)
    patch.setattr(store.VirtualStore, "check_epoch", lambda self: None)


# ---------------------------------------------------------------- fragments that move


def _deleted_before_the_tape_says_so(patch: MonkeyPatch) -> None:
    copy = shard_changes.ShardChanges._copy

    async def hasty(self: Any, item: Any, source: Any, target: Any) -> None:
        await copy(self, item, source, target)
        await self._drop(source, item.fragment)

    patch.setattr(shard_changes.ShardChanges, "_copy", hasty)


def _moved_into_memory_alone(patch: MonkeyPatch) -> None:
    async def nothing(self: Any, item: Any) -> None:
        return

    patch.setattr(shard_moves.FragmentMoves, "_to_disk", nothing)


def _tape_never_hears_of_a_move(patch: MonkeyPatch) -> None:
    async def nothing(self: Any, names: Any, moves: Any) -> None:
        return

    patch.setattr(shard_changes.ShardChanges, "_record", nothing)


def _momentum_stays_behind(patch: MonkeyPatch) -> None:
    take_in = state.ModelState.take_in

    def without(self: Any, fragment: int, version: int, checksum: int, named: Any, ring: Any) -> None:
        only = {name: array if name == "theta" else array * 0 for name, array in named.items()}
        take_in(self, fragment, version, checksum, only, ring)

    patch.setattr(state.ModelState, "take_in", without)


def _a_move_that_failed_counts(patch: MonkeyPatch) -> None:
    switch = shard_changes.ShardChanges._copy_and_switch

    async def anyway(self: Any, fragment: int, source: Any, target: Any) -> None:
        try:
            await switch(self, fragment, source, target)
        except AtollError:
            names = [target.name if f == fragment else name for f, name in enumerate(self._fleet.names)]
            self._fleet.follow(names, self._fleet.moves)
            raise

    patch.setattr(shard_changes.ShardChanges, "_copy_and_switch", anyway)


def _a_failed_move_deletes(patch: MonkeyPatch) -> None:
    """Both copies go, and not that of the shard to which it should have gone."""
    drop, switch = shard_changes.ShardChanges._drop, shard_changes.ShardChanges._copy_and_switch

    async def both(self: Any, fragment: int, source: Any, target: Any) -> None:
        try:
            await switch(self, fragment, source, target)
        except AtollError:
            await drop(self, source, fragment)
            raise

    patch.setattr(shard_changes.ShardChanges, "_copy_and_switch", both)


# ---------------------------------------------------------------- a relay


def _lost_at_the_relay_counts(patch: MonkeyPatch) -> None:
    """What a dead relay held is merged as nothing, and counted as merged."""
    group = relay_peers.RelayPeers._group

    async def nothing(self: Any, state: Any, wanted: Any, norms: Any, peer: Any) -> Any:
        found = await group(self, state, wanted, norms, peer)
        return None if isinstance(found, tuple) else found

    patch.setattr(relay_peers.RelayPeers, "_group", nothing)


def _lost_at_the_relay_counts_on_a_shard(patch: MonkeyPatch) -> None:
    """A shard merges what it has, and says of what died with a relay that it is in there."""
    gather = shard_arrays.ShardArrays._gather

    async def found(self: Any, merge: Any, at: Any) -> Any:
        there = await gather(self, merge, at)
        if not isinstance(there, tuple):
            return there
        kept = [i for i, one in enumerate(merge.contributions) if one not in there]
        ids, weights = [merge.contributions[i] for i in kept], [merge.weights[i] for i in kept]
        rest = replace(merge, contributions=tuple(ids), weights=tuple(weights))
        return await gather(self, rest, [at[i] for i in kept]) if kept else there

    patch.setattr(shard_arrays.ShardArrays, "_gather", found)


def _relay_forgets_nothing(patch: MonkeyPatch) -> None:
    answer = relay_merge.SiteMerges._answer

    async def keeps(self: Any, method: str, values: Any, data: Any) -> Any:
        return ({}, b"") if method == "forget" else await answer(self, method, values, data)

    patch.setattr(relay_merge.SiteMerges, "_answer", keeps)


def _relay_sends_one_for_all(patch: MonkeyPatch) -> None:
    """The payload of a group is its first contribution alone."""
    gather = relay_merge.SiteMerges._gather

    async def first(self: Any, link: Any, values: dict[str, Any]) -> Any:
        values["ids"], values["weights"] = values["ids"][:1], [sum(values["weights"])]
        return await gather(self, link, values)

    patch.setattr(relay_merge.SiteMerges, "_gather", first)


FABRIC_MUTANTS: dict[str, FabricMutant] = {
    apply.__name__[1:]: FabricMutant(breaks, apply, made_for, invariants)
    for apply, breaks, made_for, invariants in (
        (_fenced_primary_writes, "a primary that was overtaken writes on", FOLDER, ("I11", "I16", "I1")),
        (_published_without_the_copy, "a version is told before the standby has it", REPLICATED, ("I17",)),
        (_primary_goes_on_alone, "a primary whose standby is away publishes", DIVIDED, ("I4", "I16")),
        (_standby_keeps_its_epoch, "a standby serves under its primary's epoch", REPLICATED, ("I11",)),
        (_standby_has_nothing, "a standby says that it has what it has not", REPLICATED, ("I17", "I4")),
        (_told_before_the_shard_has_it, "a version is told before its shard has it", SHARDED, ("I4",)),
        (_shard_forgets_its_disk, "a shard that is back begins with zeros", SHARDED, ("I1", "I9", "I5", "assert")),
        (_shard_follows_anybody, "a shard is led by an older coordinator again", LED_TWICE, ("I18", "I16", "I11")),
        (_deleted_before_the_tape_says_so, "a shard deletes what is still its own", MOVED, ("I20",)),
        (_moved_into_memory_alone, "a fragment moves to a shard that has it in memory alone", MOVED, ("I20",)),
        (_tape_never_hears_of_a_move, "a move is on no tape", MOVED, ("I18", "I20")),
        (_momentum_stays_behind, "a fragment moves without its momentum", MOVED, ("I9",)),
        (_a_move_that_failed_counts, "a move that failed counts", NOT_MOVED, ("I20",)),
        (_a_failed_move_deletes, "a move that failed deletes what was there", NOT_MOVED, ("I20",)),
        (_lost_at_the_relay_counts, "what died with a relay counts as merged", HELD_LONG, ("I19", "assert", "crash")),
        (
            _lost_at_the_relay_counts_on_a_shard,
            "so does a shard",
            HELD_FOR_SHARDS,
            ("I19", "assert", "crash"),
        ),
        (_relay_forgets_nothing, "a relay keeps what was merged long ago", QUIET, ("I10",)),
        (_relay_sends_one_for_all, "a relay sends one contribution for all", RELAYED, ("I19",)),
    )
}
