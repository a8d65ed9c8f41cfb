"""The learner's side of the leases: what counts as processed, what is told when, and how much is held."""

from __future__ import annotations

import pytest
from data_fakes import FakeLearner, FakeRun

from atoll.core.leases import HAND_MAX
from atoll.core.messages import DataLeases, Lease
from atoll.data import lease_client as client_module
from atoll.data.cutting import Part, Ticket
from atoll.data.held_chunks import HeldChunks
from atoll.data.lease_client import LeaseClient
from atoll.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def not_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLearner, "eager", False)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def learner() -> FakeLearner:
    return FakeRun().learner("a")


def work(client: LeaseClient, learner: FakeLearner, clock: Clock, chunk_s: float = 1.0) -> int:
    """Train on one whole chunk of ten samples."""
    ticket = client.take()
    assert ticket is not None
    clock.now_s += chunk_s
    client.hand([Part(ticket.key, 10, 10 - ticket.start, True)])
    learner.step()
    return ticket.chunk


# ---------------------------------------------------------------- the shelf


def held(shelf: HeldChunks) -> dict[int, int]:
    return {chunk: held.processed for chunk, held in shelf.held.items()}


def key(shelf: HeldChunks) -> int:
    """Take the next chunk; its reading's key."""
    ticket = shelf.take()
    assert ticket is not None
    return ticket.key


def what(ticket: Ticket | None) -> tuple[int, int]:
    """(chunk, start)"""
    return (ticket.chunk, ticket.start) if ticket is not None else (-1, -1)


def test_only_a_step_makes_samples_processed() -> None:
    shelf = HeldChunks()
    shelf.add(Lease(7, 2))
    ticket = shelf.take()
    assert ticket is not None and what(ticket) == (7, 2) and shelf.take() is None
    assert shelf.hand([Part(ticket.key, 5, 3, False)]) and held(shelf) == {7: 2}
    assert shelf.finish_step() == [] and held(shelf) == {7: 5}
    shelf.hand([Part(ticket.key, 8, 3, True)])
    assert held(shelf) == {7: 5}
    assert shelf.finish_step() == [7] and held(shelf) == {}


def test_batches_taken_ahead_belong_to_the_next_step() -> None:
    shelf = HeldChunks(lookahead=1)
    shelf.add(Lease(0))
    reading = key(shelf)
    shelf.hand([Part(reading, 4, 4, False)])
    shelf.hand([Part(reading, 8, 4, True)])
    assert shelf.finish_step() == [] and held(shelf) == {0: 4}
    shelf.lookahead = 0
    shelf.make_due()
    assert shelf.finish_step() == [0]


def test_a_batch_that_was_revoked_altogether_is_not_given() -> None:
    shelf = HeldChunks()
    shelf.add(Lease(0))
    shelf.add(Lease(1))
    first, second = key(shelf), key(shelf)
    shelf.remove(0)
    assert not shelf.hand([Part(first, 4, 4, False)])
    assert shelf.hand([Part(first, 5, 1, True), Part(second, 3, 3, False)])
    assert shelf.finish_step() == [] and held(shelf) == {1: 3}
    assert shelf.unwanted(first) and not shelf.unwanted(second)


def test_a_chunk_that_comes_back_is_read_once_and_anew() -> None:
    shelf = HeldChunks()
    shelf.add(Lease(0))
    shelf.remove(0)
    shelf.add(Lease(0, 3))
    ticket = shelf.take()
    assert ticket is not None and what(ticket) == (0, 3) and shelf.take() is None
    shelf.remove(0)
    shelf.add(Lease(0, 3))
    assert not shelf.hand([Part(ticket.key, 6, 3, False)]), "what the first reading had under way is not wanted"
    assert shelf.close([Part(ticket.key, 6, 0, True)]) == [] and held(shelf) == {0: 3}


def test_starting_over_reads_again_what_was_not_handed_out() -> None:
    shelf = HeldChunks()
    for chunk in range(3):
        shelf.add(Lease(chunk))
    first, second = key(shelf), key(shelf)
    shelf.hand([Part(first, 5, 5, True)])
    shelf.hand([Part(second, 2, 2, False)])
    shelf.rewind()
    assert [what(shelf.take()) for _ in range(3)] == [(1, 2), (2, 0), (-1, -1)]
    assert not shelf.hand([Part(second, 4, 2, False)])
    assert shelf.finish_step() == [0] and held(shelf) == {1: 2, 2: 0}


def test_only_what_the_loop_has_nothing_of_is_handed_back_unread() -> None:
    shelf = HeldChunks()
    for chunk in range(3):
        shelf.add(Lease(chunk, 1))
    shelf.hand([Part(key(shelf), 4, 3, False)])
    shelf.rewind()
    assert shelf.surplus(0) == [Lease(2, 1), Lease(1, 1)] and held(shelf) == {0: 1}


