"""Cutting chunks into batches, the mailboxes, and reading data that cannot seek."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from data_fakes import Skippable
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data._utils.pin_memory import pin_memory

from atoll.data.cutting import END, End, Part, Piece, Ticket, cut, from_sample
from atoll.data.mail import Mailbox
from atoll.data.skim import Skim
from atoll.errors import ConfigError


class Slots:
    """An inbox with a script: a ticket, None (nothing just now) or END per call."""

    def __init__(self, *slots: Ticket | End | None) -> None:
        self.slots = deque(slots)
        self.unwanted: set[int] = set()

    def next(self) -> Ticket | End | None:
        return self.slots.popleft()

    def dropped(self, key: int) -> bool:
        return key in self.unwanted


def letters(number: int) -> Iterator[str]:
    return iter([f"{number}{letter}" for letter in "abcde"[: (3, 0, 5)[number]]])


def whole(*numbers: int) -> list[Ticket]:
    return [Ticket(number, number, 0) for number in numbers]


def test_batches_go_across_chunks_and_say_what_they_hold() -> None:
    pieces = list(cut(Slots(*whole(0, 1, 2), END), letters, 4, False))
    assert pieces == [
        Piece((Part(0, 3, 3, True), Part(2, 1, 1, False), Part(1, 0, 0, True)), 4, ["0a", "0b", "0c", "2a"]),
        Piece((Part(2, 5, 4, True),), 4, ["2b", "2c", "2d", "2e"]),
        Piece((), 0, []),
    ]


def test_a_chunk_is_continued_at_its_start() -> None:
    pieces = list(cut(Slots(Ticket(2, 2, 3), END), letters, 4, False))
    assert pieces == [Piece((Part(2, 5, 2, True),), 2, ["2d", "2e"])]
    assert list(cut(Slots(Ticket(2, 2, 9), END), letters, 4, False)) == [Piece((Part(2, 9, 0, True),), 0, [])]


def test_with_nothing_to_read_a_half_filled_batch_is_kept() -> None:
    pieces = list(cut(Slots(None, *whole(0), None, None, *whole(2), END), letters, 4, False))
    assert [piece.data for piece in pieces] == [[], [], [], ["0a", "0b", "0c", "2a"], ["2b", "2c", "2d", "2e"], []]
    assert [len(piece.parts) for piece in pieces] == [0, 0, 0, 2, 1, 0], "nothing is told before it is handed out"


def test_an_empty_chunk_is_told_although_the_batch_waits() -> None:
    pieces = list(cut(Slots(*whole(0, 1), None, END), letters, 4, False))
    assert pieces == [Piece((Part(1, 0, 0, True),), 0, []), Piece((Part(0, 3, 3, True),), 3, ["0a", "0b", "0c"])]


def test_drop_last_gives_the_samples_up_and_tells_the_chunk() -> None:
    pieces = list(cut(Slots(*whole(0, 2), END), letters, 5, True))
    assert [piece.size for piece in pieces] == [5, 0]
    assert pieces[-1].parts == (Part(2, 5, 3, True),)


def test_what_is_not_wanted_any_more_is_not_read_further() -> None:
    inbox = Slots(*whole(2, 0), END)
    pieces = cut(inbox, letters, 2, False)
    assert next(pieces).data == ["2a", "2b"]
    inbox.unwanted.add(2)
    assert [piece.data for piece in pieces] == [["0a", "0b"], ["0c"]]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=8),
    st.integers(1, 5),
    st.booleans(),
    st.data(),
)
def test_every_sample_is_in_one_batch_and_parts_add_up(
    chunks: list[tuple[int, int]], batch_size: int, drop_last: bool, data: st.DataObject
) -> None:
    slots: list[Ticket | End | None] = []
    for number, (_, start) in enumerate(chunks):
        slots += [None] * data.draw(st.integers(0, 2)) + [Ticket(number, number, start)]
    pieces = list(cut(Slots(*slots, END), lambda n: iter([(n, i) for i in range(chunks[n][0])]), batch_size, drop_last))
    expected = [(n, i) for n, (length, start) in enumerate(chunks) for i in range(start, length)]
    found = [sample for piece in pieces for sample in piece.data]
    assert found == (expected[: len(expected) // batch_size * batch_size] if drop_last else expected)
    assert all(piece.size == batch_size for piece in pieces[:-1] if piece.size)
    told = dict.fromkeys(range(len(chunks)), 0)
    for part in (part for piece in pieces for part in piece.parts):
        told[part.key] += part.size
        assert part.upto == chunks[part.key][1] + told[part.key]
        assert part.last == (told[part.key] == max(0, chunks[part.key][0] - chunks[part.key][1]))
    assert sum(told.values()) == len(expected)


def test_from_sample_slices_skips_or_reads_past() -> None:
    assert list(from_sample(range(5), 3)) == [3, 4]
    assert list(from_sample(iter([1, 2, 3]), 2)) == [3]
    source = Skippable(5)
    assert list(from_sample(source, 3)) == [3, 4] and source.log == [("skip", 0, 3), ("open", 0, 3), 3, 4]


def test_a_pinned_piece_is_still_a_piece() -> None:
    piece = Piece((Part(1, 5, 2, True), Part(2, 1, 1, False)), 3, ["x"], worker=1)
    pinned = pin_memory(piece)
    assert isinstance(pinned, Piece) and pinned.worker == 1 and pinned.size == 3
    assert tuple(Part(*part) for part in pinned.parts) == piece.parts


# ---------------------------------------------------------------- mail


@pytest.mark.parametrize("local", [True, False])
def test_mail_for_an_iteration_that_is_over_is_skipped(local: bool) -> None:
    box = Mailbox(local=local)
    box.begin(1)
    box.open(Ticket(1, 1, 0))
    box.settle_in()
    assert box.next() == Ticket(1, 1, 0) and box.next() is None
    box.open(Ticket(2, 2, 5))
    box.end()
    box.begin(2)
    box.open(Ticket(-4, 3, 0))
    box.settle_in()
    assert box.next() == Ticket(-4, 3, 0) and box.next() is None, "the end was that of the iteration before"
    box.begin(3)
    box.open(Ticket(9, 9, 0))
    assert box.next() is None, "not before this end has got there too"
    box.settle_in()
    assert box.next() == Ticket(9, 9, 0)
    box.drop(-4)
    assert box.dropped(-4) and not box.dropped(7)
    box.end()
    assert box.next() is END
    box.close()


# ---------------------------------------------------------------- data that cannot seek


def test_skim_reads_on_and_starts_over_only_to_go_back() -> None:
    source = Skippable(25)
    skim = Skim(source, 10)
    assert list(skim(0)) == list(range(10))
    assert list(skim(2)) == list(range(20, 25)), "read past chunk 1, and the last one is short"
    assert list(skim(3)) == [] and list(skim(99)) == []
    assert [entry for entry in source.log if isinstance(entry, tuple)] == [("open", 0, 0)]
    assert list(skim(1)) == list(range(10, 20))
    assert source.log[-11:-9] == [("open", 0, 10), 10], "with the data's own skip"


def test_skim_knows_epochs_when_it_knows_the_length() -> None:
    source = Skippable(25)
    skim = Skim(source, 10, samples=25)
    assert [len(list(skim(number))) for number in range(7)] == [10, 10, 5, 10, 10, 5, 10]
    assert list(skim(5)) == [1020, 1021, 1022, 1023, 1024]


def test_a_chunk_that_is_left_half_read_does_not_confuse_the_next() -> None:
    skim = Skim(range(30), 10)
    reader = skim(0)
    assert [next(reader) for _ in range(4)] == [0, 1, 2, 3]
    assert list(skim(1)) == list(range(10, 20))
    assert list(skim(0)) == list(range(10))


def test_something_that_can_be_read_only_once_is_refused() -> None:
    once: Any = (number for number in range(5))
    with pytest.raises(ConfigError, match="can be read only once; give it an object whose __iter__ starts"):
        Skim(once, 2)
