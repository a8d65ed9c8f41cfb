"""What the simulator's seeds found, on the smallest world that shows it. The seeds themselves are in tests/sim."""

from __future__ import annotations

from world import World, config

from atoll.core import effects as fx
from atoll.core.config import SECOND_NS
from atoll.core.events import NormGuardReset
from atoll.core.healing import HEAL_WAIT_NS, Healing, VersionClaim
from atoll.core.messages import (
    Discard,
    Fate,
    FragmentState,
    Published,
    PushHeader,
    PushKind,
    Refusal,
    Request,
    Reseed,
    Start,
    Welcome,
)


def running(learners: int = 2, steps: int = 20, **changes: object) -> World:
    world = World(config(**changes), learners)
    world.join_all()
    world.everyone_steps(steps)
    return world


def header_of(world: World, name: str, seq: int, fragment: int = 0) -> PushHeader:
    version = world.syncer.book.tracks[fragment].version
    counts = (fragment, 0, 0, seq, version, 1, 10, "int4", 1, 1)
    return PushHeader(PushKind.CONTRIBUTION, name, 1, *counts, secret=world.secret_of(name))


def test_a_refusal_whose_answer_was_lost_is_told_again() -> None:
    """Seed 5699: the learner asked again, heard "duplicate", and waited for a fate for ever."""
    world = running()
    header = header_of(world, "l0", 900)
    world.to_syncer(fx.PushCompleted(header, finite=False, norm=0.0))  # refused; the answer never arrives
    out = world.to_syncer(fx.PushCompleted(header, finite=True, norm=1.0))
    fates = [e.message for e in out if isinstance(e, fx.ToLearner) and isinstance(e.message, Fate)]
    assert fates == [Fate(0, 900, -1, Refusal.UNKNOWN_ROUND)]


def test_versions_that_were_announced_and_lost_are_not_waited_for() -> None:
    """Seeds 336 and 6526: announced, not fetched, and then lost with a slot."""
    world = running()
    machine = world.learners["l0@l0-1"].machine
    progress = machine.fragments[0]
    base, tokens = progress.base, progress.local.tokens
    if not progress.outstanding:
        machine.handle(fx.Stepped(10, 1, 1.0), 0)
        machine._contributions.upcoming = (0,)
        machine.handle(fx.Boundary(), 0)
        machine.handle(fx.FromSyncer(Request(99, 0, 0)), 0)
    sent = progress.outstanding[0]
    tokens = progress.local.tokens + sent.counters.tokens
    machine.handle(fx.FromSyncer(Published(0, base + 1, 99, 7, sent.seq, 1, 50)), 0)
    assert sent.merged_version == base + 1 and progress.pending_tokens < tokens
    states = tuple(FragmentState(p.base, p.base_checksum) for p in machine.fragments)
    machine.handle(fx.FromSyncer(Start(1, states, (1, 1, 1, 1))), 0)
    assert progress.announced == base and not progress.outstanding and progress.pending_tokens == tokens


def test_a_learner_that_stands_still_answers_a_request() -> None:
    """Seed 125: without a snapshot the request waited for a step boundary that never came."""
    world = running(overlap=0, quorum="all", steps=9)
    learner = world.learners["l0@l0-1"]
    machine = learner.machine
    for progress in machine.fragments:
        progress.request = None
    progress = next(p for p in machine.fragments if p.local.steps > 0 and not p.outstanding)
    if progress.snapshot is not None:
        machine._contributions.drop_snapshot(progress, [])
    progress.request = Request(99, 0, progress.index)
    assert machine.boundary_wanted
    out = machine.handle(fx.Boundary(), 0)
    assert any(isinstance(e, fx.Contribute) and e.header.round == 99 for e in out)


def test_healing_does_not_ask_to_be_woken_in_the_past() -> None:
    """Seed 126: a syncer with a fragment that nobody has ticked for ever at one moment."""
    healing = Healing([3, -1], {}, {"l0", "l1"})
    healing.hear("l0", (3, -1), (1, 0), 0)
    assert healing.next_wake_ns() == HEAL_WAIT_NS
    assert not healing.ask(HEAL_WAIT_NS) and not healing.over(HEAL_WAIT_NS)
    assert healing.next_wake_ns() is None


def test_healing_waits_for_what_is_being_put_in_place() -> None:
    """Seed 3019: the giver went away while its bytes were being committed."""
    healing = Healing([3], {}, set())
    healing.hear("l0", (5,), (9,), 0)
    assert healing.ask(0) == {"l0": [(0, VersionClaim(5, 9))]}
    healing.take(0, "l0")
    healing.forget("l0")
    assert not healing.over(0) and not healing.ask(0)
    healing.done(0, 5)
    assert healing.over(0)


