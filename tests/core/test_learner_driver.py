"""One interpreter of a learner's effects: whoever brings a link, a clock and arrays gets retries, bounds and turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from world import TENSORS, config

from atoll.core import effects as fx
from atoll.core import messages as m
from atoll.core.learner_driver import LearnerDriver
from atoll.core.learner_host import FetchAnswer, FetchedPayload, HostArrays, LearnerDriverHost, OutgoingPayload
from atoll.core.learner_machine import LearnerMachine
from atoll.core.learner_waits import FETCHES_MAX, HEARTBEAT_NS, INLINE_NS_MAX, INNER_TRIES, RETRY_NS, UPDATES_KEPT

ACCEPTED = m.PushReply(True)
BUSY = m.PushReply(False, m.Refusal.BUSY, "")


class ToyVersion(NamedTuple):
    version: int
    checksum: int


class ToyArrays(HostArrays):
    """Parameters that nobody looks at: only their versions are kept."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, int]] = []
        self.adopted: list[tuple[int, int]] = []
        self.residuals = True

    def take(self, fragment: int) -> None:
        return

    def drop(self, fragment: int) -> None:
        return

    def settle(self, fragment: int, seq: int, merged: bool) -> None:
        return

    def forget_prepared(self, fragment: int) -> None:
        return

    def adopt(self, effect: fx.Adopt) -> int:
        self.adopted.append((effect.fragment, effect.version))
        return 0

    def forget_residuals(self) -> None:
        self.residuals = False

    def keep(self, fragment: int, made: ToyVersion) -> None:
        self.kept.append((fragment, made.version))


