"""What is played for a learner, scene by scene. A scene that cannot go on ends; what it did not reach is not tried."""

from __future__ import annotations

import asyncio
from typing import Any

from atoll.instruments.conform.learner_exam import UNANSWERED, Gone, LearnerExam, tensors_of
from atoll.instruments.conform.played_run import STEP_AT_START, TakenPush
from atoll.wire import raw

pb = raw.pb

QUIET_S = 6.0
"""How long a learner that was sent away must stay away: longer than the longest wait between two attempts, 5 s."""
NEWEST = 3
"""The protocol that this kit speaks."""
BEGIN_S = 120.0
"""A process may take this long to say its first Hello: it loads its framework."""
STEPS_AFTER_DAMAGE = 200
"""Steps that a learner may report before it has seen that a message was damaged: a second of short ones."""
AWAY = 4000
"""A fragment that no examined model has."""


# ---------------------------------------------------------------- joining


async def greet(exam: LearnerExam, seen: int) -> Any:
    """The next Hello, with its tensors: asked for if the learner left them out."""
    hello = await greet_any(exam, seen)
    if hello.tensors:
        exam.report.kept("hello.tensors")
        return hello
    brief = hello
    await exam.session.refuse("tensors_wanted", "say hello again with the tensors")
    await exam.until(lambda: len(exam.hellos) > seen + 1, "hello.tensors", "a Hello after tensors_wanted")
    hello = exam.hellos[-1]
    exam.report.check("hello.tensors", hello.tensors, "the second Hello has no tensors either")
    exam.report.check(
        "hello.fingerprint", hello.fingerprint == brief.fingerprint, "two Hellos of one process differ in it"
    )
    if not hello.tensors:
        raise Gone("tensors")
    return hello


async def join(exam: LearnerExam) -> None:
    """From the first Hello to Ready; the learner's own parameters become version 0."""
    hello = await greet(exam, 0)
    new = not (hello.run or hello.generation or hello.bases or hello.outstanding or hello.checksums)
    exam.report.check("hello.new", new, f"run {hello.run!r}, generation {hello.generation}, bases {list(hello.bases)}")
    exam.run.lay_out(tensors_of(hello))
    exam.session.protocol = min(NEWEST, hello.protocol)
    exam.seed_answers.extend(("busy", "checksum_mismatch"))
    await exam.session.say(welcome=exam.run.welcome(exam.session.protocol, seed=True))
    await exam.until(lambda: len(exam.pushes) >= 3, "push.again", "a seed that was answered busy, sent again")
    await exam.until(lambda: min(exam.run.versions) >= 0, "seed.whole", "every fragment of the seed")
    await start(exam, STEP_AT_START)
    exam.report.check(
        "ready.place",
        exam.ready.step == STEP_AT_START and list(exam.ready.bases) == exam.run.versions,
        f"Ready at step {exam.ready.step} with bases {list(exam.ready.bases)}; Start was at {STEP_AT_START} with "
        f"{exam.run.versions}",
    )


async def start(exam: LearnerExam, step: int) -> None:
    exam.started, exam.ready = True, None
    await exam.session.say(start=exam.run.start(step))
    await exam.until(lambda: exam.ready is not None, "ready.place", "Ready after Start")
    if exam.hellos[-1].wants_inner:
        await exam.session.say(inner_offer=pb.InnerOffer(reason="no peer has any inner state"))


async def train(exam: LearnerExam, steps: int = 2) -> None:
    """Until so many more steps were reported."""
    goal = (exam.progress.steps if exam.progress is not None else 0) + steps
    await exam.until(
        lambda: exam.progress is not None and exam.progress.steps >= goal,
        "progress.counts",
        f"Progress of {steps} steps",
    )


# ---------------------------------------------------------------- rounds


