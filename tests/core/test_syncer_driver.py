"""The driver of the syncer's effects on a platform of a test's own: the smallest that there can be, with a disk whose
writes end when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from atoll.core import effects as fx
from atoll.core.config import SyncConfig
from atoll.core.diskless import DisklessPlatform
from atoll.core.durability_gate import DurabilityGate
from atoll.core.fragment_turns import FragmentTurns
from atoll.core.messages import (
    Hello,
    PushHeader,
    PushKind,
    Ready,
    Start,
    SyncerMessage,
    TensorSpec,
    Welcome,
)
from atoll.core.syncer_driver import StoreOutcome, SyncerDriver, VersionToStore
from atoll.core.syncer_machine import SyncerMachine

SEED = PushHeader(PushKind.SEED, "a", 1, 0, 0, 0, 0, -1, 0, 0, "fp32", 1, 1)
CONTRIBUTION = PushHeader(PushKind.CONTRIBUTION, "a", 1, 0, 0, 0, 0, 0, 4, 40, "int4", 1, 1)


class ToyPlatform(DisklessPlatform):
    """One learner, one fragment; its parameter is a number. What the disk is asked for waits in `writes`."""

    def __init__(self, level: str) -> None:
        config = SyncConfig(fragments=1, sync_every=4, quorum="1", learners_expected=1, grace_cap_steps=0.0)
        self.driver = SyncerDriver(SyncerMachine(config, "toy"), self, DurabilityGate(level))
        self.sent: list[SyncerMessage] = []
        self.writes: list[Callable[[], None]] = []
        self.stored: list[int] = []
        self.theta = (-1, 0.0)
        self.published: list[int] = []
        self.lost = self.fenced = self.newer = self.ended = ""

    def begin(self) -> None:
        """One learner gives the first parameters and is ready."""
        self.driver.open_session(1, Hello("a", "a-1", 2, (TensorSpec("w", (256,), "float32"),)))
        self.work()
        assert self.driver.open_push(SEED).accepted and self.driver.complete_push(SEED, None, finite=True).accepted
        self.work()
        self.driver.apply(fx.FromLearner(1, Ready(0, (0,))))

    def work(self) -> None:
        """The disk does what it was asked for."""
        while self.writes:
            self.writes.pop(0)()

    def kinds(self) -> list[type]:
        return [type(message) for message in self.sent]

    def now_ns(self) -> int:
        return 1

    def wake_at(self, wake_ns: int | None) -> None:
        """Nothing here depends on time."""

    def end_fenced(self, reason: str) -> None:
        self.fenced = reason

    def end_finished(self, reason: str) -> None:
        self.ended = reason

    def publish(self, merge: fx.Merge, announce: Callable[[], None]) -> None:
        self.published.append(merge.version)
        announce()

    def send(self, session: int, message: SyncerMessage) -> None:
        self.sent.append(message)

    def end_session(self, session: int, reason: str) -> None:
        raise AssertionError("nobody has left")

    def commit_seed(self, done: Callable[[tuple[int, ...]], None]) -> None:
        self.theta = (0, 0.0)
        self.writes.append(lambda: done((1,)))

    def merge(self, merge: fx.Merge, payloads: list[float], done: Callable[[fx.MergeFinished], None]) -> None:
        self.theta = (merge.version, sum(payloads))
        self.writes.append(lambda: done(fx.MergeFinished(0, finite=True, checksum=7)))

    def version(self, fragment: int) -> int:
        return self.theta[0]

    def append(self, rows: Mapping[str, Any]) -> None:
        return

    def sync(self, done: Callable[[str], None]) -> None:
        self.writes.append(lambda: done(""))

    def store(self, item: VersionToStore, done: Callable[[StoreOutcome], None]) -> None:
        def write() -> None:
            self.stored += [] if self.lost else [item.version]
            done(StoreOutcome(self.lost))

        self.writes.append(write)

    def check_epoch(self, done: Callable[[], None]) -> None:
        if self.newer:
            self.driver.fence(self.newer)
        else:
            done()


@pytest.fixture
def toy() -> ToyPlatform:
    platform = ToyPlatform("commit")
    platform.begin()
    return platform


def contribute(toy: ToyPlatform) -> None:
    assert toy.driver.open_push(CONTRIBUTION).accepted
    assert toy.driver.complete_push(CONTRIBUTION, 3.0, finite=True, norm=1.0).accepted
    toy.driver.apply(fx.SessionClosed(1, "cut"))
    toy.driver.apply(fx.StopRequested("enough"))  # what is held is merged now


def test_a_learner_is_welcomed_when_its_membership_is_on_the_tape() -> None:
    toy = ToyPlatform("commit")
    toy.driver.open_session(1, Hello("a", "a-1", 2, (TensorSpec("w", (256,), "float32"),)))
    assert toy.kinds() == []
    toy.work()
    assert toy.kinds() == [Welcome]


def test_a_run_begins_when_all_of_the_seed_is_stored(toy: ToyPlatform) -> None:
    assert toy.stored == [0] and Start in toy.kinds()


def test_a_payload_that_is_refused_is_not_kept(toy: ToyPlatform) -> None:
    assert not toy.driver.complete_push(CONTRIBUTION, 3.0, finite=False).accepted
    assert toy.driver.held == {}


def test_a_small_contribution_is_answered_on_its_session(toy: ToyPlatform) -> None:
    reply = toy.driver.open_push(CONTRIBUTION)
    toy.driver.answer_inline(1, CONTRIBUTION, reply)
    assert toy.kinds()[-1].__name__ == "InlineReply"


def test_changes_of_one_fragment_take_turns_and_others_do_not_wait() -> None:
    turns, done = FragmentTurns(), list[str]()
    turns.take(0, lambda: done.append("first"))
    turns.take(0, lambda: done.append("second"))
    turns.take(1, lambda: done.append("other"))
    assert done == ["first", "other"] and turns.taken(0)
    turns.give_back(0)
    assert done == ["first", "other", "second"]
    turns.give_back(0)
    assert not turns.taken(0) and turns.taken(1)


def test_a_version_is_stored_then_published_and_its_turn_is_over_then(toy: ToyPlatform) -> None:
    contribute(toy)
    assert toy.driver.turns.taken(0) and toy.published == []
    toy.work()
    assert toy.stored == [0, 1] and toy.published == [1] and toy.theta == (1, 3.0)
    assert not toy.driver.turns.taken(0) and toy.driver.held == {} and toy.ended == "enough"


def test_training_goes_on_when_the_disk_fails_and_what_it_missed_is_written_later(toy: ToyPlatform) -> None:
    toy.lost = "no space"
    contribute(toy)
    toy.work()
    assert toy.stored == [0] and toy.published == [1] and "no space" in toy.driver.gate.degraded
    toy.lost = ""
    toy.driver.catch_up(lambda: None)
    toy.work()
    assert toy.stored == [0, 1] and not toy.driver.gate.degraded


@pytest.mark.parametrize("level", ["interval", "commit"])
def test_what_is_not_written_is_published_only_by_the_newest_syncer(level: str) -> None:
    toy = ToyPlatform(level)
    toy.begin()
    toy.driver.gate.failed("no space")
    toy.newer = "epoch 2 has opened the run"
    contribute(toy)
    toy.work()
    assert toy.published == [] and toy.fenced == toy.newer