def test_empty_chunks_and_given_up_samples_close() -> None:
    shelf = HeldChunks()
    for chunk in range(3):
        shelf.add(Lease(chunk))
    empty, begun, given_up = key(shelf), key(shelf), key(shelf)
    assert shelf.close([Part(empty, 0, 0, True)]) == [0]
    shelf.hand([Part(begun, 4, 4, False)])
    assert shelf.close([Part(begun, 6, 2, True), Part(given_up, 2, 2, True)]) == [2], "1 has samples in the loop"
    assert shelf.finish_step() == [1]


def test_going_over_old_chunks_stops_when_something_new_is_there() -> None:
    shelf = HeldChunks()
    assert not shelf.repeat_one()
    for chunk in (4, 5):
        shelf.add(Lease(chunk))
        shelf.hand([Part(key(shelf), 3, 3, True)])
    shelf.finish_step()
    assert shelf.repeat_one() and shelf.repeat_one() and shelf.repeat_one()
    tickets = [shelf.take() for _ in range(3)]
    assert [what(ticket) for ticket in tickets] == [(4, 0), (5, 0), (4, 0)]
    again = tickets[0].key if tickets[0] is not None else 0
    assert again < 0 and shelf.hand([Part(again, 3, 3, True)]) and shelf.finish_step() == []
    assert not shelf.unwanted(again)
    shelf.repeat_one()
    shelf.add(Lease(9))
    assert shelf.unwanted(again)
    assert [what(shelf.take()) for _ in range(2)] == [(9, 0), (-1, -1)]


# ---------------------------------------------------------------- the client


def test_a_name_that_cannot_be_is_refused_here_already(learner: FakeLearner) -> None:
    with pytest.raises(ConfigError, match=r"cannot be called 'a b'; use 1 to 64 letters"):
        LeaseClient(learner, stream="a b", chunks=0)


def test_leases_are_held_for_the_time_that_was_asked_for(learner: FakeLearner, clock: Clock) -> None:
    client = LeaseClient(learner, stream="train", chunks=0, ahead_s=30.0, clock=clock)
    assert learner.run.status()["in_hand"] == 2, "before anything is measured: one to read and the next"
    for _ in range(4):
        work(client, learner, clock, chunk_s=2.0)
    clock.now_s += 5
    work(client, learner, clock, chunk_s=2.0)
    in_hand = learner.run.status()["in_hand"]
    assert 10 <= in_hand <= 15, "30 s at 2 s each, a bit less for the pause"


def test_a_batch_of_many_chunks_is_filled_in_few_reports(learner: FakeLearner, clock: Clock) -> None:
    client = LeaseClient(learner, stream="train", chunks=0, ahead_s=0, clock=clock)
    taken = 0
    while taken < 64:
        if client.take() is None:
            client.nudge(now=True)
        else:
            taken += 1
    assert learner.reports <= 8, "as many again each time"


def test_a_hand_is_never_fuller_than_the_syncer_allows(learner: FakeLearner, clock: Clock) -> None:
    client = LeaseClient(learner, stream="train", chunks=0, ahead_s=1e9, clock=clock)
    for _ in range(3):
        work(client, learner, clock)
    assert HAND_MAX - 3 <= learner.run.status()["in_hand"] <= HAND_MAX, "finished ones take room until they are told"


def test_of_data_that_ends_a_share_is_left_to_others_and_the_rest_handed_back(clock: Clock) -> None:
    run = FakeRun()
    first, second = run.learner("a"), run.learner("b")
    client = LeaseClient(first, stream="train", chunks=80, ahead_s=1e6, clock=clock)
    work(client, first, clock)
    assert run.status()["in_hand"] == 9, "an eighth of the 78 that nobody had"
    LeaseClient(second, stream="train", chunks=80, ahead_s=1e6, hold_min=100, clock=clock)
    assert run.status() | {"issued": 80, "in_hand": 79, "pool": 0} == run.status(), "b takes all the rest"
    clock.now_s += 2
    work(client, first, clock)  # the answer says that nothing is left, so a hands back what it has not begun
    status = run.status()
    assert (status["done"], status["pool"], status["in_hand"], status["reissued"]) == (2, 6, 72, 0)
    assert len(client.report().holding) == 2


def test_one_report_is_in_flight_at_a_time_and_a_lost_one_is_sent_again(clock: Clock) -> None:
    learner = FakeRun().learner("a")
    client = LeaseClient(learner, stream="train", chunks=0, ahead_s=0, clock=clock)
    learner.cut_off()
    work(client, learner, clock)
    client.report()  # what the link does with the poke; nobody hears it
    learner.up = True
    sent = learner.reports
    work(client, learner, clock)
    assert learner.reports == sent, "the answer to the first may still come"
    clock.now_s += client_module.REPORT_LOST_S
    client.stepped()
    assert learner.reports > sent and learner.run.status()["done"] == 2