async def ask(exam: LearnerExam, fragment: int) -> TakenPush:
    """One round of one fragment, until a contribution has come. A learner that has nothing is asked again."""
    while True:
        await train(exam)
        answers = _Answers(exam, fragment)
        exam.run.rounds += 1
        await exam.session.say(upcoming=pb.Upcoming(fragments=[fragment]))
        await exam.session.say(request=pb.Request(round=exam.run.rounds, attempt=0, fragment=fragment))
        await exam.until(answers.changed, "request.answer", f"an answer to the request of fragment {fragment}")
        if answers.given:
            break
    taken = list(exam.run.taken.values())[-1]
    exam.report.check(
        "request.answer",
        taken.header.fragment == fragment and taken.header.round in (0, exam.run.rounds),
        f"round {exam.run.rounds} of fragment {fragment} got a contribution for round {taken.header.round} of fragment "
        f"{taken.header.fragment}",
    )
    return taken


class _Answers:
    """What a fragment's requests were answered with since this was made."""

    def __init__(self, exam: LearnerExam, fragment: int) -> None:
        self._exam, self._fragment = exam, fragment
        self._taken, self._passed = len(exam.run.taken), self._passes()

    def _passes(self) -> int:
        kinds = [m.nothing.fragment for m in self._exam.heard if m.WhichOneof("message") == "nothing"]
        return kinds.count(self._fragment)

    @property
    def given(self) -> bool:
        return len(self._exam.run.taken) > self._taken

    def changed(self) -> bool:
        return self.given or self._passes() > self._passed


async def adopted(exam: LearnerExam, clause: str) -> None:
    """Until the learner reports that it holds everything that was published."""
    await exam.until(
        lambda: exam.progress is not None and list(exam.progress.bases) == exam.run.versions,
        clause,
        f"Progress with bases {exam.run.versions}",
    )


async def publish_inside(exam: LearnerExam) -> None:
    taken = await ask(exam, 0)
    published = exam.run.merge(taken)
    published.update = exam.run.updates[0, published.version]
    await exam.session.say(published=published)
    await adopted(exam, "adopt.inline")


async def publish_damaged(exam: LearnerExam) -> None:
    """The update inside the notice is another one than its checksum: whole parameters must be fetched instead."""
    taken = await ask(exam, 0)
    published = exam.run.merge(taken)
    update = bytearray(exam.run.updates[0, published.version])
    update[-1] ^= 0xFF  # in the codes of the last block, so that it decodes
    published.update = bytes(update)
    before = len(exam.fetches)
    await exam.session.say(published=published)
    await adopted(exam, "adopt.checked")
    exam.report.check(
        "adopt.checked",
        any(f.kind == pb.FETCH_THETA and f.fragment == 0 for f in exam.fetches[before:]),
        "it adopted an update that does not lead to the checksum",
    )


async def publish_outside(exam: LearnerExam) -> None:
    """The update is to be fetched, and comes damaged the first time."""
    fragment = exam.run.fragments - 1
    taken = await ask(exam, fragment)
    exam.fetches_to_damage = 1
    before = len(exam.fetches)
    await exam.session.say(published=exam.run.merge(taken))
    await exam.until(lambda: len(exam.fetches) > before, "adopt.fetched", "a fetch of the update")
    await exam.until(lambda: len(exam.fetches) > before + 1, "fetch.damaged", "a second fetch, after a damaged part")
    await adopted(exam, "adopt.fetched")


async def refuse_one(exam: LearnerExam) -> None:
    """A refused contribution is the learner's own again: the next one holds at least as much."""
    exam.answers.append("stale_base")
    refused = await ask(exam, 0)
    following = await ask(exam, 0)
    exam.report.kept("refused.final")
    exam.report.check(
        "refused.progress",
        following.header.tokens >= refused.header.tokens and following.header.steps > refused.header.steps,
        f"{refused.header.steps} steps were refused, and the next contribution has {following.header.steps}",
    )
    await exam.session.say(published=exam.run.merge(following))
    await adopted(exam, "adopt.fetched")


