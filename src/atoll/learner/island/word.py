"""The one small vector of a step boundary: what the speaker orders, and what each rank has to say.

It is a sum over ranks: orders and the run's state are given by the speaker and by nobody else, tokens and troubles by
everybody. It has a fixed length, so that ranks need not agree on one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from atoll.core import BoundaryOrders
from atoll.core import effects as fx

I64 = NDArray[np.int64]
TEXT_WORDS = 32
"""256 bytes of the speaker's last words."""
RULES = ("rebase", "overwrite", "mix")
ADOPT_WORDS = 6
SEQS_MAX = 63
"""Contributions that one adopt may take out: a mask of them has to be a positive number."""


class Place(enum.IntEnum):
    """Where a rank stands when it gives its part."""

    STEPPED = 1
    JOINING = 2
    WAITING = 3
    LEAVING = 4


class Flag(enum.IntFlag):
    """What holds for the run, as the speaker says."""

    STAY = 1
    """Give another part before the next step."""
    DONE = 2
    DISMISSED = 4
    JOINED = 8
    OVER = 16
    CAPTURE = 64
    """Keep a checkpoint of the inner state at this boundary."""
    GIVE = 128
    """Copy the inner state at this boundary, for a joiner."""
    LAID_OUT = 32
    """From the next word on there is room for orders."""


_FIELDS = (
    "place", "boundary", "tokens", "sigterms", "failed", "failed_rank", "flags", "step", "rank", "generation",
    "failure", "unhanded", "learners", "healed",
)  # fmt: skip


@dataclass
class BoundaryWord:
    """One rank's part, or (in the sum) everybody's."""

    place: int = 0
    boundary: int = 0
    tokens: int = 0
    sigterms: int = 0
    failed: int = 0
    """How many ranks cannot go on."""
    failed_rank: int = 0
    """The sum of their numbers."""
    flags: int = 0
    step: int = 0
    rank: int = 0
    """The learner's number in the run."""
    generation: int = 0
    failure: int = 0
    """Which kind of error the speaker ended with (`failures`)."""
    unhanded: int = 0
    learners: int = 0
    healed: int = 0
    text: str = ""
    orders: BoundaryOrders = field(default_factory=BoundaryOrders)

    @property
    def flag(self) -> Flag:
        return Flag(self.flags)


def length(fragments: int) -> int:
    """Words of a vector with room for orders to so many fragments."""
    return len(_FIELDS) + TEXT_WORDS + 2 * _mask_words(fragments) + ADOPT_WORDS * fragments


def _mask_words(fragments: int) -> int:
    return -(-fragments // 62)


def pack(word: BoundaryWord, fragments: int) -> I64:
    values = np.zeros(length(fragments), np.int64)
    values[: len(_FIELDS)] = [getattr(word, name) for name in _FIELDS]
    if word.text:
        raw = word.text.encode()[: 8 * TEXT_WORDS].ljust(8 * TEXT_WORDS, b"\0")
        values[len(_FIELDS) : len(_FIELDS) + TEXT_WORDS] = np.frombuffer(raw, np.int64)
    if word.orders:
        _pack_orders(word.orders, values[len(_FIELDS) + TEXT_WORDS :], fragments)
    return values


def _pack_orders(orders: BoundaryOrders, values: I64, fragments: int) -> None:
    masks = _mask_words(fragments)
    for start, chosen in ((0, orders.given), (masks, orders.takes)):
        for fragment in chosen:
            values[start + fragment // 62] |= 1 << (fragment % 62)
    for index, adopt in enumerate(orders.adopts):
        first = min(adopt.already_merged, default=0)
        mask = sum(1 << (seq - first) for seq in adopt.already_merged)
        alpha = int(np.float64(adopt.alpha).view(np.int64))
        entry = (adopt.fragment + 1, adopt.version, RULES.index(adopt.rule), alpha, first, mask)
        at = 2 * masks + ADOPT_WORDS * index
        values[at : at + ADOPT_WORDS] = entry


def unpack(values: I64, fragments: int) -> BoundaryWord:
    word = BoundaryWord()
    for name, value in zip(_FIELDS, values[: len(_FIELDS)].tolist(), strict=True):
        setattr(word, name, value)
    raw = values[len(_FIELDS) : len(_FIELDS) + TEXT_WORDS].tobytes()
    word.text = raw.rstrip(b"\0").decode(errors="replace")
    rest = values[len(_FIELDS) + TEXT_WORDS :]
    if fragments and rest.any():
        word.orders = _unpack_orders(rest, fragments)
    return word


def _unpack_orders(values: I64, fragments: int) -> BoundaryOrders:
    masks = _mask_words(fragments)

    def chosen(start: int) -> tuple[int, ...]:
        return tuple(f for f in range(fragments) if int(values[start + f // 62]) >> (f % 62) & 1)

    adopts = []
    for entry in values[2 * masks :].reshape(-1, ADOPT_WORDS):
        fragment, version, rule, alpha, first, mask = (int(value) for value in entry)
        if not fragment:
            break
        merged = tuple(first + bit for bit in range(SEQS_MAX) if mask >> bit & 1)
        adopts.append(fx.Adopt(fragment - 1, version, RULES[rule], float(np.int64(alpha).view(np.float64)), merged))
    return BoundaryOrders(chosen(0), tuple(adopts), chosen(masks))
