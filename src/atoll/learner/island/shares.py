"""How the fragments of a model are shared out to the processes of one learner. Pure: from shapes and meshes alone.

A process *holds* those elements of each tensor that its framework keeps there. It *owns* whole blocks of 256 values,
each owned by exactly one process: those it encodes, keeps the published base and the residual of, and sends. Where a
tensor lies in one piece on each process (whole, or cut along its first dimension), a block belongs to the holder of its
first element, and replicas share evenly. Tensors that are cut otherwise are shared out evenly among their holders.

    held      what the framework has here     [held layout: slices of local tensors]
    owned     whole blocks                    [owned array: blocks, one behind the other]
    exchange  held -> owned (a snapshot), owned -> held (what is adopted)

Blocks are those of the codecs, so what the processes encode is to the bit what one process would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from atoll.core import BLOCK, Fragment, Layout, TensorSlice, TensorSpec, elements_of, padded
from atoll.errors import LayoutError
from atoll.learner.island.intervals import EMPTY, I64, Intervals, Pieces, common, intervals, joined, moves, without

Indices = tuple[I64, ...]
"""Of one tensor in one process: the ascending indices along each dimension whose elements it holds."""


def held_runs(shape: Sequence[int], indices: Indices) -> Intervals:
    """The elements that a process holds, as positions in the flattened tensor; kept in the order of the local one."""
    inner, dim = 1, len(shape) - 1
    while dim >= 0 and indices[dim].size == shape[dim]:
        inner, dim = inner * shape[dim], dim - 1
    if dim < 0:
        return intervals([0], [inner])
    if any(not index.size for index in indices):
        return EMPTY
    index = indices[dim]
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    first = index[np.concatenate(([0], breaks))]
    last = index[np.concatenate((breaks - 1, [index.size - 1]))] + 1
    outer = np.zeros(1, np.int64)
    for above in range(dim):
        outer = (outer[:, None] * shape[above] + indices[above][None, :]).reshape(-1)
    outer *= shape[dim] * inner
    return intervals(
        (outer[:, None] + first[None, :] * inner).reshape(-1), (outer[:, None] + last[None, :] * inner).reshape(-1)
    )


@dataclass(frozen=True)
class Holdings:
    """Which process holds what: of each tensor, one set of positions for each process."""

    tensors: tuple[TensorSpec, ...]
    runs: tuple[tuple[Intervals, ...], ...]
    """[tensor][process]"""

    @property
    def processes(self) -> int:
        return len(self.runs[0])

    def check(self) -> None:
        """Every element is held by somebody."""
        for spec, runs in zip(self.tensors, self.runs, strict=True):
            rest = intervals([0], [elements_of(spec)])
            for held in runs:
                rest = without(rest, held)
            if rest:
                raise LayoutError(
                    f"no rank holds element {rest.start[0]} of {spec.name!r}; give every rank the same model, sharded "
                    "over the same mesh"
                )


@dataclass(frozen=True)
class Exchange:
    """What one process moves for one fragment: inside of itself, to others, and from others."""

    here: tuple[Pieces, Pieces]
    sends: dict[int, Pieces]
    receives: dict[int, Pieces]


class FragmentShares:
    """One fragment, for all processes."""

    def __init__(self, fragment: Fragment, holdings: Holdings) -> None:
        self._fragment = fragment
        self._holdings = holdings
        self.processes = holdings.processes
        self.owners = _owners(fragment, holdings)
        """Of each block: the process that owns it."""

    def blocks(self, process: int) -> I64:
        """The blocks that a process owns, ascending."""
        return np.flatnonzero(self.owners == process)

    def size(self, process: int) -> int:
        """Elements of its owned array."""
        return int(np.count_nonzero(self.owners == process)) * BLOCK

    def owned(self, process: int) -> Intervals:
        """Its positions in the fragment, as they lie in its owned array."""
        blocks = self.blocks(process)
        if not blocks.size:
            return EMPTY
        breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
        last = blocks[np.concatenate((breaks - 1, [blocks.size - 1]))]
        return intervals(blocks[np.concatenate(([0], breaks))] * BLOCK, (last + 1) * BLOCK)

    @cached_property
    def _real(self) -> Intervals:
        """All positions but the padding."""
        slices = self._fragment.slices
        return intervals([s.offset for s in slices], [s.offset + s.size for s in slices])

    def held_slices(self, process: int) -> tuple[TensorSlice, ...]:
        """What a process holds, as slices of its local tensors: a slice of the whole tensor is one of the local one,
        because their elements are in the same order."""
        slices, offset = [], 0
        for piece in self._fragment.slices:
            runs = self._holdings.runs[piece.tensor][process]
            inside = common(runs, intervals([piece.start], [piece.stop]))
            if inside.start.size:
                start = int(runs.places(inside.start[:1], inside.first[:1])[0])
                count = int((inside.stop - inside.start).sum())
                slices.append(TensorSlice(piece.tensor, start, start + count, offset))
                offset += padded(count)
        return tuple(slices)

    def held(self, process: int) -> Intervals:
        """Its positions in the fragment, as they lie in the array of its held slices."""
        found, offset = [], 0
        for piece in self._fragment.slices:
            runs = self._holdings.runs[piece.tensor][process]
            inside = common(runs, intervals([piece.start], [piece.stop]))
            if not inside.start.size:
                continue
            move = piece.offset - piece.start
            part = intervals(inside.start + move, inside.stop + move)
            found.append(Intervals(part.start, part.stop, part.at + offset))
            offset += padded(part.count)
        return joined(found)

    # ------------------------------------------------------------ exchanges

    def outward(self, me: int) -> Exchange:
        """From what the processes hold to what they own."""
        sends = {}
        for other in range(self.processes):
            if other != me and (pieces := self._taken(other, me)) is not None:
                sends[other] = pieces[0]
        receives = {}
        for other in range(self.processes):
            if other != me and (pieces := self._taken(me, other)) is not None:
                receives[other] = pieces[1]
        return Exchange(moves(self._held[me], self._owned[me]), sends, receives)

    def inward(self, me: int) -> Exchange:
        """From what they own to what they hold."""
        sends, receives = {}, {}
        for other in range(self.processes):
            if other == me:
                continue
            given, _ = moves(self._owned[me], self._held[other])
            _, taken = moves(self._owned[other], self._held[me])
            if given.at.size:
                sends[other] = given
            if taken.at.size:
                receives[other] = taken
        return Exchange(moves(self._owned[me], self._held[me]), sends, receives)

    @cached_property
    def _held(self) -> list[Intervals]:
        return [self.held(process) for process in range(self.processes)]

    @cached_property
    def _owned(self) -> list[Intervals]:
        return [self.owned(process) for process in range(self.processes)]

    def _taken(self, taker: int, giver: int) -> tuple[Pieces, Pieces] | None:
        """What one process needs from another: of what it owns and does not hold, it asks the next one that does."""
        missing = self._missing[taker]
        for step in range(1, self.processes):
            if not missing:
                return None
            asked = (taker + step) % self.processes
            if asked == giver:
                found = moves(self._held[giver], missing)
                return found if found[0].at.size else None
            missing = without(missing, self._held[asked])
        return None

    @cached_property
    def _missing(self) -> list[Intervals]:
        real = []
        for process in range(self.processes):
            owned = self._owned[process]
            inside = common(owned, self._real)
            mine = Intervals(inside.start, inside.stop, owned.places(inside.start, inside.first))
            real.append(without(mine, self._held[process]))
        return real


def _owners(fragment: Fragment, holdings: Holdings) -> I64:
    """Of each block of a fragment: its owner."""
    owners = np.zeros(fragment.size // BLOCK, np.int64)
    groups: dict[tuple[int, ...], list[I64]] = {}
    for piece in fragment.slices:
        first = piece.offset // BLOCK
        starts = np.arange(piece.start, piece.stop, BLOCK)
        for who, chosen in _claims(starts, holdings.runs[piece.tensor]):
            groups.setdefault(who, []).append(first + chosen)
    for who, parts in groups.items():
        blocks = np.concatenate(parts)
        owners[blocks] = np.asarray(who)[np.arange(blocks.size) * len(who) // blocks.size]
    return owners


def _claims(starts: I64, runs: tuple[Intervals, ...]) -> list[tuple[tuple[int, ...], I64]]:
    """(the processes that share some blocks of a tensor, which blocks of the slice), by their first elements."""
    holders = tuple(process for process, held in enumerate(runs) if held)
    if any(runs[process].start.size > 1 for process in holders):
        return [(holders, np.arange(starts.size))]
    by_piece: dict[tuple[int, int], list[int]] = {}
    for process in holders:
        by_piece.setdefault((int(runs[process].start[0]), int(runs[process].stop[0])), []).append(process)
    found = []
    for (low, high), who in by_piece.items():
        chosen = np.flatnonzero((starts >= low) & (starts < high))
        if chosen.size:
            found.append((tuple(who), chosen))
    return found


def _end(piece: TensorSlice) -> tuple[int, int, int]:
    """Where the next one goes on. Slices of a tensor that follow each other may have padding between them."""
    return piece.tensor, piece.stop, piece.offset + piece.size


class Shares:
    """All fragments of a layout, for all processes."""

    def __init__(self, layout: Layout, holdings: Holdings, me: int) -> None:
        self.layout = layout
        self.me = me
        self.fragments = [FragmentShares(fragment, holdings) for fragment in layout.fragments]

    @cached_property
    def held_layout(self) -> Layout:
        """What this process holds, as a layout of its local tensors."""
        fragments = (Fragment(i, share.held_slices(self.me)) for i, share in enumerate(self.fragments))
        return Layout(self.layout.tensors, tuple(fragments))

    @cached_property
    def owned_layout(self) -> Layout:
        """What it owns: pieces of tensors, each of them whole blocks but for the last."""
        return Layout(self.layout.tensors, tuple(map(self._owned_fragment, range(len(self.fragments)))))

    def _owned_fragment(self, index: int) -> Fragment:
        owned = self.fragments[index].owned(self.me)
        slices: list[TensorSlice] = []
        for piece in self.layout.fragments[index].slices:
            inside = common(owned, intervals([piece.offset], [piece.offset + piece.size]))
            places = owned.places(inside.start, inside.first)
            move = piece.start - piece.offset
            for start, stop, at in zip(inside.start + move, inside.stop + move, places, strict=True):
                last = slices[-1] if slices else None
                if last is not None and _end(last) == (piece.tensor, start, at):
                    slices[-1] = TensorSlice(piece.tensor, last.start, int(stop), last.offset)
                else:
                    slices.append(TensorSlice(piece.tensor, int(start), int(stop), int(at)))
        return Fragment(index, tuple(slices))
