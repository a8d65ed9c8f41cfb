"""When a merge goes into the commit log of its fragment, and when a new slot is written instead."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.core import FragmentRecord

SLOT_EVERY = 16
"""Versions of a fragment from one slot to the next, at most. A syncer that comes back does half as many merges again,
on average."""
LOG_SLOTS_MAX = 2
"""How many times a slot's bytes the log of a fragment may have: as much as both of its slots. With 4 learners and int4
that is 11 versions, and a quarter of the bytes of slots alone."""


@dataclass(slots=True)
class LoggedSince:
    """What the log of a fragment holds beyond its slot."""

    version: int
    """The last one that is durable."""
    slot_bytes: int
    count: int = 0
    bytes: int = 0
    fragment_record: FragmentRecord = field(default_factory=dict)

    def takes(self, version: int, size: int) -> bool:
        """Whether a merge of so many bytes into this version should follow. What takes half a slot or more is better
        off in one: it need not be merged again."""
        fits = self.bytes + size <= LOG_SLOTS_MAX * self.slot_bytes and 2 * size <= self.slot_bytes
        return version == self.version + 1 and self.count + 1 < SLOT_EVERY and fits

    def logged(self, version: int, size: int, fragment_record: FragmentRecord) -> None:
        self.version, self.fragment_record = version, fragment_record
        self.count += 1
        self.bytes += size


def written_per_commit(slot_bytes: int, merge_bytes: int) -> tuple[int, int]:
    """Bytes that reach the disk for one commit, in the mean, and the most that is in the log of a fragment, where every
    merge is made from so many bytes."""
    since = LoggedSince(0, slot_bytes)
    while since.takes(since.version + 1, merge_bytes):
        since.logged(since.version + 1, merge_bytes, {})
    return (slot_bytes + since.bytes) // (since.count + 1), since.bytes
