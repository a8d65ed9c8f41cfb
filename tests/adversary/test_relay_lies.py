"""A relay that lies, or a learner that says it is one: what it sends counts no more than what it said of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import SyncerProcess, check_books
from raw_learner import RawLearner
from raw_relay import LyingRelay, group
from test_relay import RelayProcess

from atoll.core import messages as m
from atoll.errors import AtollError, RefusedError
from atoll.syncer.relay_peers import FAILURES_MAX

STEPS, TOKENS = 2, 64


class Site:
    """An honest learner, and a liar that offers its work as a relay."""

    def __init__(self, folder: Path, *options: str, liars: int = 1) -> None:
        every = ("--fragments", "1", "--sync-every", str(STEPS), "--quorum", "all", "--codec-up", "fp32")
        self.syncer = SyncerProcess(folder, *every, "--codec-down", "fp32", "--learners", str(liars + 1), *options)
        self.honest = RawLearner(self.syncer.address, "honest").join()
        self.liars = [RawLearner(self.syncer.address, f"liar-{number}").join() for number in range(liars)]
        self.relays: list[LyingRelay] = []

    def relay(self, answers: Any) -> LyingRelay:
        relay = LyingRelay(self.syncer.address, answers)
        self.relays.append(relay)
        relay.attach()
        return relay

    def wait_round(self, number: int) -> None:
        for learner in (self.honest, *self.liars):
            learner.progress(STEPS)
        for learner in (self.honest, *self.liars):
            learner.wait(m.Request, lambda request: request.round == number)

    def give_honestly(self) -> None:
        assert self.honest.contribute(0, steps=STEPS, tokens=TOKENS).accepted

    def wait_version(self, number: int) -> None:
        self.honest.wait(m.Published, lambda published: published.version == number)

    def theta(self) -> np.ndarray:
        """The published parameters, of a run that has ended."""
        from safetensors.numpy import load_file

        self.end()
        return np.concatenate(
            [values.ravel() for values in load_file(self.syncer.folder / "model.safetensors").values()]
        )

    def end(self) -> None:
        for relay in self.relays:
            relay.close()
        self.relays = []
        if self.syncer.process.poll() is None:
            for learner in (self.honest, *self.liars):
                learner.close()
            check_books(self.syncer.status())
            assert self.syncer.stop() == 0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.end()


def test_what_a_relay_sends_is_no_longer_than_it_said(site: Site) -> None:
    """One contribution goes as it came: its length was told with the offer, and passed the guard by that. A learner
    that said it was a relay moved the model by 4.6e19."""
    relay = site.relay(lambda values: group(site.liars[0], 1e20))
    site.wait_round(1)
    assert relay.offer(site.liars[0], norm=0.01).accepted
    site.give_honestly()
    site.wait_version(1)
    assert relay.asked and np.abs(site.theta()).max() < 1.0


@pytest.mark.parametrize("said", ["as long as it is", "as long as was offered"])
def test_what_a_relay_makes_of_several_is_no_longer_than_they_were(tmp_path: Path, said: str) -> None:
    site = Site(tmp_path, liars=2)
    radii = {} if said == "as long as it is" else {"radii": [0.01 / np.sqrt(2)] * 2}
    relay = site.relay(lambda values: group(site.liars[0], 1e20, **radii))
    site.wait_round(1)
    assert all(relay.offer(liar, norm=0.01).accepted for liar in site.liars)
    site.give_honestly()
    site.wait_version(1)
    assert relay.asked and np.abs(site.theta()).max() < 1.0


ANSWERS: dict[str, Any] = {
    "lengths beyond any number": {"radii": [10**400] * 2},
    "lengths that are words": {"radii": ["long", "longer"]},
    "lengths below zero": {"radii": [-1.0, -1.0]},
    "one length too many": {"radii": [1.0] * 3},
    "no lengths": {"radii": None},
    "a codec that nobody has": {"codec": "../../etc/x"},
    "a codec that is none": {"codec": [1]},
}


def test_a_relay_that_sends_nonsense_ends_nobody_and_is_not_asked_for_ever(tmp_path: Path) -> None:
    site = Site(tmp_path, liars=2)
    for number, lies in enumerate(ANSWERS.values(), 1):
        try:
            relay = site.relay(lambda values, lies=lies: group(site.liars[0], 0.001, **lies))
        except RefusedError as error:
            assert number > FAILURES_MAX and "one by one" in error.detail
            break
        site.wait_round(number)
        assert all(relay.offer(liar, norm=1.0).accepted for liar in site.liars)
        site.give_honestly()
        site.wait_version(number)
        relay.wait_closed()
    else:
        pytest.fail("it was asked again and again")
    site.wait_round(number)
    assert all(liar.contribute(0, steps=STEPS, tokens=TOKENS).accepted for liar in site.liars)
    site.give_honestly()
    site.wait_version(number)
    site.end()


OFFERS: list[dict[str, Any]] = [
    {"norm": -1.0},
    {"norm": "long"},
    {"norm": 10**400},
    {"norm": float("inf")},
    {"fragment": -1},
    {"fragment": 3},
    {"fragment": "0"},
    {"tokens": 10**30},
    {"tokens": 1.5},
    {"steps": -1},
    {"seq": 2**70},
    {"learner": "honest"},
    {"learner": "honest\n"},
    {"secret": ""},
    {"secret": None},
    {"kind": "seed"},
    {"kind": "nothing"},
    {"codec": "x" * 10_000},
    {"more": 1},
]


def test_a_learner_of_a_relay_claims_no_more_than_that_can_keep(tmp_path: Path) -> None:
    """A relay has no layout to hold the size against: 64 GiB were allocated."""
    syncer = SyncerProcess(tmp_path, "--fragments", "1", "--learners", "1")
    relay = RelayProcess(syncer.address, tmp_path / "relay.log")
    learner = RawLearner(relay.address, "a")
    try:
        learner.hello()
        header = learner.header(m.PushKind.CONTRIBUTION, 0, b"x", size=64 << 30, codec="fp32", steps=1, tokens=1)
        reply = learner._on_loop(learner._bulk._push_once(header, memoryview(b"x")))  # type: ignore[union-attr]
        assert reply.code == m.Refusal.SIZE
    finally:
        learner.close()
        relay.kill()
        syncer.kill()


def test_offers_that_no_relay_makes_are_refused(site: Site) -> None:
    """An offer is judged as a push is: its header, whose it is, and its values."""
    relay = site.relay(lambda values: group(site.liars[0], 0.001))
    site.wait_round(1)
    for lies in OFFERS:
        if relay.closed:
            relay = site.relay(lambda values: group(site.liars[0], 0.001))
        try:
            assert not relay.offer(site.liars[0], **lies).accepted, lies
        except AtollError:
            pass  # refused by name, or the link is closed
    site.give_honestly()
    assert site.liars[0].contribute(0, steps=STEPS, tokens=TOKENS).accepted
    site.wait_version(1)
    assert not relay.asked
