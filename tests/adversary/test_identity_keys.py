"""Somebody with a key of the run, against a real syncer: he is himself, and nobody else, until his key is revoked."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import raw_direct
from cluster import WAIT_S, SyncerProcess, TrainingThread
from raw_direct import Peer, contribution
from raw_learner import RawLearner

from atoll.core import Role
from atoll.core import messages as m
from atoll.errors import RefusedError, UnreachableError
from atoll.keys import KEYS_FILE, issue, revoke
from atoll.keys.registry import write_keys
from atoll.wire import BulkClient, ClientOptions, ask_to_leave, direct, fetch_status

KEYS = {
    "a": Role.LEARNER,
    "b": Role.LEARNER,
    "honest": Role.LEARNER,
    "eye": Role.OBSERVER,
    "boss": Role.OPERATOR,
}


class Run:
    """A syncer with keys, and everybody's token."""

    def __init__(self, folder: Path) -> None:
        self.keys = folder / "keys"
        self.keys.mkdir()
        write_keys(self.keys / KEYS_FILE, {})
        self.tokens = {name: issue(self.keys, name, role) for name, role in KEYS.items()}
        (folder / "run").mkdir()
        options = ("--keys", str(self.keys), "--learners", "2", "--fragments", "2", "--sync-every", "2")
        self.syncer = SyncerProcess(folder / "run", *options)

    def options(self, name: str) -> ClientOptions:
        return ClientOptions(self.syncer.address, token=self.tokens.get(name, name))

    def raw(self, name: str, key: str = "") -> RawLearner:
        """A learner of this name, with its own key or another's."""
        return RawLearner(self.syncer.address, name, token=self.tokens[key or name])

    def trains(self, name: str) -> TrainingThread:
        return TrainingThread(self.syncer.address, name, token=self.tokens[name], step_s=0.02)

    def status(self, name: str = "eye") -> dict[str, Any]:
        return asyncio.run(fetch_status(self.options(name)))

    def member(self, name: str) -> dict[str, Any]:
        return next((one for one in self.status()["members"] if one["learner"] == name), {})

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"never happened: {what}\n{self.syncer.output()}"
            time.sleep(0.05)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.syncer.kill()


def refusal_of(work: Callable[[], Any]) -> str:
    with pytest.raises(RefusedError) as caught:
        work()
    return caught.value.code


def patiently(work: Callable[[], Any]) -> Any:
    """A call that is refused on its headers may hear that its connection broke instead; learners try again."""
    for _ in range(20):
        with contextlib.suppress(UnreachableError):
            return work()
    raise AssertionError("no answer")


def fetch(options: ClientOptions, request: m.FetchRequest) -> Any:
    async def once() -> Any:
        bulk = BulkClient(options)
        try:
            return await bulk.fetch(request)
        finally:
            await bulk.close()

    return asyncio.run(once())


def theta_of(learner: RawLearner) -> m.FetchRequest:
    assert learner.welcome is not None
    who = (learner.name, learner.welcome.generation)
    return m.FetchRequest(m.FetchKind.THETA, *who, 0, m.NO_VERSION, secret=learner.welcome.secret)


def test_nobody_fences_anothers_id_or_speaks_in_its_name(run: Run) -> None:
    victim, thief = run.raw("a").join(), run.raw("b").join()
    before = run.member("a")
    for key in ("b", "eye", "boss"):
        assert refusal_of(run.raw("a", key).hello) == m.Refusal.NOT_ALLOWED
    assert thief.contribute(0, learner="a").code == m.Refusal.NOT_ALLOWED
    assert victim.welcome is not None
    secret = victim.welcome.secret  # even somebody who has overheard it needs the key as well
    assert thief.contribute(0, learner="a", secret=secret).code == m.Refusal.NOT_ALLOWED
    header = m.PushHeader(m.PushKind.CONTRIBUTION, "a", 1, 0, 0, 0, 900, 0, 1, 32, "int4", 1, 1)
    thief.say(m.InlinePush(header, b"x"))
    inline = thief.wait(m.InlineReply, lambda reply: reply.seq == 900)
    assert inline.reply.code == m.Refusal.NOT_ALLOWED
    assert refusal_of(lambda: fetch(run.options("b"), theta_of(victim))) == m.Refusal.NOT_ALLOWED
    after = run.member("a")
    assert (after["generation"], after["state"]) == (before["generation"], "active") and not victim.ended
    assert victim.contribute(0).accepted, "its own word counts as before"


def test_an_observer_sees_the_status_and_no_parameter(run: Run) -> None:
    learner = run.raw("a").join()
    assert run.member("a")["state"] == "active", (learner.ended, learner.heard, run.syncer.output())
    for key in ("eye", "boss"):
        assert refusal_of(lambda key=key: fetch(run.options(key), theta_of(learner))) == m.Refusal.NOT_ALLOWED
        own = m.FetchRequest(m.FetchKind.THETA, key, 1, 0, m.NO_VERSION)
        assert refusal_of(lambda key=key, own=own: fetch(run.options(key), own)) == m.Refusal.NOT_ALLOWED
        assert refusal_of(run.raw(key).hello) == m.Refusal.NOT_ALLOWED
    assert fetch(run.options("a"), theta_of(learner))[0].size > 0


