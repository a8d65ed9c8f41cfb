"""The lease book: each row of its table, its bounds, and a random world of learners that fail in every way."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atoll.core import lease_table
from atoll.core.leases import HAND_MAX, REISSUED_KEPT, STREAMS_MAX, LeaseBook
from atoll.core.messages import CHUNKS_MAX, DataLeases, DataReport, Lease
from atoll.errors import AtollError, ConfigError, RemoteProtocolError, StoreError


def say(
    book: LeaseBook,
    learner: str,
    serial: int,
    *,
    want: int = 0,
    done: tuple[int, ...] = (),
    holding: tuple[int, ...] = (),
    returned: tuple[Lease, ...] = (),
    chunks: int = 10,
    generation: int = 1,
    stream: str = "train",
) -> DataLeases:
    return book.report(learner, generation, DataReport(stream, serial, chunks, want, done, holding, returned))


def numbers(answer: DataLeases) -> list[int]:
    return [lease.chunk for lease in answer.granted]


def persisted(book: LeaseBook, rows: dict[str, Any]) -> dict[str, Any]:
    """The rows as the tape would hold them after this call."""
    for key, row in book.take_dirty().items():
        if row is None:
            rows.pop(key, None)
        else:
            rows[key] = json.loads(json.dumps(row))
    return rows


# ---------------------------------------------------------------- plain runs


def test_two_learners_share_a_stream_to_its_end() -> None:
    book = LeaseBook()
    assert numbers(say(book, "a", 1, want=2, chunks=4)) == [0, 1]
    assert numbers(say(book, "b", 1, want=5, chunks=4)) == [2, 3]
    assert say(book, "b", 2, want=1, done=(2,), holding=(3,), chunks=4) == DataLeases("train", 2, (), (), True)
    say(book, "b", 3, done=(3,), chunks=4)
    say(book, "a", 2, done=(0, 1), chunks=4)
    assert book.status() == {
        "train": {"chunks": 4, "issued": 4, "done": 4, "in_hand": 0, "pool": 0, "reissued": 0, "repeated": 0}
    }


def test_an_endless_stream_is_never_exhausted() -> None:
    book = LeaseBook()
    answer = say(book, "a", 1, want=100, chunks=0)
    assert numbers(answer) == list(range(100)) and not answer.exhausted


def test_streams_do_not_touch_each_other() -> None:
    book = LeaseBook()
    assert numbers(say(book, "a", 1, want=2, stream="text")) == [0, 1]
    assert numbers(say(book, "a", 1, want=2, stream="code", chunks=3)) == [0, 1]
    book.release("a")
    assert {name: row["pool"] for name, row in book.status().items()} == {"text": 2, "code": 2}


# ---------------------------------------------------------------- the table of the module's docstring, cell by cell


def test_a_repeated_report_gets_the_same_answer_and_changes_nothing() -> None:
    book, rows = LeaseBook(), {}
    first = say(book, "a", 1, want=3)
    persisted(book, rows)
    assert say(book, "a", 1, want=3) == first
    assert book.take_dirty() == {}
    second = say(book, "a", 2, want=2, done=(0,), holding=(1, 2))
    assert say(book, "a", 2, want=2, done=(0,), holding=(1, 2)) == second
    assert numbers(second) == [3, 4]


def test_a_lost_grant_is_granted_again_before_new_ones() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=2)
    assert numbers(say(book, "a", 2, want=3)) == [0, 1, 2]
    assert numbers(say(book, "a", 3, want=0, holding=(1,))) == [0, 2]


def test_a_handed_back_chunk_goes_to_the_next_one_from_where_it_was_left() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=3)
    say(book, "a", 2, returned=(Lease(0, 17), Lease(1, 0)), holding=(2,))
    assert say(book, "b", 1, want=3).granted == (Lease(0, 17), Lease(1, 0), Lease(3, 0))
    say(book, "b", 2, returned=(Lease(0, 5),), holding=(1, 3))
    assert say(book, "c", 1, want=1).granted == (Lease(0, 17),), "a start never goes back"
    assert book.status()["train"]["reissued"] == 0, "a clean hand-over repeats nothing"


def test_a_lost_learners_chunks_are_issued_again_first_in_first_out() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=3)
    say(book, "b", 1, want=1)
    say(book, "a", 2, done=(1,), holding=(0, 2))
    assert book.release("a") == 2
    assert numbers(say(book, "b", 2, holding=(3,), want=3)) == [0, 2, 4]
    assert book.status()["train"]["reissued"] == 2 and book.reissued("train") == {0: 1, 2: 1}
    assert book.fate("train", 0) == ("in hand of b", 1) and book.fate("train", 1) == ("done", 0)
    assert book.fate("train", 9) == ("not issued", 0)


def test_a_stream_that_was_exhausted_has_chunks_again_after_a_loss() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=2, chunks=2)
    assert say(book, "b", 1, want=1, chunks=2).exhausted
    book.release("a")
    answer = say(book, "b", 2, want=1, chunks=2)
    assert numbers(answer) == [0] and not answer.exhausted
    assert say(book, "b", 3, want=1, holding=(0,), chunks=2).exhausted


def test_one_that_was_taken_for_lost_keeps_what_nobody_else_got() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=4)
    book.release("a")
    say(book, "b", 1, want=2)  # takes 0 and 1
    answer = say(book, "a", 2, done=(2,), holding=(0, 1, 3))
    assert answer.revoked == (0, 1) and answer.granted == ()
    assert book.fate("train", 2) == ("done", 0) and book.fate("train", 3) == ("in hand of a", 0)
    assert book.status()["train"]["repeated"] == 0


def test_a_chunk_finished_twice_is_counted_and_its_second_holder_stops() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=2)
    book.release("a")
    say(book, "b", 1, want=2)
    say(book, "b", 2, done=(1,), holding=(0,))
    rows = persisted(book, {})
    say(book, "a", 2, done=(0, 1))  # 0 is in b's hand, 1 was finished by b
    assert persisted(book, rows)["data/train/hand/b"]["leases"] == []
    assert book.status()["train"]["repeated"] == 2 and book.fate("train", 0)[0] == "done"
    say(book, "a", 2, done=(0, 1))
    say(book, "b", 2, done=(1,), holding=(0,))
    answer = say(book, "b", 3, holding=(0,))
    assert answer.revoked == (0,)
    assert book.status()["train"]["repeated"] == 2, "the same news again is not a second time"


def test_handing_back_what_is_no_longer_yours_changes_only_the_start_in_the_pool() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=2)
    book.release("a")
    say(book, "b", 1, want=1)
    say(book, "a", 2, returned=(Lease(0, 9), Lease(1, 9)))
    assert book.fate("train", 0)[0] == "in hand of b"
    assert say(book, "c", 1, want=1).granted == (Lease(1, 9),)
    assert book.status()["train"]["reissued"] == 1, "the second one was handed back after all"


def test_chunks_that_were_handed_back_are_told_from_those_that_were_lost() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=3)
    say(book, "a", 2, holding=(0, 1), returned=(Lease(2),))
    assert (book.status()["train"]["pool"], book.lost("train")) == (1, 0)
    book.release("a")
    assert (book.status()["train"]["pool"], book.lost("train")) == (3, 2)


def test_a_new_generation_takes_nothing_over_and_an_old_one_is_ignored() -> None:
    book = LeaseBook()
    say(book, "a", 5, want=3)
    answer = say(book, "a", 1, want=1, generation=2)
    assert numbers(answer) == [0] and book.status()["train"] == {
        "chunks": 10,
        "issued": 3,
        "done": 0,
        "in_hand": 1,
        "pool": 2,
        "reissued": 1,
        "repeated": 0,
    }
    assert say(book, "a", 6, done=(0, 1, 2), want=3) == DataLeases("train", 6)
    assert book.status()["train"]["done"] == 0


def test_a_fence_holds_before_the_new_process_has_said_anything() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=2)
    assert book.release("a", before_generation=1) == 0
    assert book.release("a", before_generation=2) == 2
    assert say(book, "a", 2, done=(0,), want=2) == DataLeases("train", 2)
    assert numbers(say(book, "a", 1, want=1, generation=2)) == [0]


def test_a_report_that_was_overtaken_is_ignored() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=1)
    say(book, "a", 3, holding=(0,), want=1)
    assert say(book, "a", 2, returned=(Lease(0, 4),)) == DataLeases("train", 2)
    assert book.fate("train", 0)[0] == "in hand of a"


def test_what_learners_know_heals_a_book_that_lost_its_newest_rows() -> None:
    rows: dict[str, Any] = {}
    book = LeaseBook()
    say(book, "a", 1, want=2)
    persisted(book, rows)
    say(book, "a", 2, holding=(0, 1), want=3)  # 2, 3, 4: never reached the disk
    restarted = LeaseBook()
    restarted.load(rows)
    answer = say(restarted, "a", 3, done=(0, 3), holding=(1, 2), returned=(Lease(4, 7),), want=0)
    assert answer.revoked == () and restarted.fate("train", 3)[0] == "done"
    assert say(restarted, "b", 1, want=3).granted == (Lease(4, 7), Lease(5), Lease(6)), "2 and 3 are not issued twice"
    assert restarted.status()["train"]["issued"] == 7


# ---------------------------------------------------------------- refusals and bounds


def test_another_number_of_chunks_is_refused_with_both_numbers() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=1, chunks=10)
    with pytest.raises(ConfigError, match=r"has 10 chunks, learner 'b' says 12 chunks; give every learner the same"):
        say(book, "b", 1, want=1, chunks=12)
    with pytest.raises(ConfigError, match=r"says no end"):
        say(book, "b", 1, want=1, chunks=0)
    assert book.status()["train"]["in_hand"] == 1


@pytest.mark.parametrize(
    ("message", "learner"),
    [
        (DataReport("", 1, 10, 1), "a"),
        (DataReport("a/b", 1, 10, 1), "a"),
        (DataReport("x" * 65, 1, 10, 1), "a"),
        (DataReport("train", 1, 10, 1), ""),
        (DataReport("train", 1, 10, 1), "a" * 201),
        (DataReport("train", -1, 10, 1), "a"),
        (DataReport("train", 1, -10, 1), "a"),
        (DataReport("train", 1, 10, -1), "a"),
        (DataReport("train", 1, 10, 1, done=(10,)), "a"),
        (DataReport("train", 1, 10, 1, holding=(-1,)), "a"),
        (DataReport("train", 1, 0, 1, holding=(2**63,)), "a"),
        (DataReport("train", 1, 10, 1, returned=(Lease(1, -1),)), "a"),
        (DataReport("train", 1, 10, 1, done=(1,), holding=(1,)), "a"),
        (DataReport("train", 1, 10, 1, done=(True,)), "a"),
        (DataReport("train", 1, 0, 1, done=tuple(range(CHUNKS_MAX + 1))), "a"),
    ],
)
def test_a_message_that_cannot_be_true_is_refused_and_changes_nothing(message: DataReport, learner: str) -> None:
    book = LeaseBook()
    with pytest.raises(AtollError):
        book.report(learner, 1, message)
    assert book.status() == {} and book.take_dirty() == {}


def test_streams_and_hands_are_bounded() -> None:
    book = LeaseBook()
    for number in range(STREAMS_MAX):
        say(book, "a", 1, stream=f"s{number}")
    with pytest.raises(ConfigError, match="has 64 already"):
        say(book, "a", 1, stream="one-more")
    answer = say(book, "a", 2, stream="s0", want=HAND_MAX, chunks=10)
    assert len(answer.granted) == 10
    endless = LeaseBook()
    assert len(say(endless, "a", 1, want=HAND_MAX + 5, chunks=0).granted) == HAND_MAX
    held = tuple(range(HAND_MAX))
    assert say(endless, "a", 2, want=5, holding=held, chunks=0).granted == ()
    with pytest.raises(RemoteProtocolError, match="use larger chunks"):
        say(endless, "a", 3, holding=(*held, HAND_MAX), chunks=0)


def test_the_names_of_reissued_chunks_are_bounded_and_the_counter_is_not() -> None:
    book = LeaseBook()
    total = REISSUED_KEPT + 50
    say(book, "a", 1, want=total, chunks=0)
    book.release("a")
    say(book, "b", 1, want=total, chunks=0)
    assert book.status()["train"]["reissued"] == total
    assert sorted(book.reissued("train")) == list(range(50, total))
    rows = persisted(book, {})
    again = LeaseBook()
    again.load(rows)
    assert again.reissued("train") == book.reissued("train")


def test_what_a_learner_says_of_others_chunks_changes_nothing() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=3)
    say(book, "b", 1, want=1)
    book.release("b")  # 3 is in the pool
    rows = persisted(book, {})
    answer = say(book, "liar", 1, done=(0, 3), holding=(1,), returned=(Lease(2, 2**61),))
    assert answer.revoked == (1,) and not answer.granted
    assert say(book, "liar", 2, returned=(Lease(3, 2**61),)).granted == ()
    assert persisted(book, rows)["data/train"] == rows["data/train"]
    assert [book.fate("train", chunk)[0] for chunk in range(4)] == ["in hand of a"] * 3 + ["pool"]
    assert say(book, "c", 1, want=1).granted == (Lease(3),)


def test_numbers_that_nobody_was_given_take_no_data_out_of_a_run() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=1)
    answer = say(book, "liar", 1, done=(7, 8), holding=(9,), returned=(Lease(6, 5),))
    assert answer.revoked == (9,) and book.status()["train"]["issued"] == 1
    again = LeaseBook()
    again.load(persisted(book, {}), lost_rows=False)
    answer = say(again, "liar", 2, done=(7, 8), holding=(9,), returned=(Lease(6, 5),))
    assert answer.revoked == (9,) and again.status()["train"]["issued"] == 1, "nor after a restart that lost nothing"


def test_who_was_lost_with_a_chunk_may_still_say_that_it_is_done_after_a_restart() -> None:
    book = LeaseBook()
    say(book, "a", 1, want=1)
    book.release("a")
    again = LeaseBook()
    again.load(persisted(book, {}))
    say(again, "liar", 1, done=(0,))
    assert again.fate("train", 0)[0] == "pool"
    say(again, "a", 2, done=(0,))
    assert again.fate("train", 0)[0] == "done"


def test_numbers_from_nowhere_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "AHEAD_MAX", 3)
    book = LeaseBook(lost_rows=True)
    answer = say(book, "a", 1, done=(100,), holding=(101, 102, 103), chunks=0)
    assert answer.revoked == (103,) and book.status()["train"]["issued"] == 3


# ---------------------------------------------------------------- rows


def test_rows_say_what_the_design_says_and_only_those_that_changed() -> None:
    book = LeaseBook()
    say(book, "a/b", 1, want=2)
    assert book.take_dirty() == {
        "data/train": {"chunks": 10, "next": 2, "pool": [], "ahead": [], "reissued": 0, "repeated": 0},
        "data/train/hand/a/b": {"generation": 1, "serial": 1, "leases": [[0, 0], [1, 0]], "done": []},
    }
    assert book.take_dirty() == {}
    say(book, "a/b", 2, done=(0,), holding=(1,))
    assert set(book.take_dirty()) == {"data/train/hand/a/b"}
    book.release("a/b")
    rows = book.take_dirty()
    assert rows["data/train/hand/a/b"] is None and rows["data/train"]["pool"] == [[1, 0, 1]]


def test_rows_of_a_later_build_are_read_as_far_as_known() -> None:
    book = LeaseBook()
    book.load(
        {
            "data/train": {
                "chunks": 9,
                "next": 3,
                "pool": [[1, 4, 0, "new"]],
                "reissued": 0,
                "repeated": 0,
                "colour": "blue",
            },
            "data/train/hand/a": {"generation": 2, "leases": [[2, 0, 7]], "new": 1},
            "data/train/other": {"what": "ever"},
            "members/a": {"not": "ours"},
        }
    )
    assert book.status()["train"]["done"] == 1
    assert say(book, "b", 1, want=1, chunks=9).granted == (Lease(1, 4),)


GOOD = {"chunks": 9, "next": 3, "pool": [], "reissued": 0, "repeated": 0}


@pytest.mark.parametrize(
    "rows",
    [
        {"data/train": {"next": 3}},
        {"data/train": [1, 2]},
        {"data/train": {**GOOD, "next": -1}},
        {"data/train": {**GOOD, "next": "3"}},
        {"data/train": {**GOOD, "pool": [[5, 0, 1]]}},
        {"data/train": {**GOOD, "pool": [[1, 0, 1], [1, 0, 1]]}},
        {"data/train": {**GOOD, "ahead": [2]}},
        {"data/tr ain": GOOD},
        {"data/train/hand/a": {"generation": 1, "leases": []}},
        {"data/train": GOOD, "data/train/hand/a": {"generation": 1, "leases": [[7, 0]]}},
        {"data/train": GOOD, "data/train/hand/a": [1]},
        {
            "data/train": GOOD,
            "data/train/hand/a": {"generation": 1, "leases": [[1, 0]]},
            "data/train/hand/b": {"generation": 1, "leases": [[1, 0]]},
        },
        {"data/train": {**GOOD, "pool": [[1, 0, 1]]}, "data/train/hand/b": {"generation": 1, "leases": [[1, 0]]}},
    ],
)
def test_rows_that_contradict_each_other_are_named_and_leave_the_book_alone(rows: dict[str, Any]) -> None:
    book = LeaseBook()
    say(book, "a", 1, want=1)
    with pytest.raises(StoreError, match="of the data ledger makes no sense"):
        book.load(rows)
    assert book.status()["train"]["in_hand"] == 1


# ---------------------------------------------------------------- a random world


@dataclass
class Worker:
    """What a learner process knows. It obeys the protocol and nothing else."""

    name: str
    generation: int
    serial: int = 0
    held: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    returned: dict[int, int] = field(default_factory=dict)
    told: DataReport | None = None

    def report(self, want: int, chunks: int) -> DataReport:
        self.serial += 1
        returned = tuple(Lease(chunk, start) for chunk, start in self.returned.items())
        self.told = DataReport("train", self.serial, chunks, want, tuple(sorted(self.done)), tuple(self.held), returned)
        return self.told

    def hear(self, answer: DataLeases) -> list[int]:
        """Returns the new chunks."""
        if self.told is None or answer.serial != self.told.serial:
            return []
        self.done -= set(self.told.done)
        for lease in self.told.returned:
            self.returned.pop(lease.chunk, None)
        for chunk in answer.revoked:
            self.held.pop(chunk, None)
        known = self.done | set(self.held) | set(self.returned)
        fresh = [lease for lease in answer.granted if lease.chunk not in known]
        self.held |= {lease.chunk: lease.start for lease in fresh}
        return [lease.chunk for lease in fresh]


CHUNKS = 12
NAMES = ("a", "b", "c")


class LeaseWorld(RuleBasedStateMachine):
    """Learners, losses, messages lost both ways and repeated, restarts of both sides."""

    @initialize()
    def begin(self) -> None:
        self.book = LeaseBook()
        self.rows: dict[str, Any] = {}
        self.workers = {name: Worker(name, 1) for name in NAMES}
        self.recorded: set[int] = set()
        """Chunks whose report of being done reached the book."""
        self.old: list[tuple[str, int, DataReport]] = []
        self.given: dict[tuple[str, int, int], tuple[Lease, ...]] = {}

    def deliver(self, name: str, generation: int, message: DataReport) -> DataLeases:
        current = generation == self.workers[name].generation
        newest = message.serial == self.workers[name].serial
        before = {chunk: self.book.fate("train", chunk)[0] for chunk in range(CHUNKS)} if self.rows else {}
        answer = self.book.report(name, generation, message)
        persisted(self.book, self.rows)
        if current and newest:
            self.recorded |= set(message.done)
        else:
            assert answer == DataLeases("train", message.serial), "an old report has no effect"
        for lease in answer.granted:
            place = before.get(lease.chunk, "not issued")
            assert lease.chunk not in self.recorded, "a finished chunk was issued again"
            assert place in ("not issued", "pool", f"in hand of {name}"), f"{lease} was {place}"
        return answer

    @rule(name=st.sampled_from(NAMES), want=st.integers(0, 3), fate=st.sampled_from(["ok", "ok", "unheard", "lost"]))
    def talk(self, name: str, want: int, fate: str) -> None:
        worker = self.workers[name]
        message = worker.report(want, CHUNKS)
        if fate == "lost":
            return
        self.old = [*self.old[-5:], (name, worker.generation, message)]
        answer = self.deliver(name, worker.generation, message)
        self.given = {**self.given, (name, worker.generation, message.serial): answer.granted}
        if fate == "ok":
            worker.hear(answer)

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def repeat_a_message(self, data: st.DataObject) -> None:
        name, generation, message = data.draw(st.sampled_from(self.old))
        worker = self.workers[name]
        if generation == worker.generation and message.serial == worker.serial and worker.told == message:
            # Unless a chunk that it was given has been finished by somebody else since: then it may have another.
            given = self.given.get((name, generation, message.serial), ())
            still = all(self.book.fate("train", lease.chunk)[0] == f"in hand of {name}" for lease in given)
            first = self.book.status() if name in self.heard_of and still else None
            self.deliver(name, generation, message)
            if first is not None:
                assert self.book.status() == first, "the newest report again: nothing new"
        elif name in self.heard_of:
            self.deliver(name, generation, message)

    @property
    def heard_of(self) -> set[str]:
        """Learners whose hand is open under their newest generation, with their newest report."""
        found = set()
        for name, worker in self.workers.items():
            row = self.rows.get(f"data/train/hand/{name}")
            if row is not None and row["generation"] == worker.generation and row["serial"] == worker.serial:
                found.add(name)
        return found

    @rule(name=st.sampled_from(NAMES))
    def finish_one(self, name: str) -> None:
        worker = self.workers[name]
        if worker.held:
            chunk = next(iter(worker.held))
            del worker.held[chunk]
            worker.done.add(chunk)

    @rule(name=st.sampled_from(NAMES), position=st.integers(0, 5))
    def hand_one_back(self, name: str, position: int) -> None:
        worker = self.workers[name]
        if worker.held:
            chunk = next(reversed(worker.held))
            worker.returned[chunk] = max(worker.held.pop(chunk), position)

    @rule(name=st.sampled_from(NAMES), dies=st.booleans())
    def lose(self, name: str, dies: bool) -> None:
        """Taken for lost; it comes back as it was, or as a new process."""
        self.book.release(name)
        persisted(self.book, self.rows)
        if dies:
            self.workers[name] = Worker(name, self.workers[name].generation + 1)

    @rule(name=st.sampled_from(NAMES))
    def fence(self, name: str) -> None:
        generation = self.workers[name].generation + 1
        self.book.release(name, before_generation=generation)
        persisted(self.book, self.rows)
        self.workers[name] = Worker(name, generation)

    @rule()
    def restart_the_syncer(self) -> None:
        before = self.book.status()
        self.book = LeaseBook()
        self.book.load(self.rows)
        assert self.book.status() == before and self.book.take_dirty() == {}

    @invariant()
    def every_chunk_is_in_one_place(self) -> None:
        if not self.rows:
            return
        places = [self.book.fate("train", chunk)[0] for chunk in range(CHUNKS)]
        status = self.book.status()["train"]
        stream = self.rows["data/train"]
        hands = [lease[0] for key, row in self.rows.items() if "/hand/" in key for lease in row["leases"]]
        pool = [pooled[0] for pooled in stream["pool"]]
        assert len(set(hands + pool)) == len(hands) + len(pool), "in two places"
        assert (len(hands), len(pool)) == (status["in_hand"], status["pool"]), "the tape knows what the book knows"
        assert status["issued"] == CHUNKS - places.count("not issued") == stream["next"]
        assert status["done"] == places.count("done") and status["pool"] == places.count("pool")
        assert {chunk for chunk, place in enumerate(places) if place == "done"} == self.recorded

    def teardown(self) -> None:
        """Heal the world: with every link up and nobody lost, all chunks get done."""
        if not hasattr(self, "book"):
            return
        for _ in range(3 * CHUNKS):
            for name in NAMES:
                worker = self.workers[name]
                worker.hear(self.deliver(name, worker.generation, worker.report(2, CHUNKS)))
                for chunk in list(worker.held):
                    del worker.held[chunk]
                    worker.done.add(chunk)
            self.every_chunk_is_in_one_place()
        assert self.recorded == set(range(CHUNKS))
        assert self.book.status()["train"]["done"] == CHUNKS


LeaseWorld.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeaseWorld = LeaseWorld.TestCase


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.integers(0, 3)), max_size=60), st.data())
def test_without_losses_every_chunk_is_done_exactly_once(talk: list[tuple[str, int, int]], data: st.DataObject) -> None:
    book, rows = LeaseBook(), {}
    workers = {name: Worker(name, 1) for name in NAMES}
    finished: list[int] = []
    healing = [(name, 2, 0) for _ in range(2 * CHUNKS) for name in NAMES]
    for name, want, fault in talk + healing:
        worker = workers[name]
        message = worker.report(want, CHUNKS)
        if fault == 1:
            continue  # lost on its way up
        answer = book.report(name, 1, message)
        persisted(book, rows)
        if fault == 2:
            continue  # the answer was lost
        worker.hear(answer)
        if fault == 3:
            book = LeaseBook()
            book.load(rows)
        for chunk in list(worker.held)[: data.draw(st.integers(0, 3)) if fault else None]:
            del worker.held[chunk]
            worker.done.add(chunk)
            finished.append(chunk)
    assert sorted(finished) == list(range(CHUNKS))
    status = book.status()["train"]
    assert (status["done"], status["reissued"], status["repeated"]) == (CHUNKS, 0, 0)
