"""What came of a replay, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first version that came out differently."""

    fragment: int
    version: int
    round: int
    expected: int
    found: int
    what: str


@dataclass(frozen=True, slots=True)
class Jump:
    """A state that was taken from the recording instead of being made: versions in between are not made again."""

    fragment: int
    before: int
    version: int
    why: str


@dataclass(frozen=True, slots=True)
class FragmentEnd:
    """Where a fragment ended: in the run (0 if its disk does not say) and here."""

    fragment: int
    version: int
    checksum: int
    found_version: int
    found_checksum: int


@dataclass(slots=True)
class ReplayReport:
    """What came of a replay."""

    folder: str
    run: str
    until: int | None = None
    merges: int = 0
    """Merges made again."""
    contributions: int = 0
    payload_bytes: int = 0
    left_out: int = 0
    """Merges that were recorded and never committed."""
    epochs: int = 0
    round_last: int = 0
    """The last round that was made again."""
    seconds: float = 0.0
    mismatch: Mismatch | None = None
    jumps: list[Jump] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What the recording lacks, so that fragments could not be followed to their end."""
    ends: list[FragmentEnd] = field(default_factory=list)
    hash_expected: str = ""
    """Of the last committed parameters; empty if they were not reached on purpose (`until`) or are not on disk."""
    hash_found: str = ""
    problems: list[str] = field(default_factory=list)
    exported: str = ""

    @property
    def identical(self) -> bool:
        """True if everything that can be compared is the same, and the end was reached."""
        same = not self.hash_expected or self.hash_expected == self.hash_found
        return self.mismatch is None and not self.missing and same

    @property
    def complete(self) -> bool:
        """True if every version since the first was made again, none taken over."""
        return self.identical and not self.jumps

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical, "complete": self.complete}


def parameters_hash(checksums: Sequence[int]) -> str:
    """One hash of all parameters: xxh3-128 over the checksums of the fragments, in their order."""
    return xxhash.xxh3_128_hexdigest(b"".join(checksum.to_bytes(8, "little") for checksum in checksums))
