"""The first rung of a coordinator's ladder: facts from its own tape or a snapshot, fragments from its shards. What no
shard has comes from the learners, as ever (core.healing)."""

from __future__ import annotations

from dataclasses import replace

from atoll.core import Recovery
from atoll.errors import StoreError
from atoll.store import RunStore, SnapshotTarget
from atoll.syncer.begin import tell
from atoll.syncer.options import SyncerOptions
from atoll.syncer.recover import SHARDS_ROW, is_seeded, newest_snapshot, with_settings
from atoll.syncer.shard_fleet import Lead, MoveRecord, ShardFleet
from atoll.syncer.state import Stored
from atoll.wire import ClientOptions

Found = tuple[Recovery, Stored]
PATIENCE_S = 10.0
"""How long a coordinator that continues a run waits for shards that may be starting beside it: Python and the kernels
take two to five seconds. One that comes later is taken in then."""
PATIENCE_AGAIN_S = 2.0
"""The same for one that begins anew: who is there has just been seen."""


def find_rows(store: RunStore | None, target: SnapshotTarget | None) -> tuple[Found | None, list[str]]:
    """What is left of the run but for its fragments, and what was wrong with the rest."""
    loaded = store.load() if store is not None else None
    if loaded is not None and is_seeded(loaded.rows):
        if SHARDS_ROW not in loaded.rows:
            raise StoreError("the fragments of this run are in its run folder, not on shards; go on without --shards")
        return (Recovery(loaded.rows, {}, False, "shards", loaded.problems), {}), []
    snapshot, problems = newest_snapshot(target) if target is not None else (None, [])
    if snapshot is None:
        return None, problems
    found = Recovery(with_settings(snapshot), {}, False, f"snapshot-{snapshot.label:08d} and shards", problems)
    return (replace(found, epoch=int(snapshot.about.get("epoch", 1))), {}), []


async def lead_shards(
    options: SyncerOptions, found: Recovery | None, epoch: int, patience_s: float = PATIENCE_S
) -> ShardFleet:
    """The shards, led by this coordinator. A run begins when all of them are there; one that goes on does so with those
    that are there soon, and what is on the others waits for them."""

    def reach(address: str) -> ClientOptions:
        return ClientOptions(address=address, token=options.shard_token, tls_ca=options.shard_tls_ca)

    moves = MoveRecord.of(found.rows if found is not None else {})
    places = [reach(address) for address in moves.places(options.shards)]
    for address in set(moves.removed) & set(options.shards):
        tell(f"the shard at {address} was taken out of this run; `atoll shards add` brings it back")
    run = str(found.rows["run"]["run"]) if found is not None else ""
    lead = Lead(run, epoch, options.durability, options.durability_interval_s, options.record)
    fleet = ShardFleet(places, lead, tell, moves, reach)
    await fleet.attach(patience_s if found is not None else None)
    return fleet


def with_shards(found: Recovery, fleet: ShardFleet, level: str) -> Found:
    """The run as its shards hold it."""
    wanted = int(found.rows["run"]["fragments"])
    fleet.settle_recorded(found.rows, wanted)
    owners = [fleet.link_of(fragment) for fragment in range(wanted)]
    records = {f: link.records[f] for f, link in enumerate(owners) if f in link.records}
    away = frozenset(f for f, link in enumerate(owners) if link.away)
    problems = [*found.problems, *(f"shard {link.name}: {text}" for link in fleet.links for text in link.problems)]
    missing = sorted(set(range(wanted)) - records.keys() - away)
    if away:
        problems.append(f"the shards of fragments {sorted(away)} are not there; they go on when they are")
    if missing:
        problems.append(f"fragments {missing} are on no shard; a learner that holds them must bring them back")
    exact = level == "commit" and not problems
    # What lies with a shard that had the fragment before is a copy.
    handed = [one for link in fleet.links for one in link.handed if owners[one.contribution.id.fragment] is link]
    stored: Stored = {f: (int(record["version"]), int(record["checksum"]), {}) for f, record in records.items()}
    return replace(found, fragment_records=records, exact=exact, problems=problems, handed=handed, away=away), stored
