"""The codec of one fragment. Most go by the flat array alone; some by the shapes of the tensors that are in it."""

from __future__ import annotations

from typing import NamedTuple

from atoll.codec.protocol import Codec, get_codec
from atoll.core import DENSE, Layout, elements_of


class Matrix(NamedTuple):
    """A part of a fragment that is whole rows of a tensor."""

    offset: int
    rows: int
    columns: int


def fragment_codec(name: str, layout: Layout, fragment: int) -> Codec:
    """The codec called `name` for this fragment. One that goes by shapes has a method `shaped`, which takes the
    fragment's matrices and gives the codec for just those."""
    codec = get_codec(name)
    shaped = getattr(codec, "shaped", None)
    if shaped is None:
        return codec
    of_fragment: Codec = shaped(_matrices(layout, fragment))
    return of_fragment


def update_codec(name: str, layout: Layout, fragment: int, size: int) -> Codec:
    """The codec of an update of so many bytes, in a run whose `codec_down` is `name`: that one, or (`adaptive`) another
    that sends every value. Their sizes differ, so that they tell."""
    said, values = fragment_codec(name, layout, fragment), layout.fragments[fragment].size
    if name not in DENSE or size == said.size_max(values):
        return said
    return next((codec for other in DENSE if (codec := get_codec(other)).size_max(values) == size), said)


def _matrices(layout: Layout, fragment: int) -> tuple[Matrix, ...]:
    found = []
    for piece in layout.fragments[fragment].slices:
        spec = layout.tensors[piece.tensor]
        columns = elements_of(spec) // spec.shape[0] if len(spec.shape) > 1 else 1
        if columns > 1 and piece.start % columns == 0 and piece.size % columns == 0 and piece.size > columns:
            found.append(Matrix(piece.offset, piece.size // columns, columns))
    return tuple(found)