def test_an_answer_to_an_older_report_changes_nothing(learner: FakeLearner, clock: Clock) -> None:
    client = LeaseClient(learner, stream="train", chunks=0, clock=clock)
    old = client.report()
    newest = client.report()
    client.leases(DataLeases("train", old.serial, (Lease(50), Lease(51)), (0, 1), True))
    assert client.report().holding == (0, 1) and not client.exhausted
    assert newest.serial > old.serial


def test_a_grant_whose_answer_was_lost_is_granted_again(clock: Clock) -> None:
    learner = FakeRun().learner("a")
    learner.cut_off()
    client = LeaseClient(learner, stream="train", chunks=10, clock=clock)
    learner.talk(client, deaf=True)
    assert learner.run.status()["in_hand"] == 2 and client.take() is None
    learner.reconnect()
    assert [work(client, learner, clock) for _ in range(10)] == list(range(10)), "no number is skipped"


def test_reports_that_are_not_urgent_wait_for_each_other(learner: FakeLearner, clock: Clock) -> None:
    client = LeaseClient(learner, stream="train", chunks=0, ahead_s=50.0, clock=clock)
    for _ in range(20):
        work(client, learner, clock, chunk_s=1.0)
    before = learner.reports
    for _ in range(20):
        work(client, learner, clock, chunk_s=0.1)
    assert learner.reports - before <= 3, "two seconds, one report each"


def test_a_syncer_that_grants_nothing_is_not_asked_without_pause(clock: Clock) -> None:
    learner = FakeRun().learner("a")
    learner.cut_off()
    client = LeaseClient(learner, stream="train", chunks=0, clock=clock)
    learner.up = True
    learner.talk = lambda source: source.leases(DataLeases("train", source.report().serial))  # type: ignore[method-assign]
    before = client.answers
    for _ in range(100):
        client.nudge(now=True)
        clock.now_s += 0.01
    assert 1 <= client.answers - before <= 1 + 1.0 / client_module.ASK_AGAIN_S


def test_leaving_hands_back_exactly_the_rest(learner: FakeLearner, clock: Clock) -> None:
    client = LeaseClient(learner, stream="train", chunks=0, ahead_s=0, clock=clock)
    ticket = client.take()
    assert ticket is not None
    client.hand([Part(ticket.key, 6, 6, False)])
    learner.step()
    client.hand([Part(ticket.key, 8, 2, False)])  # no step any more
    learner.leave()
    assert client.over and client.take() is None
    other = learner.run.learner("b")
    told = LeaseClient(other, stream="train", chunks=0, clock=clock)
    assert [what(told.take()), what(told.take())] == [(0, 6), (1, 0)]
    assert learner.run.status()["reissued"] == 0


def test_a_loop_that_has_ended_hands_back_what_is_unread_and_asks_for_nothing(
    learner: FakeLearner, clock: Clock
) -> None:
    client = LeaseClient(learner, stream="train", chunks=0, ahead_s=0, clock=clock)
    work(client, learner, clock)
    client.finish()
    assert learner.run.status() | {"done": 1, "in_hand": 0, "pool": 2} == learner.run.status()
    learner.reconnect()
    assert learner.run.status()["in_hand"] == 0
    clock.now_s += 1
    client.rewind()
    assert learner.run.status()["in_hand"] == 2, "another loop begins"


def test_what_is_granted_to_one_who_leaves_goes_straight_back(learner: FakeLearner, clock: Clock) -> None:
    client = LeaseClient(learner, stream="train", chunks=0, clock=clock)
    client.leaving()
    learner.up = False
    message = client.report()
    client.leases(DataLeases("train", message.serial, (Lease(8, 3),)))
    assert client.report().returned == (Lease(8, 3),)


def test_when_the_run_is_over_there_is_nothing_left(learner: FakeLearner, clock: Clock) -> None:
    client = LeaseClient(learner, stream="train", chunks=0, clock=clock)
    client.dropped()
    assert client.over and client.take() is None and client.report().want == 0 and not client.repeat_one()


def test_a_second_client_of_the_same_stream_gets_what_the_first_one_held(learner: FakeLearner, clock: Clock) -> None:
    first = LeaseClient(learner, stream="train", chunks=10, clock=clock)
    first.take()
    learner.sources.clear()
    second = LeaseClient(learner, stream="train", chunks=10, clock=clock)
    assert what(second.take()) == (0, 0)
