"""Who carries which bytes of a fragment's payload between the island and the syncer.

A payload has sections, and in each so many bytes for every block. A rank makes the bytes of the blocks that it owns.
The wire cuts payloads into parts of equal size, wherever blocks end. So each part is carried by the rank that makes
most of it, and what others make of it travels inside of the island:

    made      bytes of a rank's own blocks, one section behind the other
    carried   whole parts, which the rank pushes and fetches over a connection of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from atoll.learner.island.intervals import EMPTY, I64, Intervals, Pieces, common, intervals, moves
from atoll.learner.island.link import SPEAKER
from atoll.learner.island.parts import part_bytes
from atoll.learner.island.shares import Exchange
from atoll.wire import PART_BYTES, PART_BYTES_MIN, STRIPES_MAX

PARTS_EACH = 8
"""Of each rank, where they are large enough: the first part is always the speaker's, and edges are shared."""
_NOTHING = Pieces(np.empty(0, np.int64), np.empty(0, np.int64))


class PayloadShares:
    def __init__(self, sections: Sequence[int], blocks: Sequence[I64], me: int) -> None:
        """`blocks` says which ones each rank owns."""
        self.size = part_bytes(sections, sum(own.size for own in blocks))
        self.me = me
        self.ranks = range(len(blocks))
        count = sum(own.size for own in blocks)
        self.made = [_bytes_of(sections, own, count) for own in blocks]
        even = self.size // (PARTS_EACH * len(blocks)) // PART_BYTES_MIN * PART_BYTES_MIN
        self.step = min(PART_BYTES, max(PART_BYTES_MIN, even))
        """Bytes of a part."""

    @cached_property
    def carried(self) -> list[Intervals]:
        return [self._runs(np.flatnonzero(self._carriers == rank)) for rank in self.ranks]

    @property
    def stripes(self) -> int:
        """Ranks that carry something."""
        return sum(bool(parts) for parts in self.carried)

    @cached_property
    def _carriers(self) -> I64:
        """Of each part: its rank. The one that speaks always has the first, so that it hears the syncer's answer."""
        starts = np.arange(0, self.size, self.step)
        cuts = intervals(starts, np.minimum(starts + self.step, self.size))
        most, who = np.zeros(starts.size), np.zeros(starts.size, np.int64)
        for rank, made in enumerate(self.made):
            both = common(made, cuts)
            found = np.bincount(both.second, both.stop - both.start, starts.size)
            who[found > most] = rank
            most = np.maximum(most, found)
        who[:1] = SPEAKER
        groups = min(len(self.ranks), STRIPES_MAX)  # a syncer takes that many streams for one payload
        group = who * groups // len(self.ranks)
        return -(-group * len(self.ranks) // groups) if groups < len(self.ranks) else who

    def _runs(self, parts: I64) -> Intervals:
        if not parts.size:
            return EMPTY
        first, last = _ends(parts)
        return intervals(first * self.step, np.minimum((last + 1) * self.step, self.size))

    @cached_property
    def outward(self) -> Exchange:
        return self._exchange(self.made, self.carried)

    @cached_property
    def inward(self) -> Exchange:
        return self._exchange(self.carried, self.made)

    def to_speaker(self, have: Sequence[Intervals], start: int, stop: int) -> Exchange:
        """These bytes, at the rank that speaks."""
        want = [intervals([start], [stop]) if rank == SPEAKER else EMPTY for rank in self.ranks]
        return self._exchange(have, want)

    def from_speaker(self) -> Exchange:
        """A payload that the rank which speaks has, to those that own its blocks."""
        have = [intervals([0], [self.size]) if rank == SPEAKER else EMPTY for rank in self.ranks]
        return self._exchange(have, self.made)

    def _exchange(self, have: Sequence[Intervals], want: Sequence[Intervals]) -> Exchange:
        me, others = self.me, [rank for rank in self.ranks if rank != self.me]
        sends = {rank: moves(have[me], want[rank])[0] for rank in others if have[me] and want[rank]}
        receives = {rank: moves(have[rank], want[me])[1] for rank in others if have[rank] and want[me]}
        return Exchange(
            moves(have[me], want[me]) if have[me] and want[me] else (_NOTHING, _NOTHING),
            {rank: pieces for rank, pieces in sends.items() if pieces.at.size},
            {rank: pieces for rank, pieces in receives.items() if pieces.at.size},
        )


def _bytes_of(sections: Sequence[int], own: I64, count: int) -> Intervals:
    """The bytes of these blocks, of so many, in the order in which a codec puts them for those blocks alone."""
    if not own.size:
        return EMPTY
    first, last = _ends(own)
    at = np.concatenate(([0], np.cumsum(sections)[:-1])) * count
    starts = [start + width * first for start, width in zip(at, sections, strict=True)]
    stops = [start + width * (last + 1) for start, width in zip(at, sections, strict=True)]
    return intervals(np.concatenate(starts), np.concatenate(stops))


def _ends(numbers: I64) -> tuple[I64, I64]:
    """Of ascending numbers: the first and the last of each run without gaps."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return numbers[np.concatenate(([0], breaks))], numbers[np.concatenate((breaks - 1, [numbers.size - 1]))]