async def say_nonsense(exam: LearnerExam) -> None:
    """Words about what the run does not have are passed over; training goes on."""
    await exam.session.say(request=pb.Request(round=10**6, attempt=0, fragment=AWAY))
    await exam.session.say(published=pb.Published(fragment=AWAY, version=1, round=1, merged_seq=-1))
    await exam.session.say(fate=pb.Fate(fragment=0, seq=10**9, version=-1, reason="unknown_round"))
    sessions = len(exam.sessions)
    try:
        await train(exam, 3)
    except Gone:
        exam.report.broken("unknown.passed", "no more progress after a message about a fragment that is not there")
        raise
    exam.report.check("unknown.passed", len(exam.sessions) == sessions, "the session ended over it")


# ---------------------------------------------------------------- coming back


async def come_back(exam: LearnerExam, seen: int, *, heal: bool = False) -> Any:
    """The learner's next session, up to Ready; returns its Hello."""
    hello = await greet(exam, seen)
    first = exam.hellos[0]
    same = (hello.instance, hello.run, hello.generation) == (first.instance, exam.run.name, exam.run.generation)
    exam.report.check(
        "hello.again",
        same and hello.learner == first.learner and (hello.protocol < 2 or hello.epoch == exam.run.epoch),
        f"instance {hello.instance!r}, run {hello.run!r}, generation {hello.generation}, epoch {hello.epoch}; it was "
        f"{first.instance!r}, {exam.run.name!r}, {exam.run.generation}, {exam.run.epoch}",
    )
    if hello.protocol >= 2:
        held = {(p, v): c for p, (v, c) in enumerate(zip(hello.bases, hello.checksums, strict=False))}
        right = len(held) == exam.run.fragments and all(exam.run.checksums.get(key) == c for key, c in held.items())
        exam.report.check("hello.bases", right, f"bases {list(hello.bases)} with checksums that were not published")
    exam.run.epoch += 1
    exam.session.protocol = min(NEWEST, hello.protocol)
    await exam.session.say(welcome=exam.run.welcome(exam.session.protocol, seed=False))
    if heal and exam.session.protocol >= 2:
        before = len(exam.pushes)
        await exam.session.say(heal=pb.Heal(fragments=list(range(exam.run.fragments))))
        await exam.until(
            lambda: len(exam.pushes) - before >= exam.run.fragments, "heal.bytes", "a push of every fragment after Heal"
        )
    await start(exam, STEP_AT_START + 50)
    return hello


async def damage_a_message(exam: LearnerExam) -> None:
    """A message with a wrong seal ends the session. Then the syncer comes back with nothing, and is healed."""
    await train(exam)
    seen, steps = len(exam.hellos), exam.progress.steps
    await exam.session.say(damaged=True, upcoming=pb.Upcoming(fragments=[0]))
    session = exam.session
    await exam.until(
        lambda: len(exam.hellos) > seen or (exam.progress.steps > steps + STEPS_AFTER_DAMAGE and not session.over),
        "seal.checked",
        "a new Hello after a message with a wrong seal",
    )
    if not exam.report.check("seal.checked", len(exam.hellos) > seen or session.over, "it went on in the same session"):
        session.end()
    await come_back(exam, seen, heal=True)
    await train(exam)


async def break_the_link(exam: LearnerExam) -> None:
    """The link breaks before a contribution was answered."""
    exam.answers.append(UNANSWERED)
    taken = await ask(exam, 0)
    seen = len(exam.hellos)
    exam.session.end()
    hello = await come_back(exam, seen)
    listed = {(entry.fragment, entry.seq) for entry in hello.outstanding}
    exam.report.check("hello.outstanding", taken.key in listed, f"contribution {taken.key} is not in {sorted(listed)}")
    await exam.until(
        lambda: exam.run.taken[taken.key].verdict == "accepted", "outstanding.again", "the same contribution once more"
    )
    await exam.session.say(published=exam.run.merge(exam.run.taken[taken.key]))
    await adopted(exam, "adopt.fetched")


async def reseed(exam: LearnerExam) -> None:
    await train(exam)
    before = len(exam.fetches)
    await exam.session.say(reseed=pb.Reseed(reason="the conformance kit does not trust these parameters"))
    await exam.until(
        lambda: (
            {f.fragment for f in exam.fetches[before:] if f.kind == pb.FETCH_THETA} == set(range(exam.run.fragments))
        ),
        "reseed.whole",
        "a fetch of every fragment, whole",
    )
    await train(exam)
    await adopted(exam, "reseed.whole")


