"""An id belongs to whoever has its key, and a session to whoever has its secret."""

from __future__ import annotations

from dataclasses import replace

import pytest
from world import TENSORS, World, config

from atoll.core import FetchKind, FetchRequest, Hello, Identity, PushHeader, PushKind, PushReply, Refused, Role
from atoll.core import effects as fx
from atoll.core.config import SECOND_NS
from atoll.core.identity import NEW_IDS_AT_ONCE, NEW_IDS_PER_MINUTE, NewIds, check_learner, check_leave
from atoll.core.layout import tensors_fingerprint
from atoll.core.messages import Refusal, TensorSpec, Welcome
from atoll.core.syncer_machine import SyncerMachine


def running(learners: int = 2) -> World:
    world = World(config(), learners)
    world.join_all()
    world.everyone_steps(20)
    return world


def header_of(world: World, name: str, secret: str, seq: int = 900) -> PushHeader:
    version = world.syncer.book.tracks[0].version
    return PushHeader(PushKind.CONTRIBUTION, name, 1, 0, 0, 0, seq, version, 1, 10, "int4", 1, 1, secret=secret)


def opened(machine: SyncerMachine, hello: Hello, session: int = 99, **more: object) -> Welcome | Refused:
    out = machine.handle(fx.SessionOpened(session, hello, **more), 0)  # type: ignore[arg-type]
    (answer, *_) = [one.message for one in out if isinstance(one, fx.ToLearner) and one.session == session]
    assert isinstance(answer, Welcome | Refused)
    return answer


# ---------------------------------------------------------------- secrets


def test_a_forged_push_is_no_sign_of_life_and_no_answer() -> None:
    """Whoever cannot push in a learner's name must not be able to answer a round for it, or to keep it alive."""
    world = running()
    member = world.syncer.membership.members["l0"]
    heard_ns, seen = member.heard_ns, list(member.seq_seen)
    waiting = [track.round for track in world.syncer.book.tracks]
    world.now_ns += SECOND_NS
    for kind in PushKind:
        header = replace(header_of(world, "l0", "forged"), kind=kind)
        assert world.driver.open_push(header).code == Refusal.SECRET
        assert world.driver.complete_push(header, 1.0, finite=True, norm=1.0).code == Refusal.SECRET
    assert (member.heard_ns, member.seq_seen) == (heard_ns, seen)
    assert [track.round for track in world.syncer.book.tracks] == waiting
    assert not any(identity.seq == 900 for identity in world.driver.held)


def test_the_secret_of_an_earlier_session_is_worth_nothing() -> None:
    world = running()
    learner, old = world.learners["l0@l0-1"], world.secret_of("l0")
    world.disconnect(learner)
    world.connect(learner)
    new = world.secret_of("l0")
    assert new != old
    assert world.driver.open_push(header_of(world, "l0", old)).code == Refusal.SECRET
    assert world.driver.open_push(header_of(world, "l0", new)).accepted
    fetch = FetchRequest(FetchKind.THETA, "l0", 1, 0, -1, secret=old)
    refusal = world.driver.open_fetch(fetch)
    assert refusal is not None and refusal.code == Refusal.SECRET
    assert world.driver.open_fetch(replace(fetch, secret=new)) is None


def test_a_push_that_a_new_session_overtook_is_made_again_in_it() -> None:
    world = running()
    learner = world.learners["l0@l0-1"]
    real = world.complete_push
    refused: list[PushReply] = []

    def late(header: PushHeader, value: float, norm: float = 1.0, finite: bool = True) -> PushReply:
        if header.learner == "l0" and not refused:
            refused.append(real(replace(header, secret="of an earlier session"), value, norm, finite))
            return refused[0]
        return real(header, value, norm, finite)

    world.complete_push = late  # type: ignore[method-assign]
    world.everyone_steps(20)
    assert [reply.code for reply in refused] == [Refusal.SECRET]
    assert learner.machine.stopped == ""
    world.check_ledger()
    totals = world.syncer.ledger.totals()
    assert not totals.discarded, "what was refused is not lost"


def test_a_session_speaks_for_its_own_learner_only() -> None:
    world = running()
    session = world.learners["l1@l1-1"].session
    own = world.syncer.of_session(session, header_of(world, "l1", ""))
    assert isinstance(own, PushHeader) and own.secret == world.secret_of("l1")
    other = world.syncer.of_session(session, header_of(world, "l0", ""))
    assert isinstance(other, PushReply) and other.code == Refusal.NOT_ALLOWED
    nobody = world.syncer.of_session(12345, header_of(world, "l0", ""))
    assert isinstance(nobody, PushReply) and nobody.code == Refusal.UNKNOWN_LEARNER


def test_sessions_of_older_protocols_have_no_secret() -> None:
    machine = SyncerMachine(config(), "run")
    welcome = opened(machine, Hello("a", "i", 2, TENSORS), secret="s")
    assert isinstance(welcome, Welcome) and welcome.secret == ""
    assert machine.check_sender("a", 1, "") is None
    again = opened(machine, Hello("a", "i", 3, TENSORS), session=100, secret="s")
    assert isinstance(again, Welcome) and again.secret == "s"
    refusal = machine.check_sender("a", 1, "")
    assert refusal is not None and refusal.code == Refusal.SECRET


def test_no_secret_is_shown_or_written() -> None:
    world = running()
    secret = world.secret_of("l0")
    member = world.syncer.membership.members["l0"]
    shown = [member, header_of(world, "l0", secret), fx.SessionOpened(1, Hello("a", "i", 3, ()), secret)]
    assert all(repr(secret) not in repr(one) for one in shown)
    assert repr(secret) not in repr(world.syncer.rows())


# ---------------------------------------------------------------- keys