class ToyHost(LearnerDriverHost):
    """A world of one's own: calls are answered by hand, and time passes by hand."""

    def __init__(self) -> None:
        self.machine = LearnerMachine("a", "a1", TENSORS)
        self.driver = LearnerDriver(self.machine, self)
        self.toys = ToyArrays()
        self.time_ns = 0
        self.waiting: list[tuple[int, Callable[[], None]]] = []
        self.sent: list[m.LearnerMessage] = []
        self.pushes: list[tuple[m.PushHeader, Callable[[m.PushReply | None], None]]] = []
        self.fetches: list[tuple[m.FetchRequest, Callable[[FetchAnswer], None]]] = []
        self.prepared: list[int] = []
        self.inner: list[tuple[list[Any], str]] = []
        self.size = 1 << 20
        self.wrong = ""
        self.gone = False
        self.failure = ""

    @property
    def arrays(self) -> ToyArrays:
        return self.toys

    def now_ns(self) -> int:
        return self.time_ns

    def later(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        self.waiting.append((self.time_ns + delay_ns, lambda: action(*arguments)))

    def pass_ns(self, duration_ns: int) -> None:
        self.time_ns += duration_ns
        while due := sorted((one for one in self.waiting if one[0] <= self.time_ns), key=lambda one: one[0]):
            self.waiting.remove(due[0])
            due[0][1]()

    def news(self) -> None:
        return

    def send(self, message: m.LearnerMessage) -> None:
        self.sent.append(message)

    def push(self, header: m.PushHeader, payload: Any, done: Callable[[m.PushReply | None], None]) -> None:
        self.pushes.append((header, done))

    def fetch(self, request: m.FetchRequest, done: Callable[[FetchAnswer], None]) -> None:
        self.fetches.append((request, done))

    def contribute(self, effect: fx.Contribute, done: Callable[[OutgoingPayload | str], None]) -> None:
        done(self.wrong or OutgoingPayload(b"delta", self.size, 1))

    def prepare_whole(self, fragment: int, came: FetchedPayload, done: Callable[[Any], None]) -> None:
        done(ToyVersion(came.version, came.checksum))

    def prepare_update(self, wanted: fx.Fetch, payload: Any, done: Callable[[Any], None]) -> None:
        self.prepared.append(wanted.version)
        done(ToyVersion(wanted.version, wanted.checksum))

    def read_seed(self, fragment: int, done: Callable[[OutgoingPayload], None]) -> None:
        done(OutgoingPayload(b"seed", 4, 1))

    def read_held(self, fragment: int, version: int, done: Callable[[OutgoingPayload | None], None]) -> None:
        done(OutgoingPayload(b"held", 4, 1) if fragment != 1 else None)

    def copy_inner(self, done: Callable[[Sequence[OutgoingPayload]], None]) -> None:
        done([OutgoingPayload(b"one", 3, 1), OutgoingPayload(b"two", 3, 2)])

    def inner_came(self, pieces: Sequence[Any], peer: str, reason: str) -> None:
        self.inner.append((list(pieces), reason))

    def note(self, note: fx.Note) -> None:
        return

    def fail(self, code: str, detail: str) -> None:
        self.failure = code

    def let_go(self) -> None:
        self.gone = True

    # ------------------------------------------------------------ a run, as the syncer would have it

    def welcome(self, *, seed: bool = False) -> None:
        self.driver.heard(m.Welcome("run", 1, 1, config(), "f", seed, 2))
        self.pass_ns(0)

    def start(self) -> None:
        self.driver.heard(m.Start(0, tuple(m.FragmentState(0, 7) for _ in range(4)), (4, 4, 4, 4)))
        self.pass_ns(0)

    def join(self) -> None:
        self.welcome()
        self.start()
        while self.fetches:
            self.fetches.pop()[1](FetchedPayload(0, b"theta", 4, 7))
        self.driver.handle(fx.Boundary())
        assert self.machine.joined

    def contributed(self, fragment: int) -> None:
        """One step, and the syncer asks for its progress."""
        self.driver.handle(fx.Stepped(10, 1, 1.0))
        self.driver.heard(m.Request(1, 0, fragment))
        self.driver.handle(fx.Boundary())

    def inline(self) -> list[m.InlinePush]:
        return [message for message in self.sent if isinstance(message, m.InlinePush)]

    def publish(self, fragment: int, version: int, update: bytes = b"") -> None:
        self.driver.heard(m.Published(fragment, version, 1, 7, m.NO_VERSION, 1, 0, update))
        self.pass_ns(0)


@pytest.fixture
def host() -> ToyHost:
    return ToyHost()


def test_a_large_contribution_goes_over_bulk_and_is_pushed_again_after_a_pause_when_that_broke(host: ToyHost) -> None:
    host.join()
    host.contributed(0)
    header, done = host.pushes.pop()
    assert (header.fragment, header.size, host.inline()) == (0, host.size, [])
    done(None)
    assert not host.pushes
    host.pass_ns(RETRY_NS)
    again, done = host.pushes.pop()
    assert again == header
    done(ACCEPTED)
    host.pass_ns(10 * RETRY_NS)
    assert not host.pushes


def test_a_small_one_goes_inline_until_the_link_turns_out_to_be_slow_and_again_once_it_is_quick(host: ToyHost) -> None:
    host.join()
    host.size = 100
    host.contributed(0)
    assert len(host.inline()) == 1 and not host.pushes
    host.pass_ns(INLINE_NS_MAX)
    host.driver.heard(m.InlineReply(0, 0, ACCEPTED))
    host.contributed(1)
    assert len(host.inline()) == 1  # it would stand in front of everything else that is said
    host.pushes.pop()[1](ACCEPTED)
    host.contributed(2)
    assert len(host.inline()) == 2 and not host.pushes


def test_what_was_sent_inline_and_not_answered_is_sent_again_in_the_next_session(host: ToyHost) -> None:
    host.join()
    host.size = 100
    host.contributed(0)
    host.driver.link_down("cut", let_go=False)
    host.pass_ns(RETRY_NS)
    assert len(host.inline()) == 1
    host.welcome()
    host.start()
    assert [one.header.seq for one in host.inline()] == [0, 0]


def test_a_delta_that_is_not_finite_is_not_sent_and_the_learner_starts_anew(host: ToyHost) -> None:
    host.join()
    host.wrong = "not finite"
    host.contributed(0)
    host.pass_ns(0)
    assert not host.pushes and not host.inline() and not host.toys.residuals
    assert host.machine.reseeding and [request.kind for request, _ in host.fetches] == [m.FetchKind.THETA] * 4


def test_a_joiner_fetches_one_fragment_after_the_other_and_later_several_at_a_time(host: ToyHost) -> None:
    host.welcome()
    host.start()
    for _ in range(4):
        ((_, done),) = host.fetches
        host.fetches.clear()
        done(FetchedPayload(0, b"theta", 4, 7))
    host.driver.handle(fx.Boundary())
    for fragment in range(4):
        host.publish(fragment, 1)
    assert len(host.fetches) == FETCHES_MAX == 4


def test_an_update_that_came_with_its_notice_is_not_fetched_and_only_a_few_are_kept(host: ToyHost) -> None:
    host.join()
    for version in range(1, UPDATES_KEPT + 4):
        host.publish(0, version, b"update")
    assert host.prepared == [1, 2] and not host.fetches  # two wait for the next boundary
    while not host.fetches:
        host.driver.handle(fx.Stepped(10, 1, 1.0))
        host.pass_ns(0)
    assert host.prepared == list(range(1, UPDATES_KEPT + 3))
    assert [request.version for request, _ in host.fetches] == [UPDATES_KEPT + 3]


def test_a_fetch_that_broke_is_tried_again_and_one_that_is_gone_comes_whole(host: ToyHost) -> None:
    host.join()
    host.publish(0, 1)
    host.fetches.pop()[1](None)
    host.pass_ns(RETRY_NS)
    request, done = host.fetches.pop()
    assert (request.kind, request.version) == (m.FetchKind.UPDATE, 1)
    done(m.Refusal.UNKNOWN_VERSION)
    host.pass_ns(0)
    request, done = host.fetches.pop()
    assert request.kind is m.FetchKind.THETA
    done(FetchedPayload(1, None, 0))  # damaged
    host.pass_ns(0)
    host.fetches.pop()[1](FetchedPayload(1, b"theta", 4, 7))
    assert host.toys.kept[-1] == (0, 1)


def test_a_seed_goes_fragment_by_fragment_and_begins_anew_when_it_is_asked_for_again(host: ToyHost) -> None:
    host.welcome(seed=True)
    host.pushes.pop()[1](BUSY)
    host.pass_ns(RETRY_NS)
    host.pushes.pop()[1](ACCEPTED)
    (header, done) = host.pushes.pop()
    assert header.fragment == 1
    host.welcome(seed=True)
    done(ACCEPTED)
    assert [header.fragment for header, _ in host.pushes] == [0]


def test_a_seed_that_broke_is_given_up_with_its_session(host: ToyHost) -> None:
    host.welcome(seed=True)
    host.pushes.pop()[1](None)
    host.driver.link_down("cut", let_go=False)
    host.pass_ns(10 * RETRY_NS)
    assert not host.pushes


def test_a_seed_that_is_not_finite_ends_the_learner(host: ToyHost) -> None:
    host.welcome(seed=True)
    host.pushes.pop()[1](m.PushReply(False, m.Refusal.NOT_FINITE, "nan"))
    assert host.failure == m.Refusal.NOT_FINITE


def test_a_syncer_that_lost_versions_gets_those_that_are_still_here(host: ToyHost) -> None:
    host.join()
    host.driver.heard(m.Heal((0, 1, 2)))
    host.pass_ns(0)
    given = []
    while host.pushes:
        header, done = host.pushes.pop()
        given.append((header.kind, header.fragment))
        done(ACCEPTED)
    assert given == [(m.PushKind.HEAL, 0), (m.PushKind.HEAL, 2)]


def test_inner_state_is_given_in_pieces_and_not_for_ever(host: ToyHost) -> None:
    host.join()
    host.driver.heard(m.Donate(3, (0, 0, 0, 0)))
    host.driver.handle(fx.Stepped(10, 1, 1.0))
    header, done = host.pushes.pop()
    assert (header.fragment, header.seq, header.steps, header.tokens) == (3, 0, 2, 6)
    done(ACCEPTED)
    for _ in range(INNER_TRIES):
        header, done = host.pushes.pop()
        assert header.seq == 1
        done(BUSY)
        host.pass_ns(RETRY_NS)
    assert not host.pushes


def test_a_joiner_takes_inner_state_piece_by_piece_or_hears_why_there_is_none(host: ToyHost) -> None:
    host.welcome()
    host.driver.heard(m.InnerOffer(3, 2, 6, "b", ""))
    host.fetches.pop()[1](m.Refusal.BUSY)
    host.pass_ns(RETRY_NS)
    host.fetches.pop()[1](FetchedPayload(0, b"one", 3))
    host.fetches.pop()[1](FetchedPayload(1, b"two", 3))
    host.driver.heard(m.InnerOffer(3, 0, 0, "b", "nobody has any"))
    assert host.inner == [([b"one", b"two"], ""), ([], "nobody has any")]


def test_a_learner_that_left_is_let_go_by_the_syncer_and_else_leaves_again(host: ToyHost) -> None:
    host.join()
    host.driver.handle(fx.Closing(True, "done"))
    assert host.driver.left
    host.driver.link_down("cut", let_go=False)
    assert not host.driver.left and not host.gone
    host.welcome()
    host.start()
    assert host.driver.left
    host.driver.link_down("the syncer ended the session", let_go=True)
    assert host.gone


@pytest.mark.parametrize(("code", "again"), [(m.Refusal.CHECKSUM, True), (m.Refusal.NORM_OUTLIER, False)])
def test_what_a_leaver_hands_over_is_given_again_if_it_broke_on_the_way(host: ToyHost, code: str, again: bool) -> None:
    host.join()
    host.driver.handle(fx.Stepped(10, 1, 1.0))
    host.driver.handle(fx.Closing(True, "done"))
    given = set()
    while host.pushes and len(given) < config().fragments:
        header, done = host.pushes.pop()
        given.add(header.fragment)
        done(m.PushReply(False, code, "") if header.fragment == 0 else ACCEPTED)
        host.driver.handle(fx.Boundary())
    assert [header.fragment for header, _ in host.pushes] == ([0] if again else [])
    assert host.driver.left != again
    for _, done in host.pushes:
        done(ACCEPTED)
    assert host.driver.left


def test_a_leaver_hands_over_no_more_fragments_at_once_than_the_run_has_rounds_in_flight(host: ToyHost) -> None:
    """Eight of them side by side on a thin link were all given up as too slow after a minute, and began anew."""
    most = config().rounds_in_flight_max
    assert most < config().fragments
    host.join()
    host.driver.handle(fx.Stepped(10, 1, 1.0))
    host.driver.handle(fx.Closing(True, "done"))
    handed = []
    while not host.driver.left:
        assert 0 < len(host.pushes) <= most
        header, done = host.pushes.pop()
        handed.append(header.fragment)
        done(ACCEPTED)
        host.driver.handle(fx.Boundary())
    assert sorted(handed) == list(range(config().fragments))


def test_a_learner_that_has_joined_is_heard_even_when_it_stands_still(host: ToyHost) -> None:
    host.driver.start()
    host.pass_ns(HEARTBEAT_NS)
    assert host.sent == []
    host.join()
    host.sent.clear()
    host.pass_ns(HEARTBEAT_NS)
    assert [type(message) for message in host.sent] == [m.Progress]
