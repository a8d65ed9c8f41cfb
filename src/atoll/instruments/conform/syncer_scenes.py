"""What is played for a syncer: two learners from the first Hello to the last Leave, and what goes wrong between."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from atoll.codec import get_codec
from atoll.core import TensorSpec, build_layout
from atoll.errors import ConfigError
from atoll.instruments.conform.played_learner import TENSORS, Missing, PlayedLearner
from atoll.instruments.conform.report import Report
from atoll.wire import raw

grpc, pb = raw.grpc, raw.pb

STEPS_MAX = 400
"""Steps that are reported before a round must have been asked for."""
STREAM = "conform"
CHUNKS = 10
OTHER_MODEL = (TensorSpec("other", (512,), "float32"),)


@dataclass(slots=True)
class Cast:
    """Who plays, and what they know of the run."""

    report: Report
    address: str
    token: str
    patience_s: float
    one: PlayedLearner
    two: PlayedLearner
    theta: list[Any]
    """The published parameters, by fragment, as the learners have worked them out."""

    def learner(self, name: str) -> PlayedLearner:
        return PlayedLearner(self.address, name, self.report, token=self.token, patience_s=self.patience_s)

    @classmethod
    def of(cls, report: Report, address: str, token: str, patience_s: float) -> Cast:
        one, two = (PlayedLearner(address, name, report, token=token, patience_s=patience_s) for name in ("one", "two"))
        return cls(report, address, token, patience_s, one, two, [])


# ---------------------------------------------------------------- strangers


async def strangers(cast: Cast) -> None:
    """Whoever has no token, no Hello or no protocol."""
    report, learner = cast.report, cast.learner("stranger")
    if cast.token:
        nameless = PlayedLearner(cast.address, "stranger", report, patience_s=cast.patience_s)
        try:
            await nameless.ask(raw.STATUS_METHOD, pb.StatusRequest())
            report.broken("call.token", "Status answered without a token")
        except grpc.aio.AioRpcError as error:
            code = error.code()
            report.check("call.token", code == grpc.StatusCode.UNAUTHENTICATED, f"it ended with {code.name}")
        await nameless.close()
    document = pb.StatusReply.FromString(await learner.ask(raw.STATUS_METHOD, pb.StatusRequest())).json
    with contextlib.suppress(ValueError):
        report.check("status.json", isinstance(json.loads(document), dict), "it is no JSON object")
    await learner.open(pb.LearnerMessage(leave=pb.Leave(reason="no hello")))
    refusal = await learner.refused()
    report.check("hello.first", refusal is not None, "a session that began with Leave was not refused")
    await learner.open(learner.hello(), damaged=True)
    refusal = await learner.refused()
    taken = any(m.WhichOneof("message") == "welcome" for m in learner.heard)
    final = refusal is not None and refusal.code != "busy"
    report.check("hello.damaged", not taken and not final, "it was welcomed" if taken else "it was refused for good")
    await learner.open(learner.hello(protocol=99))
    refusal = await learner.refused()
    report.check("protocol.unknown", _code(refusal) == "protocol_version", f"answered {_code(refusal)}")
    await learner.close()


def _code(refusal: Any) -> str:
    return refusal.code if refusal is not None else "with no refusal"


# ---------------------------------------------------------------- joining


async def joining(cast: Cast) -> None:
    report, one, two = cast.report, cast.one, cast.two
    await one.open(one.hello(brief=True))
    refusal = await one.refused()
    if one.welcomed:
        raise ConfigError("this syncer already has a run; start a fresh one, without state, for `atoll conform syncer`")
    report.check("hello.tensors", _code(refusal) == "tensors_wanted", f"answered {_code(refusal)}")
    first = await one.greet()
    report.check("welcome.seed", first.seed, "the first learner of a new run was not asked for parameters")
    own = one.layout.fingerprint
    report.check("welcome.fingerprint", own == first.fingerprint, f"{first.fingerprint}, it should be {own}")
    second = await two.greet()
    report.check("welcome.seed", not second.seed, "a second learner was asked for parameters, too")
    report.check("welcome.secret", first.secret and first.secret != second.secret, "no secret, or twice the same")
    ranks = (first.rank_plus_one, second.rank_plus_one)
    report.check("welcome.rank", not all(ranks) or ranks[0] != ranks[1], f"two learners of rank {ranks[0] - 1}")
    other = cast.learner("other")
    await other.open(other.hello(tensors=OTHER_MODEL))
    refusal = await other.refused()
    report.check("layout.other", _code(refusal) == "wrong_layout", f"answered {_code(refusal)}")
    await other.close()


async def seeding(cast: Cast) -> None:
    """Bad seeds first, then good ones."""
    report, one, two = cast.report, cast.one, cast.two
    random = np.random.default_rng(7)
    cast.theta = [random.normal(0, 0.02, part.size).astype(np.float32) for part in one.layout.fragments]
    whole = cast.theta[0].tobytes()

    async def seed(payload: bytes, *, damaged: bool = False, **lies: Any) -> str:
        return str((await one.push(one.header(pb.PUSH_SEED, 0, payload, **lies), payload, damaged=damaged)).code)

    for clause, expected, answer in (
        ("push.size", "wrong_size", await seed(whole[:-1024])),
        ("push.checksum", "checksum_mismatch", await seed(whole, checksum=1)),
        ("push.part", "checksum_mismatch", await seed(whole, damaged=True)),
        ("push.stranger", "unknown_learner", await seed(whole, learner="nobody")),
        ("push.secret", "wrong_secret", await seed(whole, secret="another")),
        ("push.generation", "stale_generation", await seed(whole, generation=one.welcome.generation + 1)),
    ):
        report.check(clause, answer == expected, f"answered {answer or 'accepted'}, not {expected}")
    for fragment, values in enumerate(cast.theta):
        reply = await one.push(one.header(pb.PUSH_SEED, fragment, values.tobytes()), values.tobytes())
        report.check("start.states", reply.accepted, f"a good seed was refused: {reply.code}")
    for learner in (one, two):
        start = await learner.wait("start")
        told = [(state.version, state.checksum) for state in start.fragments]
        right = [(0, xxhash.xxh3_64_intdigest(values.tobytes())) for values in cast.theta]
        report.check("start.states", told == right, f"Start says {told}")


async def fetching(cast: Cast) -> None:
    report, two = cast.report, cast.two
    parts, content = await two.fetch(pb.FETCH_THETA, 0)
    right = content == cast.theta[0].tobytes() and parts[0].header.checksum == xxhash.xxh3_64_intdigest(content)
    sums = all(
        part.checksum
        == xxhash.xxh3_64_intdigest((part.header.SerializeToString() if part.header.size else b"") + part.data)
        for part in parts
    )
    report.check("fetch.theta", right and sums, "other bytes than were pushed, or a wrong checksum")
    _, content = await two.fetch(pb.FETCH_THETA, 0, 0, offset=100, length=200)
    report.check("fetch.range", content == cast.theta[0].tobytes()[100:300], f"{len(content)} bytes for 200")
    for clause, expected, fields in (
        ("fetch.unknown", "unknown_version", {"kind": pb.FETCH_UPDATE, "fragment": 0, "version": 77}),
        ("fetch.unknown", "unknown_fragment", {"kind": pb.FETCH_THETA, "fragment": 4000}),
        ("push.secret", "wrong_secret", {"kind": pb.FETCH_THETA, "fragment": 0, "secret": "another"}),
    ):
        parts, _ = await two.fetch(**fields)
        answer = parts[0].refused.code if parts else "nothing"
        report.check(clause, answer == expected, f"a fetch was answered {answer or 'with bytes'}, not {expected}")


# ---------------------------------------------------------------- rounds


async def rounds(cast: Cast) -> None:
    report, one, two = cast.report, cast.one, cast.two
    reply = await two.contribute(0)
    report.check("contribution.early", reply.code == "not_ready", f"answered {reply.code or 'accepted'}")
    for learner in (one, two):
        await learner.ready()
    fragment = await _asked(cast)
    await bad_contributions(cast, fragment)
    await _inline(cast, one, fragment)
    reply = await two.contribute(fragment)
    report.check("round.received", reply.accepted, f"a good contribution was refused: {reply.code}")
    await _published(cast, fragment)


async def _asked(cast: Cast) -> int:
    """Both train until both are asked for the same fragment; returns which."""
    one, two = cast.one, cast.two

    def both() -> set[int]:
        own = [{request.fragment for request in learner._find("request")} for learner in (one, two)]
        return own[0] & own[1]

    with contextlib.suppress(Missing):
        for _ in range(STEPS_MAX):
            if both():
                break
            for learner in (one, two):
                await learner.progress()
            patience, one.patience_s = one.patience_s, 0.1
            try:
                await one.until(both)
            except Missing:
                pass
            finally:
                one.patience_s = patience
    if not cast.report.check("round.request", both(), f"no fragment was asked for in {STEPS_MAX} steps"):
        raise Missing("a request")
    return min(both())


async def bad_contributions(cast: Cast, fragment: int) -> None:
    report, one = cast.report, cast.one
    other = "fp32" if one.config is not None and one.config.codec_up != "fp32" else "bf16"
    for clause, expected, lies in (
        ("contribution.codec", "wrong_codec", {"codec": other}),
        ("contribution.round", "unknown_round", {"round": 10**6}),
        ("contribution.counters", "bad_counters", {"steps": 0}),
        ("contribution.counters", "bad_counters", {"tokens": 0}),
        ("contribution.base", "unknown_version", {"base_version": 999}),
    ):
        reply = await one.contribute(fragment, **lies)
        report.check(clause, reply.code == expected, f"{lies} was answered {reply.code or 'accepted'}, not {expected}")
    _, payload = one.contribution(fragment)
    for short in (payload[:-1], payload + b"\0"):
        header = one.contribution(fragment)[0]
        header.size, header.checksum = len(short), xxhash.xxh3_64_intdigest(short)
        reply = await one.push(header, short)
        report.check("contribution.size", reply.code == "wrong_size", f"answered {reply.code or 'accepted'}")


async def _inline(cast: Cast, learner: PlayedLearner, fragment: int) -> None:
    header, payload = learner.contribution(fragment)
    header.secret = ""
    await learner.say(contribution=pb.Contribution(header=header, payload=payload))
    received = await learner.wait("received", lambda r: (r.fragment, r.seq) == (fragment, header.seq))
    cast.report.check("round.received", received.reply.accepted, f"refused: {received.reply.code}")
    learner.seqs[fragment] = header.seq + 1
    header.secret = learner.welcome.secret
    reply = await learner.push(header, payload)
    cast.report.check("contribution.twice", reply.code == "duplicate", f"answered {reply.code or 'accepted'}")


async def _published(cast: Cast, fragment: int) -> None:
    report = cast.report
    told = []
    for learner in (cast.one, cast.two):
        published = await learner.wait("published", lambda p: p.fragment == fragment and p.version == 1)
        given = learner.seqs[fragment] - 1
        own = {given} if published.contributors == 2 else {given, -1}
        report.check("published.own", published.merged_seq in own, f"{published.merged_seq}; {given} was given")
        told.append(published)
    same = (told[0].version, told[0].checksum) == (told[1].version, told[1].checksum)
    report.check("published.all", same, f"two learners heard of {told[0].version} and {told[1].version}")
    parts, update = await cast.one.fetch(pb.FETCH_UPDATE, fragment, 1)
    inside = told[0].update or update
    report.check("fetch.update", update == inside and parts[0].header.version == 1, "other bytes than in Published")
    assert cast.one.config is not None
    get_codec(cast.one.config.codec_down).decode_add(update, cast.theta[fragment])
    summed = xxhash.xxh3_64_intdigest(cast.theta[fragment].tobytes())
    report.check("published.checksum", summed == told[0].checksum, f"{summed:016x}, published {told[0].checksum:016x}")
    _, content = await cast.one.fetch(pb.FETCH_THETA, fragment)
    report.check("fetch.theta", content == cast.theta[fragment].tobytes(), "version 1 has other bytes than its update")
    if told[1].merged_seq < 0:  # a quorum of one was enough, and the other one's is held for the next round
        cast.one, cast.two = cast.two, cast.one


# ---------------------------------------------------------------- coming back


async def coming_back(cast: Cast) -> None:
    """The same process returns; then another one takes its id."""
    report, two = cast.report, cast.two
    before = two.welcome
    fragment, seq = next((f, s - 1) for f, s in two.seqs.items() if s)
    held: dict[str, Any] = {
        "generation": before.generation,
        "run": before.run,
        "epoch": before.epoch,
        "bases": two.versions,
        "checksums": [xxhash.xxh3_64_intdigest(values.tobytes()) for values in cast.theta],
        "outstanding": [pb.Outstanding(fragment=fragment, seq=seq)],
    }
    await two.drop()
    after = await two.greet(**held)
    report.check(
        "back.same",
        after.generation == before.generation and (not after.secret or after.secret != before.secret),
        f"generation {after.generation} after {before.generation}",
    )
    fate = await two.wait("fate", lambda f: (f.fragment, f.seq) == (fragment, seq))
    report.check("back.fate", fate.version == 1, f"a contribution that was merged got the fate {fate.version}")
    await two.ready()
    third = cast.learner(two.name)
    newer = await third.greet()
    report.check("back.fenced", newer.generation == after.generation + 1, f"generation {newer.generation}")
    refusal = await two.wait("refused")
    report.check("back.fenced", refusal.code == "fenced", f"the old session ended with {refusal.code}")
    reply = await two.contribute(0)
    report.check("push.generation", reply.code == "stale_generation", f"the old process was answered {reply.code}")
    await two.close()
    cast.two = third
    await third.ready()


async def nonsense(cast: Cast) -> None:
    """Bytes that are no message end one session."""
    bad = cast.learner("bad")
    await bad.greet()
    await bad._call.write(raw.seal(b"\xff\xff\xff\xff"))
    refusal = await bad.refused()
    with contextlib.suppress(Missing):
        await bad.until(lambda: bad.status is not None or bad._find("refused"))
    over = bad.status is not None or refusal is not None or bool(bad._find("refused"))
    cast.report.check("message.bad", over, "the session goes on after bytes that are no message")
    cast.report.check("message.bad", cast.one.status is None, "another session ended with it")
    await bad.close()


async def older(cast: Cast) -> None:
    old = cast.learner("old")
    welcome = await old.greet(protocol=2)
    newer = welcome.protocol != 2 or welcome.secret
    cast.report.check("protocol.older", not newer, f"protocol {welcome.protocol}, secret {welcome.secret!r}")
    await old.close()


async def poison(cast: Cast) -> None:
    """Values that are not finite."""
    report, two = cast.report, cast.two
    header, payload = two.contribution(0)
    payload = b"\xff" * len(payload)
    header.checksum = xxhash.xxh3_64_intdigest(payload)
    reply = await two.push(header, payload)
    report.check("contribution.finite", reply.code == "not_finite", f"answered {reply.code or 'accepted'}")
    with contextlib.suppress(Missing):
        await two.wait("reseed")
    report.check("contribution.finite", two._find("reseed"), "its learner was not told to re-seed")


# ---------------------------------------------------------------- data


async def data(cast: Cast) -> None:
    report, one, two = cast.report, cast.one, cast.two

    async def ask(learner: PlayedLearner, serial: int, **fields: Any) -> Any:
        await learner.say(data_report=pb.DataReport(stream=STREAM, serial=serial, chunks=CHUNKS, **fields))
        return await learner.wait("data_leases", lambda leases: leases.stream == STREAM and leases.serial == serial)

    first, second = await ask(one, 1, want=3), await ask(two, 1, want=3)
    own, others = ({lease.chunk for lease in leases.granted} for leases in (first, second))
    report.check("data.leases", own and others and not own & others, f"{sorted(own)} and {sorted(others)}")
    again = await ask(one, 2, want=0)
    report.check(
        "data.again", {x.chunk for x in again.granted} == own, "a grant that was not confirmed was not repeated"
    )
    back, *rest = sorted(own)
    await ask(one, 3, want=0, holding=rest, returned=[pb.Lease(chunk=back, start=5)])
    found = await ask(two, 2, want=CHUNKS, holding=sorted(others))
    starts = {lease.chunk: lease.start for lease in found.granted}
    report.check("data.returned", starts.get(back) == 5, f"chunk {back} was granted from {starts.get(back)}")


# ---------------------------------------------------------------- leaving


async def leaving(cast: Cast) -> None:
    report, one, two = cast.report, cast.one, cast.two
    asked = pb.AskToLeaveReply.FromString(await two.ask(raw.LEAVE_METHOD, pb.AskToLeaveRequest(learner=two.name)))
    stop = await two.wait("stop")
    told = bool(asked.state) and stop.reason.startswith("asked to leave")
    report.check("leave.asked", told, f"state {asked.state!r}, Stop because {stop.reason!r}")
    await two.say(leave=pb.Leave(reason="asked to"))
    await two.until(lambda: two.status is not None, "the end of the session after Leave")
    reply = await two.contribute(0)
    report.check("leave.over", reply.code == "unknown_learner", f"a push after Leave was answered {reply.code}")
    await two.open(two.hello(generation=two.welcome.generation, run=two.welcome.run))
    refusal = await two.refused()
    report.check("leave.over", _code(refusal) == "run_closed", f"its instance was answered {_code(refusal)}")
    await one.say(leave=pb.Leave(reason="the conformance kit is done"))


# ---------------------------------------------------------------- a syncer without its state


async def returning(cast: Cast, fragments: int) -> None:
    """Two learners hold a run of which the syncer knows nothing. One of them lies about a newer version."""
    report, one, two = cast.report, cast.one, cast.two
    random = np.random.default_rng(7)
    sizes = [part.size for part in build_layout(TENSORS, fragments).fragments]
    cast.theta = [random.normal(0, 0.02, size).astype(np.float32) for size in sizes]
    sums = [xxhash.xxh3_64_intdigest(values.tobytes()) for values in cast.theta]
    held: dict[str, Any] = {"run": "held", "generation": 3, "epoch": 2, "checksums": sums}
    welcome = await one.greet(**held, bases=[5] * fragments)
    report.check("heal.asked", welcome.run == "held", f"its run is {welcome.run!r}, not the one that is held")
    lies = {**held, "checksums": [sums[0] ^ 1, *sums[1:]]}
    await two.greet(**lies, bases=[6, *([5] * (fragments - 1))])
    heal = await two.wait("heal", lambda message: 0 in message.fragments)
    report.check("heal.asked", heal, "it did not ask for the newest version")
    junk = np.zeros(sizes[0], np.float32).tobytes()
    reply = await two.push(two.header(pb.PUSH_HEAL, 0, junk, base_version=6), junk)
    report.check("heal.checked", not reply.accepted, "bytes with another checksum than claimed were accepted")
    given: set[int] = set()
    while len(given) < fragments:
        asked = await one.wait("heal", _asks_for_more(given))
        for fragment in set(asked.fragments) - given:
            payload = cast.theta[fragment].tobytes()
            reply = await one.push(one.header(pb.PUSH_HEAL, fragment, payload, base_version=5), payload)
            report.check("heal.checked", reply.accepted, f"true parameters were refused: {reply.code}")
            given.add(fragment)
    start = await one.wait("start")
    told = [(state.version, state.checksum) for state in start.fragments]
    report.check("heal.start", told == [(5, own) for own in sums], f"Start says {told}")


def _asks_for_more(given: set[int]) -> Callable[[Any], bool]:
    return lambda message: bool(set(message.fragments) - given)
