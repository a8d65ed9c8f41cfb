"""What the syncer must find again after a kill -9, as plain JSON values, and how the machine is built from it.

Two kinds of record, so that a commit writes one fragment's worth and nothing else:

    record   one per fragment, written together with its parameters: version, rhythm, norms, and the fragment's share
             of the token ledger, with the last contributions of each learner that are inside. Whatever the age of the
             other records, each is exact for its own version, so no commit has to agree with another one on disk.
    rows     small facts with a key each, appended to the tape before anything that follows from them is said: the run
             itself and its settings, who is a member under which generation, tokens of generations that are over, data
             leases.

Contributions that were received and not merged are not written: their learners still hold them and hear, when they come
back, that they must hand them over again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from atoll.core.config import LATER_SETTINGS, SyncConfig
from atoll.core.ledger import Ledger
from atoll.core.membership import MERGED_KEPT, Member, Membership, MemberState
from atoll.core.merging import handed_after, norms_after
from atoll.core.messages import TensorSpec
from atoll.core.round_scheduler import RoundScheduler
from atoll.core.rounds import ContributionId, HandedOver
from atoll.errors import ConfigError, StoreError

ROWS_FORMAT = 1
ROUNDS_SKIPPED = 1000
"""Round numbers left out after a restart: rounds that were launched and not committed are not on record, and their
numbers must not be used for others."""
GENERATIONS_SKIPPED = 100
"""The same for generations, per epoch: more restarts of one learner than happen while a disk is full."""
SETTINGS_KEY = "settings"
"""Of the row that holds the run's settings."""
EPOCH_KEY = "epoch"
"""Of the row that holds an epoch which was counted on from what learners had seen: later ones are above it."""

FragmentRecord = dict[str, Any]
Rows = dict[str, Any]


@dataclass(slots=True)
class Recovery:
    """What the disk (or a snapshot) gave back."""

    rows: Mapping[str, Any]
    fragment_records: Mapping[int, FragmentRecord]
    """By fragment; a fragment that is missing was damaged beyond use and must come from a learner."""
    exact: bool
    """True if nothing newer can have been published: every commit was on disk before its publication."""
    source: str = "slots"
    """The rung of the ladder: "slots" or the snapshot's name."""
    problems: Sequence[str] = field(default_factory=list)
    epoch: int = 0
    """The epoch of the syncer that wrote it, where that is not the state folder's own (a snapshot)."""
    unwritten: Sequence[int] = ()
    """Fragments that came from a snapshot and are not in the state folder."""
    handed: Sequence[HandedOver] = ()
    """What learners that left had handed over and no round had merged."""
    away: frozenset[int] = frozenset()
    """Fragments whose shard is not there: nothing is known of them, and nothing is asked of learners."""


# ---------------------------------------------------------------- writing


def run_row(run: str, tensors: Sequence[TensorSpec], fragments: int, seeded: bool) -> dict[str, Any]:
    listed = [[t.name, list(t.shape), t.dtype, t.merge] for t in tensors]
    return {"format": ROWS_FORMAT, "run": run, "fragments": fragments, "tensors": listed, "seeded": seeded}


def member_key(learner: str) -> str:
    return f"member/{learner}"


def member_row(member: Member) -> dict[str, Any]:
    row = {"generation": member.generation, "instance": member.instance, "state": str(member.state)}
    return {**row, "rank": member.rank, "proven": member.proven}


def version_key(fragment: int) -> str:
    return f"version/{fragment}"


def column_of(book: RoundScheduler, membership: Membership, ledger: Ledger, fragment: int) -> FragmentRecord:
    """The fragment's record as things stand, with no merge of it under way."""
    return _column(book, membership, ledger, fragment, (), book.tracks[fragment].checksum)


def record_after_merge(
    book: RoundScheduler, membership: Membership, ledger: Ledger, fragment: int, checksum: int
) -> FragmentRecord:
    """The record as it will be once the merge that is under way is committed: it is written before the machine hears
    that the merge is done."""
    return _column(book, membership, ledger, fragment, book.merging(fragment), checksum)


def _column(
    book: RoundScheduler, membership: Membership, ledger: Ledger, fragment: int, items: Sequence[Any], checksum: int
) -> FragmentRecord:
    track = book.tracks[fragment]
    version = track.version + (1 if items else 0)
    folded, lines = ledger.fragment_record(fragment)
    tokens: dict[tuple[str, int], int] = {}
    fresh: dict[tuple[str, int], list[list[int]]] = {}
    for item in items:
        key = (item.id.learner, item.id.generation)
        tokens[key] = tokens.get(key, 0) + item.tokens
        fresh.setdefault(key, []).append([item.id.seq, version])
    accounts = []
    for line in lines:
        key = (line[0], line[1])
        member = membership.members.get(line[0])
        current = member is not None and member.generation == line[1]
        known = [list(pair) for pair in member.merged[fragment]] if member is not None and current else []
        merged = (known + fresh.get(key, []))[-MERGED_KEPT:]
        accounts.append([line[0], line[1], line[2], line[3] + tokens.get(key, 0), line[4], merged])
    norms = norms_after(book.config, track, items)
    return {
        "version": version,
        "checksum": checksum,
        "due_step": track.due_step,
        "norms": [norm for _, norm in norms],
        "norm_learners": [learner for learner, _ in norms],
        "contributions": track.contributions_merged + len(items),
        "rounds_started": book.rounds_started,
        "clock_step": book.clock_last,
        "joined_max": membership.joined_max,
        "handed": [list(entry) for entry in handed_after(track, items, version, membership)],
        "folded": folded,
        "accounts": accounts,
        "sizes": {m.learner: m.size_confirmed for m in membership.members.values() if m.size_confirmed},
        **({"excess": ledger.excess} if ledger.excess else {}),
    }


