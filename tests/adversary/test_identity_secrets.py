"""Somebody with the run's one token, against a real syncer: a session belongs to whoever opened it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SyncerProcess
from raw_learner import RawLearner

from atoll.core import messages as m
from atoll.errors import RefusedError
from atoll.wire import BulkClient

TOKEN = "the run's token"
FORGED_COUNT = 50
"""Attempts of an attack: enough to be in every phase of one push."""


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[SyncerProcess]:
    options = ("--learners", "2", "--fragments", "2", "--sync-every", "2")
    made = SyncerProcess(tmp_path, *options, ATOLL_TOKEN=TOKEN)
    yield made
    made.kill()


def join(syncer: SyncerProcess, name: str, instance: str = "") -> RawLearner:
    learner = RawLearner(syncer.address, name, token=TOKEN)
    learner.instance = instance or learner.instance
    return learner.join()


def fetched(learner: RawLearner, secret: str) -> str:
    """The code with which this fetch of parameters is refused; empty: it came."""

    async def once() -> str:
        bulk = BulkClient(learner.options)
        try:
            assert learner.welcome is not None
            who = (learner.name, learner.welcome.generation)
            await bulk.fetch(m.FetchRequest(m.FetchKind.THETA, *who, 0, m.NO_VERSION, secret=secret))
        except RefusedError as error:
            return error.code
        finally:
            await bulk.close()
        return ""

    return asyncio.run(once())


def test_a_forged_secret_pushes_and_fetches_nothing(syncer: SyncerProcess) -> None:
    victim, liar = join(syncer, "victim"), join(syncer, "liar")
    for secret in ("", "0" * 32, "f" * 64):
        for kind in (m.PushKind.CONTRIBUTION, m.PushKind.SEED, m.PushKind.HEAL):
            reply = liar.push(kind, 0, b"x" * 16, learner="victim", base_version=0, steps=1, tokens=1, secret=secret)
            assert reply.code == m.Refusal.SECRET, (kind, secret)
        assert liar.contribute(0, secret=secret).code == m.Refusal.SECRET, "not in its own name either"
        assert fetched(victim, secret) == m.Refusal.SECRET
    assert victim.contribute(0).accepted and fetched(victim, victim.welcome.secret) == ""  # type: ignore[union-attr]


def test_the_secret_of_an_earlier_session_is_refused_after_the_reconnect(syncer: SyncerProcess) -> None:
    learner = join(syncer, "a")
    assert learner.welcome is not None
    old = learner.welcome.secret
    learner.drop()
    again = join(syncer, "a", learner.instance)
    assert again.welcome is not None and again.welcome.secret != old
    assert again.welcome.generation == learner.welcome.generation
    assert again.contribute(0, secret=old).code == m.Refusal.SECRET
    assert fetched(again, old) == m.Refusal.SECRET
    assert again.contribute(0).accepted and fetched(again, again.welcome.secret) == ""


def test_forged_pushes_do_not_replace_the_one_that_is_under_way(syncer: SyncerProcess) -> None:
    """A newer attempt of the same push gives up the one before: nobody else may say that it is one."""
    victim, liar = join(syncer, "victim"), join(syncer, "liar")
    for number in range(FORGED_COUNT):
        seq = victim._seqs.get(0, -1) + 1
        forged = {"learner": "victim", "seq": seq, "secret": secrets.token_hex(16), "steps": 1, "tokens": 1}
        assert liar.push(m.PushKind.CONTRIBUTION, 0, b"x" * 16, **forged).code == m.Refusal.SECRET
        assert number % 20 or victim.contribute(0).accepted
    assert not victim.ended


def test_a_session_carries_the_contributions_of_its_own_learner_only(syncer: SyncerProcess) -> None:
    victim, liar = join(syncer, "victim"), join(syncer, "liar")
    header = m.PushHeader(m.PushKind.CONTRIBUTION, "victim", 1, 0, 0, 0, 900, 0, 1, 32, "int4", 1, 1)
    liar.say(m.InlinePush(header, b"x"))
    reply = liar.wait(m.InlineReply, lambda one: one.seq == 900).reply
    assert reply.code == m.Refusal.NOT_ALLOWED and "'victim'" in reply.detail
    assert not victim.ended


def test_ids_are_64_ascii_characters(syncer: SyncerProcess) -> None:
    for name in ("x" * 65, "lе", "", "a\nb"):
        with pytest.raises(RefusedError) as caught:
            RawLearner(syncer.address, name, token=TOKEN).hello()
        assert caught.value.code == m.Refusal.BAD_REQUEST
    assert RawLearner(syncer.address, "x" * 64, token=TOKEN).hello().generation == 1