LEARNER, OTHER = Identity("a", Role.LEARNER, 4096), Identity("b", Role.LEARNER)
OBSERVER, OPERATOR = Identity("eye", Role.OBSERVER), Identity("boss", Role.OPERATOR)


@pytest.mark.parametrize("identity", [OTHER, OBSERVER, OPERATOR, Identity("a", Role.OBSERVER)])
def test_nobody_joins_with_anothers_key(identity: Identity) -> None:
    machine = SyncerMachine(config(), "run")
    assert isinstance(opened(machine, Hello("a", "i", 3, TENSORS), session=1, identity=LEARNER), Welcome)
    refusal = opened(machine, Hello("a", "thief", 3, TENSORS), identity=identity)
    assert isinstance(refusal, Refused) and refusal.code == Refusal.NOT_ALLOWED and identity.name in refusal.detail
    member = machine.membership.members["a"]
    assert (member.instance, member.session, member.generation) == ("i", 1, 1), "nobody was fenced out"
    assert member.tokens_per_step_declared == 4096


def test_a_key_needs_a_protocol_with_secrets() -> None:
    refusal = opened(SyncerMachine(config(), "run"), Hello("a", "i", 2, TENSORS), identity=LEARNER)
    assert isinstance(refusal, Refused) and refusal.code == Refusal.PROTOCOL


def test_who_may_ask_whom_to_leave() -> None:
    may = {
        (identity.name, learner): check_leave(identity, learner) is None
        for identity in (LEARNER, OTHER, OBSERVER, OPERATOR)
        for learner in ("a", "eye")
    }
    assert [pair for pair, allowed in may.items() if allowed] == [("a", "a"), ("boss", "a"), ("boss", "eye")]
    assert check_leave(None, "a") is None and check_learner(None, "a") is None


def test_a_revoked_learner_is_out_at_once_and_the_others_go_on() -> None:
    world = running(3)
    session, secret = world.learners["l0@l0-1"].session, world.secret_of("l0")
    out = world.to_syncer(fx.KeyRevoked("l0", "the key of 'l0' was revoked; ask for a new one"))
    told = [effect.message for effect in out if isinstance(effect, fx.ToLearner) and effect.session == session]
    assert [message.code for message in told if isinstance(message, Refused)] == [Refusal.KEY_REVOKED]
    assert any(isinstance(effect, fx.EndSession) and effect.session == session for effect in out)
    assert world.driver.open_push(header_of(world, "l0", secret)).code == Refusal.KEY_REVOKED
    refusal = world.driver.open_fetch(FetchRequest(FetchKind.THETA, "l0", 1, 0, -1, secret=secret))
    assert refusal is not None and refusal.code == Refusal.KEY_REVOKED
    commits = world.syncer.book.commits
    world.run()
    world.everyone_steps(20)
    assert world.syncer.book.commits > commits
    world.check_ledger()


# ---------------------------------------------------------------- the model's fingerprint


def brief(learner: str, tensors: tuple[TensorSpec, ...] = TENSORS) -> Hello:
    return Hello(learner, f"{learner}-1", 3, (), fingerprint=tensors_fingerprint(tensors))


def test_the_list_of_tensors_is_asked_for_when_it_is_needed() -> None:
    machine = SyncerMachine(config(), "run")
    first = opened(machine, brief("a"))
    assert isinstance(first, Refused) and first.code == Refusal.TENSORS, "nobody has said what the model is"
    assert not machine.membership.members
    assert isinstance(opened(machine, replace(brief("a"), tensors=TENSORS), session=1), Welcome)
    assert isinstance(opened(machine, brief("b"), session=2), Welcome), "the fingerprint is enough"
    other = (*TENSORS[:-1], TensorSpec("another", (8,), "float32"))
    asked = opened(machine, brief("c", other))
    assert isinstance(asked, Refused) and asked.code == Refusal.TENSORS
    told = opened(machine, replace(brief("c", other), tensors=other))
    assert isinstance(told, Refused) and told.code == Refusal.LAYOUT and TENSORS[-1].name in told.detail


def test_a_hello_that_says_nothing_of_its_model_is_refused() -> None:
    machine = SyncerMachine(config(), "run")
    assert isinstance(opened(machine, Hello("a", "i", 3, TENSORS), session=1), Welcome)
    refusal = opened(machine, Hello("b", "i", 3, ()))
    assert isinstance(refusal, Refused) and refusal.code == Refusal.LAYOUT


# ---------------------------------------------------------------- new ids


def test_ids_that_nobody_has_seen_come_at_a_bounded_rate() -> None:
    ids, now_ns = NewIds(), 5 * SECOND_NS
    for _ in range(NEW_IDS_AT_ONCE):
        assert ids.check(now_ns) is None
        ids.count()
    refusal = ids.check(now_ns)
    assert refusal is not None and refusal.code == Refusal.BUSY
    now_ns += 60 * SECOND_NS
    for _ in range(NEW_IDS_PER_MINUTE):
        assert ids.check(now_ns) is None
        ids.count()
    assert ids.check(now_ns) is not None


def test_whoever_is_known_or_has_a_key_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.core.identity.NEW_IDS_AT_ONCE", 1)
    machine = SyncerMachine(config(), "run")
    assert isinstance(opened(machine, Hello("a", "i", 3, TENSORS), session=1), Welcome)
    late = opened(machine, Hello("b", "i", 3, TENSORS))
    assert isinstance(late, Refused) and late.code == Refusal.BUSY
    assert isinstance(opened(machine, Hello("a", "another", 3, TENSORS), session=2), Welcome)
    assert isinstance(opened(machine, Hello("b", "i", 3, TENSORS), session=3, identity=OTHER), Welcome)
