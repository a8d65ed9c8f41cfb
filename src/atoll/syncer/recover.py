"""The syncer's recovery ladder: its own slots, then the newest good snapshot, fragment by fragment; what is newer than
both comes from the learners (core.healing). Everything that was damaged is named on the way."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict, replace
from typing import Any

from atoll.core.config import SyncConfig
from atoll.core.durable import Recovery, settings_of
from atoll.store import LoadedFragment, RunStore, SnapshotTarget
from atoll.syncer.state import Stored


def recover(store: RunStore | None, target: SnapshotTarget | None, level: str) -> tuple[Recovery, Stored] | None:
    """What an earlier syncer of this run left, or None for a run that begins here."""
    loaded = store.load() if store is not None else None
    if loaded is not None and not _seeded(loaded.rows):
        loaded = None  # an earlier syncer died before the first parameters were complete: nobody holds any
    wanted = _fragments(loaded.rows) if loaded is not None else 0
    if loaded is not None:  # a seed with another number of fragments may have died here before
        loaded.fragments = {index: fragment for index, fragment in loaded.fragments.items() if index < wanted}
    if loaded is not None and len(loaded.fragments) == wanted:
        exact = level == "commit" and not loaded.problems
        return _recovery(loaded.rows, loaded.fragments, exact, "slots", loaded.problems)
    problems = list(loaded.problems) if loaded is not None else []
    snapshot, found = target.load_newest() if target is not None else (None, [])
    problems += found
    if snapshot is not None and (loaded is None or snapshot.rows["run"]["run"] == loaded.rows["run"]["run"]):
        slots = loaded.fragments if loaded is not None else {}
        rows = loaded.rows if loaded is not None else snapshot.rows
        taken = sorted(set(snapshot.fragments) - set(slots))
        problems.append(f"fragments {taken} come from snapshot {snapshot.url}")
        found_at = _recovery(rows, {**snapshot.fragments, **slots}, False, f"snapshot-{snapshot.label:08d}", problems)
        if loaded is not None:
            return found_at
        return replace(found_at[0], epoch=int(snapshot.about.get("epoch", 1))), found_at[1]
    if loaded is not None and loaded.fragments:
        missing = sorted(set(range(wanted)) - set(loaded.fragments))
        problems.append(f"fragments {missing} are on no disk; a learner that holds them must bring them back")
        return _recovery(loaded.rows, loaded.fragments, False, "slots", problems)
    return None


def settle(config: SyncConfig, given: Set[str] | None, rows: Mapping[str, Any]) -> tuple[SyncConfig, list[str]]:
    """The settings that the run goes on with: what was `given` (None: all of `config`), else what it had before. Also
    says what a user should know of it."""
    before = settings_of(rows)
    if before is None:
        if given is None:
            return config, []
        return config, ["an older version began this run and kept no settings: those not given are today's defaults"]
    old, new = asdict(before), asdict(config)
    settled = new if given is None else {name: new[name] if name in given else old[name] for name in new}
    settled["fragments"] = settled["fragments"] or old["fragments"]
    changed = [f"{name} {old[name]} -> {value}" for name, value in settled.items() if value != old[name]]
    return SyncConfig.from_dict(settled), [f"settings changed: {', '.join(changed)}"] if changed else []


def _recovery(
    rows: Mapping[str, Any],
    fragments: Mapping[int, LoadedFragment],
    exact: bool,
    source: str,
    problems: list[str],
) -> tuple[Recovery, Stored]:
    columns = {index: dict(fragment.meta) for index, fragment in fragments.items()}
    stored = {i: (f.version, int(f.meta["checksum"]), f.arrays) for i, f in fragments.items()}
    return Recovery(rows, columns, exact, source, problems), stored


def _seeded(rows: Mapping[str, Any]) -> bool:
    return isinstance(rows.get("run"), Mapping) and bool(rows["run"].get("seeded"))


def _fragments(rows: Mapping[str, Any]) -> int:
    return int(rows["run"]["fragments"])