# ---------------------------------------------------------------- leaving


async def stop(exam: LearnerExam) -> None:
    await train(exam)
    seen = len(exam.hellos)
    await exam.session.say(stop=pb.Stop(reason="the conformance kit is done"))
    await exam.until(lambda: exam.left, "stop.leave", "Leave after Stop")
    for fragment in range(exam.run.fragments):
        discarded = sum(count.tokens for count in exam.progress.discarded if count.fragment == fragment)
        accepted = exam.run.accepted_tokens(fragment)
        exam.report.check(
            "stop.handed",
            accepted + discarded == exam.progress.tokens,
            f"fragment {fragment}: {exam.progress.tokens} tokens, {accepted} handed over, {discarded} discarded",
        )
    exam.session.end(orderly=True)
    exam.report.check("stop.leave", await _stays_away(exam, seen), "it said hello again after Leave")


async def whole_run(exam: LearnerExam) -> None:
    """A run from its beginning to its end."""
    await join(exam)
    await train(exam)
    for scene in (
        publish_inside,
        publish_damaged,
        publish_outside,
        refuse_one,
        say_nonsense,
        damage_a_message,
        break_the_link,
        reseed,
        publish_inside,
    ):
        await scene(exam)
    await stop(exam)


# ---------------------------------------------------------------- sent away


async def older_syncer(exam: LearnerExam) -> None:
    """A syncer that speaks protocol 1 only, and then refuses for good."""
    hello = await greet_any(exam, 0)
    while hello.protocol > 1:
        protocol, seen = hello.protocol, len(exam.hellos)
        await exam.session.refuse("protocol_version", f"protocol {protocol} is not spoken here")
        if await _stays_away(exam, seen):
            exam.report.kept("protocol.older")  # it speaks nothing older, and takes that for final
            exam.report.kept("refused.hello")
            return
        hello = exam.hellos[-1]
        exam.report.check(
            "protocol.older", hello.protocol == protocol - 1, f"after {protocol} it tried {hello.protocol}"
        )
        newer = (hello.protocol < 3 and hello.fingerprint) or (
            hello.protocol < 2 and (hello.epoch or hello.checksums or hello.wants_inner)
        )
        exam.report.check(
            "protocol.fields", not newer, f"a Hello of protocol {hello.protocol} has fields of a newer one"
        )
    await refused_for_good(exam)


async def _stays_away(exam: LearnerExam, seen: int) -> bool:
    return await exam.quiet(lambda: len(exam.hellos) > seen, QUIET_S)


async def greet_any(exam: LearnerExam, seen: int) -> Any:
    heard = len(exam.hellos) + exam.unusable
    await exam.until(
        lambda: len(exam.hellos) > seen or len(exam.hellos) + exam.unusable > heard,
        "hello.first",
        "a Hello",
        0.0 if seen else BEGIN_S,
    )
    if len(exam.hellos) <= seen:
        raise Gone("a Hello that can be read")
    return exam.hellos[-1]


async def refused_for_good(exam: LearnerExam) -> None:
    seen = len(exam.hellos)
    await exam.session.refuse("wrong_layout", "another model; start every learner of a run with the same model")
    exam.report.check("refused.hello", await _stays_away(exam, seen), "it said hello again after wrong_layout")


async def fence(exam: LearnerExam) -> None:
    """Another process takes the learner's id while it trains."""
    await join(exam)
    await train(exam)
    seen, given = len(exam.hellos), len(exam.run.taken)
    await exam.session.refuse("fenced", "another process joined under this id; give each learner its own")
    await asyncio.sleep(0)
    away = await exam.quiet(lambda: len(exam.hellos) > seen or len(exam.run.taken) > given, QUIET_S)
    exam.report.check("refused.fenced", away, "it went on after it was fenced")