def test_a_guard_that_refuses_everybody_begins_anew() -> None:
    """Seed 103: something huge came in before any norm was known; all that would repair it was refused."""
    world = running(steps=60)
    track = world.syncer.book.tracks[0]
    seq = {"l0": 900, "l1": 900}
    accepted = False
    for _ in range(40):
        for name in seq:
            seq[name] += 1
            out = world.to_syncer(fx.PushCompleted(header_of(world, name, seq[name]), finite=True, norm=1e4))
            reply = next(e.reply for e in out if isinstance(e, fx.Answer))
            accepted = accepted or reply.accepted
        if accepted:
            break
    assert accepted and seq["l0"] < 910
    assert any(event.fragment == track.index for event in world.noted(NormGuardReset))


def test_a_guard_that_refuses_most_learners_begins_anew() -> None:
    world = running(learners=8, steps=60)
    answers = []
    for seq in (900, 901):
        for index in range(8):
            out = world.to_syncer(fx.PushCompleted(header_of(world, f"l{index}", seq), finite=True, norm=1e4))
            answers.append(next(e.reply for e in out if isinstance(e, fx.Answer)).accepted)
    assert answers == [False] * 13 + [True] * 3


def test_half_of_the_learners_do_not_reset_the_guard() -> None:
    world = running(learners=8, steps=60)
    for seq in range(900, 920):
        for index in range(4):
            out = world.to_syncer(fx.PushCompleted(header_of(world, f"l{index}", seq), finite=True, norm=1e4))
            assert not next(e.reply for e in out if isinstance(e, fx.Answer)).accepted


def test_one_learner_alone_does_not_reset_the_guard() -> None:
    world = running(steps=60)
    for seq in range(900, 912):
        out = world.to_syncer(fx.PushCompleted(header_of(world, "l0", seq), finite=True, norm=1e4))
        assert not next(e.reply for e in out if isinstance(e, fx.Answer)).accepted
    assert not world.noted(NormGuardReset)


def test_a_report_that_a_contribution_overtook_does_not_balance_the_books() -> None:
    """Seed 313: tokens counted twice after a restart of the syncer."""
    world = running()
    learner = world.learners["l0@l0-1"]
    world.crash_syncer()
    world.restart_syncer(reconnect=False)
    world.connect(learner)
    world.connect(world.learners["l1@l1-1"])
    member = world.syncer.membership.members["l0"]
    member.unbalanced = True
    account = world.syncer.ledger.account("l0", member.generation)
    report = learner.machine.heartbeat()
    assert report is not None
    account.processed = report.tokens + 8  # what a contribution on its way implies
    world.to_syncer(fx.FromLearner(learner.session, report))
    assert member.unbalanced and Discard.ROLLED_BACK not in account.discarded[0]


def test_what_may_be_inside_a_healed_version_is_not_given_again() -> None:
    """Seed 12859 and its like: the disk failed, a learner brought the version back, nobody knows what is in it."""
    world = running(learners=3)
    world.disk_works = False
    world.everyone_steps(12)
    for row in [key for key in world.disk_rows if key.startswith("version/")]:
        del world.disk_rows[row]
    unsure = {
        (name, p.index, s.seq)
        for name, learner in world.learners.items()
        for p in learner.machine.fragments
        for s in p.outstanding
        if s.merged_version < 0
    }
    assert unsure
    world.crash_syncer()
    world.disk_works = True
    before = len(world.merges)
    world.restart_syncer(exact=False)
    world.advance(HEAL_WAIT_NS)
    world.everyone_steps(20)
    again = {(f"{i.learner}@{i.learner}-1", i.fragment, i.seq) for m in world.merges[before:] for i in m.contributions}
    assert not unsure & again
    assert world.syncer.ledger.totals().discarded.get("uncertain", 0) > 0
    world.check_ledger()
    world.check_rebase()


def test_a_generation_is_never_given_twice_over_a_restart() -> None:
    """Seed 18968: it was given while the disk was full, forgotten, and given again to another process."""
    world = running()
    world.kill(world.learners["l0@l0-1"])
    world.disk_works = False
    second = world.add("l0", instance="l0-2")
    world.boundary(second)
    given = second.machine.generation
    world.kill(second)
    world.crash_syncer()
    world.disk_works = True
    world.restart_syncer(exact=False, reconnect=False)
    third = world.add("l0", instance="l0-3")
    assert third.machine.generation > given


def test_a_learner_that_missed_a_roll_back_fetches_whole() -> None:
    """Seed 6906: updates of the new line of versions were applied to bits of the old one."""
    world = running()
    machine = world.learners["l0@l0-1"].machine
    welcome = Welcome(machine.run, machine.epoch + 1, machine.generation, machine.config, "", False, 2)
    states = tuple(FragmentState(p.newest + 2, 5) for p in machine.fragments)
    machine.handle(fx.LinkDown("cut"), 0)
    machine.handle(fx.FromSyncer(welcome), 0)
    out = machine.handle(fx.FromSyncer(Start(1, states, (1, 1, 1, 1))), 0)
    kinds = {str(e.kind) for e in out if isinstance(e, fx.Fetch)}
    assert kinds == {"theta"}


