"""Who holds and who owns what: against brute force, for every way to cut a tensor."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.codec import block_bytes, get_codec
from atoll.core import BLOCK, TensorSpec, build_layout
from atoll.errors import ConfigError, LayoutError
from atoll.learner.island.intervals import Intervals, intervals, without
from atoll.learner.island.parameters import RankParameters
from atoll.learner.island.parts import join_parts, split_parts
from atoll.learner.island.shares import Holdings, Shares, held_runs

SHAPES = ((37, 60), (5,), (700,), (6, 3, 80), (1,))


def cut(size: int, ranks: int, rank: int) -> NDArray[np.int64]:
    """As torch.chunk."""
    step = -(-size // ranks)
    return np.arange(size)[rank * step : (rank + 1) * step]


def held(shape: tuple[int, ...], way: str, ranks: int, rank: int) -> tuple[NDArray[np.int64], ...]:
    """The indices that a rank holds of a tensor that is cut in this way."""
    whole = [np.arange(size) for size in shape]
    if way == "rows":
        whole[0] = cut(shape[0], ranks, rank)
    elif way == "columns":
        whole[-1] = cut(shape[-1], ranks, rank)
    elif way == "both":
        columns = ranks // 2
        whole[0] = cut(shape[0], 2, rank // columns)
        whole[-1] = whole[-1] if len(shape) == 1 else cut(shape[-1], columns, rank % columns)
    elif way == "strided":  # rows, first into two, then each half over the ranks
        halves = [cut(shape[0], 2, half) for half in range(2)]
        whole[0] = np.concatenate([half[cut(half.size, ranks, rank)] for half in halves])
    return tuple(whole)


WAYS = ("whole", "rows", "columns", "both", "strided")


def holdings(ways: tuple[str, ...], ranks: int) -> tuple[Holdings, list[list[Any]]]:
    specs = tuple(TensorSpec(f"t{i}", shape, "float32") for i, shape in enumerate(SHAPES))
    indices = [[held(s, w, ranks, r) for r in range(ranks)] for s, w in zip(SHAPES, ways, strict=True)]
    runs = tuple(tuple(held_runs(shape, index) for index in own) for shape, own in zip(SHAPES, indices, strict=True))
    return Holdings(specs, runs), indices


class Local:
    """What one rank holds, as `HeldParameters` over numpy arrays."""

    def __init__(self, specs: tuple[TensorSpec, ...], arrays: list[Any]) -> None:
        self.specs = specs
        self.flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]

    def lay_out(self, layout: Any) -> None:
        self.fragments = layout.fragments

    def read(self, fragment: int) -> Any:
        flat = np.zeros(self.fragments[fragment].size, np.float32)
        for piece in self.fragments[fragment].slices:
            flat[piece.offset : piece.offset + piece.size] = self.flat[piece.tensor][piece.start : piece.stop]
        return Copy(flat)

    def release(self, snapshot: Any) -> None:
        return

    def put(self, fragment: int, flat: Any) -> None:
        for piece in self.fragments[fragment].slices:
            self.flat[piece.tensor][piece.start : piece.stop] = flat[piece.offset : piece.offset + piece.size]


class Copy:
    def __init__(self, flat: Any) -> None:
        self._flat = flat

    def values(self) -> Any:
        return self._flat


class Post:
    """All ranks in one process: what one sends lies here until the other takes it, in a second round."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], Any] = {}

    def swap(self, me: int) -> Any:
        def exchange(sends: Any, receives: Any) -> None:
            self.sent |= {(me, to): np.array(values) for to, values in sends.items()}
            for source, out in receives.items():
                if (source, me) in self.sent:
                    out[:] = self.sent[source, me]

        return exchange


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("ways", [(w,) * 5 for w in WAYS] + [WAYS], ids=[*WAYS, "mixed"])
def test_snapshots_and_adopts_are_those_of_one_process(ways: tuple[str, ...], ranks: int) -> None:
    book, indices = holdings(ways, ranks)
    book.check()
    layout = build_layout(book.tensors, 3)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    post = Post()
    locals_ = [
        Local(book.tensors, [a[np.ix_(*i[r])] for a, i in zip(arrays, indices, strict=True)]) for r in range(ranks)
    ]
    parameters = [RankParameters(one, book, r, post.swap(r), post.swap(r)) for r, one in enumerate(locals_)]  # type: ignore[arg-type]
    for one in parameters:
        one.lay_out(layout)
    for f, fragment in enumerate(layout.fragments):
        whole = np.zeros(fragment.size, np.float32)
        for piece in fragment.slices:
            whole[piece.offset : piece.offset + piece.size] = arrays[piece.tensor].reshape(-1)[piece.start : piece.stop]
        owned: list[Any] = []
        for _ in range(2):  # what is sent in the first round has come in the second
            owned = [one.collect(f, one.read(f)) for one in parameters]
        blocks = parameters[0].blocks(f)
        assert sorted(np.concatenate(blocks).tolist()) == list(range(fragment.size // BLOCK))
        for mine, own, one in zip(owned, blocks, parameters, strict=True):
            assert np.array_equal(mine.reshape(-1, BLOCK), whole.reshape(-1, BLOCK)[own])
            assert one.owned.fragments[f].size == mine.size
        for codec in ("fp32", "bf16", "int8", "int4", "int2"):
            expected, _ = get_codec(codec).encode_delta(whole, None, None, feedback=False)
            parts = [get_codec(codec).encode_delta(mine, None, None, feedback=False)[0] for mine in owned]
            assert np.array_equal(join_parts(block_bytes(codec), blocks, parts), expected)
            for part, again in zip(parts, split_parts(block_bytes(codec), blocks, expected), strict=True):
                assert np.array_equal(part, again)
        post.sent.clear()
        for _ in range(2):
            spread = [one.spread(f, 2 * mine) for one, mine in zip(parameters, owned, strict=True)]
        for local, values in zip(locals_, spread, strict=True):
            local.put(f, values)
        post.sent.clear()
    for tensor, array in enumerate(arrays):
        for rank, local in enumerate(locals_):
            assert np.array_equal(local.flat[tensor], 2 * array[np.ix_(*indices[tensor][rank])].reshape(-1))


def test_rows_move_only_where_a_block_lies_across_them() -> None:
    book, _ = holdings(("rows",) * 5, 4)
    layout = build_layout(book.tensors, 1)
    shares = [Shares(layout, book, rank) for rank in range(4)]
    moved = sum(p.count for share in shares for p in share.fragments[0].outward(share.me).sends.values())
    assert 0 < moved < 4 * len(SHAPES) * BLOCK
    sizes = [share.fragments[0].size(share.me) for share in shares]
    assert sum(sizes) == layout.fragments[0].size


def test_replicas_share_evenly_and_send_no_snapshot() -> None:
    book, _ = holdings(("whole",) * 5, 4)
    share = Shares(build_layout(book.tensors, 1), book, 0).fragments[0]
    sizes = [share.size(rank) for rank in range(4)]
    assert max(sizes) - min(sizes) <= BLOCK and min(sizes) > 0
    assert all(not share.outward(rank).sends for rank in range(4))


def test_intervals_without_others_against_sets() -> None:
    rng = np.random.default_rng(1)

    def some() -> Intervals:
        edges = np.sort(rng.choice(60, size=2 * int(rng.integers(1, 8)), replace=False))
        return intervals(edges[::2], edges[1::2])

    def positions(one: Intervals) -> list[tuple[int, int]]:
        spans = zip(one.start, one.stop, one.at, strict=True)
        return [(int(a + i), int(at + i)) for a, b, at in spans for i in range(b - a)]

    for _ in range(300):
        first, second = some(), some()
        gone = {position for position, _ in positions(second)}
        assert positions(without(first, second)) == [pair for pair in positions(first) if pair[0] not in gone]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_slices_of_a_tensor_that_follow_each_other_keep_the_padding_between_them(ranks: int) -> None:
    """The model of the examples: cut between rows, into pieces of 51 rows of 384 values, which are no whole blocks."""
    shapes = ((256, 24), (256, 384), (256,), (256, 256), (256,))
    specs = tuple(TensorSpec(f"t{i}", shape, "float32") for i, shape in enumerate(shapes))
    runs = tuple(tuple(held_runs(s, held(s, "rows", ranks, rank)) for rank in range(ranks)) for s in shapes)
    for fragments, me in itertools.product(range(1, 9), range(ranks)):
        shares = Shares(build_layout(specs, fragments), Holdings(specs, runs), me)
        owned = [fragment.size for fragment in shares.owned_layout.fragments]
        assert owned == [share.size(me) for share in shares.fragments]


def test_an_element_that_nobody_holds_is_said() -> None:
    spec = TensorSpec("w", (4, 4), "float32")
    runs = tuple(held_runs((4, 4), (cut(4, 4, rank), np.arange(4))) for rank in range(3))
    with pytest.raises(LayoutError, match="no rank holds element 12 of 'w'"):
        Holdings((spec,), (runs,)).check()


def test_a_codec_without_fixed_blocks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import toys

    toys.register(monkeypatch)
    with pytest.raises(ConfigError, match=r"'toy-sparse'.*choose fp32"):
        block_bytes("toy-sparse")
    assert all(block_bytes(name) for name in itertools.chain(("fp32", "bf16"), ("int8", "int4", "int2")))