# ---------------------------------------------------------------- reading


def tensors_of(rows: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """The model that the run row describes."""
    run = rows.get("run")
    if not isinstance(run, Mapping) or run.get("format") != ROWS_FORMAT:
        raise StoreError(
            f"the state's run record is of format {run.get('format') if isinstance(run, Mapping) else run!r}, this "
            f"version reads {ROWS_FORMAT}; use the version of atoll that wrote it, or start a new run folder"
        )
    return tuple(TensorSpec(str(n), tuple(map(int, s)), str(d), str(m)) for n, s, d, m in run["tensors"])


def settings_of(rows: Mapping[str, Any]) -> SyncConfig | None:
    """The run's settings as they last were; None if an older version wrote the record, which did not keep them."""
    row = rows.get(SETTINGS_KEY)
    if row is None:
        return None
    try:
        return SyncConfig.from_dict({**LATER_SETTINGS, **row})
    except (ConfigError, TypeError) as error:
        raise StoreError(
            f"the state's settings make no sense to this version of atoll ({error}); use the version that wrote them"
        ) from error


def restore_members(
    rows: Mapping[str, Any], fragment_records: Mapping[int, FragmentRecord], fragments: int, now_ns: int
) -> Membership:
    """Everybody who was in the run, away until heard of again."""
    membership = Membership()
    known: dict[str, dict[str, Any]] = {}
    for fragment_record in fragment_records.values():
        # Only if the tape was lost does a record know of a member that no row knows.
        for learner, generation, *_ in fragment_record["accounts"]:
            if generation > known.get(learner, {"generation": 0})["generation"]:
                known[learner] = {"generation": generation, "instance": "", "state": str(MemberState.LOST)}
    for key, row in rows.items():
        if key.startswith("member/") and row["generation"] >= known.get(key[7:], {"generation": 0})["generation"]:
            known[key[7:]] = row
    for learner, row in sorted(known.items()):
        state = MemberState(row["state"])
        member = Member(learner, int(row["generation"]), str(row["instance"]), -1, state, now_ns)
        if state not in (MemberState.LEFT, MemberState.LOST):
            member.state, member.away_ns = MemberState.AWAY, now_ns
        member.rank = int(row.get("rank", -1))
        if row.get("proven"):
            membership.prove(member, now_ns)
        member.recovered = member.unbalanced = state is not MemberState.LEFT
        member.seq_seen = [-1] * fragments
        member.merged = [[] for _ in range(fragments)]
        membership.members[learner] = member
    membership.stamp += 1
    membership.joined_max = max(
        (int(fragment_record["joined_max"]) for fragment_record in fragment_records.values()), default=0
    )
    return membership


def restore_column(
    book: RoundScheduler,
    membership: Membership,
    ledger: Ledger,
    fragment: int,
    fragment_record: FragmentRecord,
    live: Set[tuple[str, int]],
) -> None:
    """Put one fragment's record back into the books."""
    track = book.tracks[fragment]
    track.version, track.checksum = int(fragment_record["version"]), int(fragment_record["checksum"])
    track.due_step = int(fragment_record["due_step"])
    norms = [float(norm) for norm in fragment_record["norms"]]
    names = [str(name) for name in fragment_record.get("norm_learners", [""] * len(norms))]
    track.norms_of = list(zip(names, norms, strict=False))
    track.contributions_merged = int(fragment_record["contributions"])
    track.handed = [(str(name), int(g), int(seq), int(v)) for name, g, seq, v in fragment_record.get("handed", [])]
    ledger.restore_column(fragment, fragment_record["folded"], [line[:5] for line in fragment_record["accounts"]], live)
    for learner, generation, _, _, _, merged in fragment_record["accounts"]:
        member = membership.members.get(learner)
        if member is not None and member.generation == generation:
            if merged:
                membership.prove(member, member.heard_ns)
            member.merged[fragment] = [(int(seq), int(version)) for seq, version in merged]
            member.seq_seen[fragment] = max((seq for seq, _ in member.merged[fragment]), default=-1)
    for learner, size in fragment_record.get("sizes", {}).items():
        member = membership.members.get(learner)
        if member is not None:
            member.size_confirmed = max(member.size_confirmed, float(size))
    book.rounds_started = max(book.rounds_started, int(fragment_record["rounds_started"]) + ROUNDS_SKIPPED)
    book.clock_last = max(book.clock_last, int(fragment_record["clock_step"]))
    book.contributions_merged += track.contributions_merged
    book.commits += track.version


def excess_of(rows: Mapping[str, Any], fragment_records: Mapping[int, FragmentRecord]) -> int:
    """Tokens that did not count for the budget: by the newest record, and by the tape."""
    newest = max(fragment_records.values(), key=lambda record: int(record["rounds_started"]), default={})
    return max(int(newest.get("excess", 0)), int(rows.get("ledger", {}).get("excess", 0)))


def live_generations(membership: Membership) -> set[tuple[str, int]]:
    """Which generation of each learner may still come back."""
    return {(m.learner, m.generation) for m in membership.members.values() if m.state is not MemberState.LEFT}


def is_merged(item: ContributionId, fragment_record: FragmentRecord) -> bool:
    """True if a contribution that was found on disk is inside the fragment's committed version already."""
    name = [item.learner, item.generation]
    if any(list(entry[:3]) == [*name, item.seq] for entry in fragment_record.get("handed", [])):
        return True
    return any(
        item.seq in [seq for seq, _ in line[5]] for line in fragment_record["accounts"] if list(line[:2]) == name
    )