def test_a_slow_learner_is_merged_under_overwrite() -> None:
    """Seed 17: its steps took longer than a round, so it had nothing to give whenever it was asked."""
    world = World(config(adopt="overwrite", fragments=1, sync_every=2, quorum="1", learners_expected=2), 2)
    world.join_all()
    fast, slow = world.learners["l0@l0-1"], world.learners["l1@l1-1"]
    for _ in range(10):
        for _ in range(6):
            world.step(fast)
            world.advance(SECOND_NS // 100)
        world.learner_input(slow, fx.Stepped(10, SECOND_NS, 1.0))
        slow.theta[0] += 1.0
        world.run()
    assert any(identity.learner == "l1" for identity in world.merged_ids)
    world.check_ledger()


def test_an_aborted_round_is_due_when_it_was() -> None:
    """Seed 154: learners of a synchronous run waited from an earlier step on than the syncer wanted to ask at."""
    world = running(quorum="all", steps=6)
    track = next(t for t in world.syncer.book.tracks if t.round is None and not t.merging)
    track.due_step = 3
    book = world.syncer.book
    book._launch(track, 24, world.now_ns, [])
    opened = track.round
    assert opened is not None
    book._abort(track, opened, "test", [])
    assert track.due_step == 3


def test_a_dead_learner_with_a_file_may_come_back() -> None:
    """Seed 3839: its hand-over was on disk, the word that it had left was not."""
    world = running(learners=3, quorum="all")
    leaver = world.learners["l2@l2-1"]
    world.step(leaver)
    rows = dict(world.disk_rows)
    world.close(leaver)
    assert world.handed
    world.disk_rows = rows  # the tape was not synced
    world.crash_syncer()
    world.restart_syncer(reconnect=False)
    for learner in world.learners.values():
        world.connect(learner)
    world.everyone_steps(12)
    world.check_ledger()
    processed = sum(learner.machine.tokens for learner in world.learners.values())
    assert world.syncer.ledger.totals().processed <= processed


# ---------------------------------------------------------------- what an independent review found after the seeds


def test_half_a_reseed_does_not_keep_a_standing_learner_busy() -> None:
    """Its boundary has nothing to do before the other fragments have come, and must not be asked for."""
    world = World(config(fragments=2, overlap=0, quorum="all"), 2)
    world.join_all()
    world.everyone_steps(3)
    machine = world.learners["l0@l0-1"].machine
    machine.handle(fx.FromSyncer(Reseed("poisoned")), 0)
    first = machine.fragments[0]
    machine.handle(fx.Fetched(0, first.fetching, first.fetching, 1), 0)
    assert first.prepared and not machine.boundary_wanted
    second = machine.fragments[1]
    machine.handle(fx.Fetched(1, second.fetching, second.fetching, 1), 0)
    assert machine.boundary_wanted


def test_what_a_leaver_handed_over_is_not_given_again_after_a_heal() -> None:
    """Its files were on disk, the word that it left was not, and the version that holds it came from a learner."""
    world = running(learners=3, steps=10, fragments=1, sync_every=8, quorum="1", learners_expected=3)
    one, two, leaver = world.learners.values()
    world.step(leaver)
    row = dict(world.disk_rows["member/l2"])
    world.close(leaver)
    world.disk_rows["member/l2"] = row
    world.disk_works, world.files_stay = False, True
    for _ in range(8):
        for learner in (one, two):
            world.step(learner)
        world.advance(SECOND_NS // 1000)
        for learner in (one, two):
            world.boundary(learner)
    inside = {identity.seq for identity in world.merged_ids if identity.learner == "l2"}
    assert inside
    world.crash_syncer()
    world.disk_works = True
    world.restart_syncer(reconnect=False)
    for learner in (leaver, one, two):
        world.connect(learner)
    world.advance(HEAL_WAIT_NS + SECOND_NS)
    world.boundary(leaver)
    progress = leaver.machine.fragments[0]
    assert progress.local.steps == 0 and all(sent.discarded for sent in progress.outstanding)


def test_a_contribution_that_the_tape_knows_is_not_pushed_again() -> None:
    """Told of its merge by the tape after a restart, and its push, put off while healing, comes back as broken."""
    world = running()
    machine = world.learners["l0@l0-1"].machine
    progress = next(p for p in machine.fragments if p.outstanding)
    sent = progress.outstanding[0]
    sent.pushed, sent.merged_version = False, progress.base + 1
    assert machine.handle(fx.PushBroken(progress.index, sent.seq), 0) == []