def test_who_may_ask_whom_to_leave(run: Run) -> None:
    learners = [run.raw(name).join() for name in ("a", "b")]

    def ask(key: str, learner: str) -> str:
        return asyncio.run(ask_to_leave(run.options(key), learner))

    for key in ("b", "eye"):
        assert refusal_of(lambda key=key: ask(key, "a")) == m.Refusal.NOT_ALLOWED
    assert not any(isinstance(message, m.Stop) for message in learners[0].heard)
    assert ask("boss", "a") == "active" and ask("b", "b") == "active"
    assert all(learner.wait(m.Stop).reason.startswith(m.ASKED_TO_LEAVE) for learner in learners)


def test_a_token_that_is_nobodys_opens_nothing(run: Run) -> None:
    for token in ("", "a", "atoll.a.", "atoll.a.AAAA", "atoll.nobody.AAAA", "atoll..", "x" * 200):
        options = ClientOptions(run.syncer.address, token=token)
        asked = refusal_of(lambda options=options: asyncio.run(fetch_status(options)))
        learner = RawLearner(run.syncer.address, "a", token=token)
        assert asked == refusal_of(lambda learner=learner: patiently(learner.hello)) == m.Refusal.TOKEN, token


def test_a_learner_of_an_older_protocol_needs_a_run_without_keys(run: Run) -> None:
    assert refusal_of(lambda: run.raw("a").hello(protocol=2)) == m.Refusal.PROTOCOL


def test_a_revoked_learner_is_out_while_it_trains_and_the_others_go_on(run: Run) -> None:
    bad, honest = run.trains("a"), run.trains("honest")
    run.wait_for(lambda: {run.member("a").get("state"), run.member("honest").get("state")} == {"active"}, "both train")
    revoke(run.keys, "a")
    bad.thread.join(WAIT_S)
    assert isinstance(bad.error, RefusedError) and bad.error.code == m.Refusal.KEY_REVOKED
    assert "revoked" in bad.error.detail
    assert run.member("a")["state"] != "active"
    again = RawLearner(run.syncer.address, "a", token=run.tokens["a"])
    with pytest.raises(RefusedError, match="revoked") as caught:
        patiently(again.hello)
    assert caught.value.code == m.Refusal.TOKEN
    merged = run.status()["tokens_merged"]
    honest.wait_steps(20)
    run.wait_for(lambda: run.status()["tokens_merged"] > merged, "the other's contributions are merged")
    honest.stop()
    assert honest.error is None
    run.tokens["a"] = issue(run.keys, "a", Role.LEARNER)
    back = run.trains("a")
    run.wait_for(lambda: run.member("a")["state"] == "active", "its owner trains with a new key")
    back.stop()
    assert back.error is None


def test_the_secret_of_a_session_ends_with_its_key(run: Run) -> None:
    bad, _honest = run.raw("a").join(), run.raw("honest").join()
    assert bad.contribute(0).accepted
    request = theta_of(bad)
    revoke(run.keys, "a")
    assert "key_revoked" in bad.wait_ended()
    assert refusal_of(lambda: bad.contribute(0)) == m.Refusal.TOKEN
    assert refusal_of(lambda: fetch(run.options("a"), request)) == m.Refusal.TOKEN


def test_a_new_key_for_a_name_ends_the_old_one(run: Run) -> None:
    old = run.raw("a").join()
    run.tokens["a"] = issue(run.keys, "a", Role.LEARNER, again=True)
    assert "replaced" in old.wait_ended()
    assert patiently(run.raw("a").hello).generation == 2


def test_a_registry_that_cannot_be_read_lets_nobody_out_or_in(run: Run) -> None:
    learner = run.raw("a").join()
    (run.keys / KEYS_FILE).write_text("{")
    run.wait_for(lambda: "holds no keys" in run.syncer.output() or learner.ended != "", "a word of it")
    assert not learner.ended and run.member("a")["state"] == "active"


def test_past_grpc_a_key_is_its_owners_too_and_ends_in_the_middle_of_a_push(run: Run) -> None:
    bad, other = run.raw("a").join(), run.raw("b").join()
    assert bad._bulk is not None and bad._bulk._lanes._place is not None
    port = bad._bulk._lanes._place[1]

    def let_in(name: str) -> Peer:
        peer = Peer(port)
        assert peer.greet(run.tokens[name]) == direct.WELCOME
        return peer

    for name in ("eye", "boss", "b"):  # who may look, who may lead, another learner
        peer = let_in(name)
        assert peer.fetch(raw_direct.theta_of(bad)) == m.Refusal.NOT_ALLOWED
        assert peer.open(contribution(bad)[0]) == m.Refusal.NOT_ALLOWED
    header, _ = contribution(bad)
    pushing, idle, silent = let_in("a"), let_in("a"), Peer(port)
    assert pushing.open(header) == ""
    revoke(run.keys, "a")
    assert pushing.is_cut() and idle.is_cut()
    assert silent.greet(run.tokens["a"]) == direct.REFUSED
    assert other.contribute(0).accepted
    assert "Traceback" not in run.syncer.output()
