"""The syncer's recovery ladder: its own slots, then the newest good snapshot, fragment by fragment; what is newer than
both comes from the learners (core.healing). Everything that was damaged is named on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from atoll.core import EARLIER_DEFAULTS, SETTINGS_KEY, Recovery, SyncConfig, settings_of
from atoll.errors import StoreError
from atoll.store import LoadedFragment, LoadedSnapshot, RunStore, SnapshotTarget
from atoll.syncer.log_replay import replay_log
from atoll.syncer.state import Stored

SHARDS_ROW = "shards"
"""On the tape of a coordinator: the name of each fragment's shard."""
SHARD_ROW = "shard"
"""On the tape of a shard: its name, the run, and who leads it."""
PLACES_ROW = "shard places"
"""On the tape of a coordinator: by the name of each shard, where it was last met."""
MOVES_ROW = "shard moves"
"""On the tape of a coordinator: addresses of shards that were added and taken out while it ran, where fragments have
moved from, and whose copies of them do not count any more."""


def recover(
    store: RunStore | None,
    target: SnapshotTarget | None,
    level: str,
    said: list[str] | None = None,
    *,
    begin_anew: bool = False,
) -> tuple[Recovery, Stored] | None:
    """What an earlier syncer of this run left, or None for a run that begins here; `said` then hears what was found and
    could not be used. With `begin_anew` a record without any parameters is not waited for."""
    loaded = store.load() if store is not None else None
    loaded = replay_log(loaded) if loaded is not None else None
    if loaded is not None and not is_seeded(loaded.rows):
        loaded = None  # an earlier syncer died before the first parameters were complete: nobody holds any
    if loaded is not None and SHARDS_ROW in loaded.rows:
        raise StoreError("the fragments of this run are on shards; give the syncer their addresses with --shards")
    wanted = _fragments(loaded.rows) if loaded is not None else 0
    if loaded is not None:  # a seed with another number of fragments may have died here before
        loaded.fragments = {index: fragment for index, fragment in loaded.fragments.items() if index < wanted}
    if loaded is not None and len(loaded.fragments) == wanted:
        exact = level == "commit" and not loaded.problems
        return _recovery(loaded.rows, loaded.fragments, exact, "slots", loaded.problems)
    problems = list(loaded.problems) if loaded is not None else []
    snapshot, found = newest_snapshot(target) if target is not None else (None, [])
    problems += found
    if snapshot is not None and (loaded is None or snapshot.rows["run"]["run"] == loaded.rows["run"]["run"]):
        slots = loaded.fragments if loaded is not None else {}
        rows = loaded.rows if loaded is not None else with_settings(snapshot)
        taken = sorted(set(snapshot.fragments) - set(slots))
        problems.append(f"fragments {taken} come from snapshot {snapshot.url}")
        found_at = _recovery(rows, {**snapshot.fragments, **slots}, False, f"snapshot-{snapshot.label:08d}", problems)
        epoch = int(snapshot.about.get("epoch", 1)) if loaded is None else 0
        return replace(found_at[0], epoch=epoch, unwritten=taken), found_at[1]
    if loaded is not None and (loaded.fragments or not begin_anew):
        missing = sorted(set(range(wanted)) - set(loaded.fragments))
        problems.append(f"fragments {missing} are on no disk; a learner that holds them must bring them back")
        return _recovery(loaded.rows, loaded.fragments, False, "slots", problems)
    if said is not None:
        said += problems
    return None


def newest_snapshot(target: SnapshotTarget) -> tuple[LoadedSnapshot | None, list[str]]:
    try:
        return target.load_newest()
    except OSError as error:
        raise StoreError(
            f"the snapshots at {target.url} cannot be reached ({first_line(error)}), so it is not known whether there "
            "are any; check the address, --snapshot-options and the network, or leave --snapshots away"
        ) from error


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def agree_on_settings(
    asked: SyncConfig | Mapping[str, Any], rows: Mapping[str, Any] | None
) -> tuple[SyncConfig, list[str]]:
    """The settings that a run begins with (`rows` is None) or goes on with, and what its user should know of them.

    A mapping holds what was asked for; the rest is as it was, and for a run that begins the default.
    """
    if rows is None:
        return asked if isinstance(asked, SyncConfig) else SyncConfig.from_dict(asked), []
    given = asdict(asked) if isinstance(asked, SyncConfig) else dict(asked)
    before = settings_of(rows)
    old = asdict(before or SyncConfig.from_dict(EARLIER_DEFAULTS))
    if not given.get("fragments"):
        given["fragments"] = old["fragments"]
    settled = SyncConfig.from_dict({**old, **given})
    if before is None:
        guessed = sorted(set(old) - set(given) - {"learners_expected", "tokens_budget"})
        said = "the version that began this run kept no settings; those not given are the defaults of 0.3"
        return settled, [said] if guessed else []
    changed = [f"{name} {old[name]} -> {value}" for name, value in asdict(settled).items() if value != old[name]]
    return settled, [f"settings changed: {', '.join(changed)}"] if changed else []


def _recovery(
    rows: Mapping[str, Any],
    fragments: Mapping[int, LoadedFragment],
    exact: bool,
    source: str,
    problems: list[str],
) -> tuple[Recovery, Stored]:
    fragment_records = {index: dict(fragment.meta) for index, fragment in fragments.items()}
    stored = {i: (f.version, int(f.meta["checksum"]), f.arrays) for i, f in fragments.items()}
    return Recovery(rows, fragment_records, exact, source, problems), stored


def with_settings(snapshot: LoadedSnapshot) -> dict[str, Any]:
    """Its rows. Older versions had the run's settings only beside them."""
    kept = snapshot.about.get("config")
    return {**({SETTINGS_KEY: kept} if kept is not None else {}), **snapshot.rows}


def is_seeded(rows: Mapping[str, Any]) -> bool:
    return isinstance(rows.get("run"), Mapping) and bool(rows["run"].get("seeded"))


def _fragments(rows: Mapping[str, Any]) -> int:
    return int(rows["run"]["fragments"])
