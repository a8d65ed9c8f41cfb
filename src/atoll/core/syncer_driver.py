"""The one interpreter of the syncer's effects: it owns the machine and the durability gate, and performs what they say
against a small host. Production's shell, the simulator, the fleet and the tests are such hosts; the order of things is
decided here and nowhere else:

    a push        is checked when it opens and again when its bytes are here; its payload is kept by its id meanwhile
    a message     leaves when everything that it follows from is on the tape; a small update travels with its notice
    a merge       has its fragment's turn: merge, then commit as the level says, then publish, then the next in turn
    a leaver      is let go when what it handed over is safe

Nothing here takes time. What does is asked of the host with a `done` to be called when it is over; merges, heals and
seeds are never over at once. A host whose process dies, or that finds a newer syncer on its disk (then it calls
`fence`), does not call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

from atoll.core import effects as fx
from atoll.core.durability_gate import Chore, DurabilityGate
from atoll.core.durable import FragmentRecord, Recovery
from atoll.core.fragment_turns import FragmentTurns
from atoll.core.identity import Identity
from atoll.core.layout import Layout
from atoll.core.learner_host import Payload
from atoll.core.messages import (
    NO_VERSION,
    FetchRequest,
    Hello,
    InlineReply,
    Published,
    PushHeader,
    PushKind,
    PushReply,
    Refusal,
    Refused,
    SyncerMessage,
)
from atoll.core.note_budget import NoteBudget
from atoll.core.rounds import ContributionId, ContributionRecord
from atoll.core.syncer_machine import SyncerMachine
from atoll.core.values import replace

LEFT = "left"
"""Why the session of a learner ends that has left."""
PASSES = 2
"""Over dirty fragments in one go: versions that were made while the first pass wrote are met by the second."""


@dataclass(frozen=True, slots=True)
class VersionToStore:
    """A version that is to be on disk. The host adds the fragment's arrays, which nobody changes meanwhile."""

    fragment: int
    version: int
    checksum: int
    fragment_record: FragmentRecord
    seed: bool = False


@dataclass(frozen=True, slots=True)
class StoreOutcome:
    """How a write of a version went."""

    error: str = ""
    """Why it is not on disk."""
    took_ns: int = 0
    bytes: int = 0


class SyncerDriverHost(Protocol):
    """What a world supplies: a clock, links, arrays and a disk."""

    def now_ns(self) -> int: ...
    def later(self, delay_ns: int, action: Callable[[], None]) -> None: ...
    def wake_at(self, wake_ns: int | None) -> None:
        """Call the driver's `wake` then (None: not until something else happens)."""

    def note(self, note: fx.Note) -> None: ...
    def end_fenced(self, reason: str) -> None:
        """A newer syncer has taken over: end."""

    def end_finished(self, reason: str) -> None: ...

    def send(self, session: int, message: SyncerMessage) -> None: ...
    def end_session(self, session: int, reason: str) -> None:
        """Once what was sent before has gone out; comes back as SessionClosed."""

    def lay_out(self, layout: Layout, *, lost: bool) -> None:
        """The run's model is known: arrays for it, which a seed or (`lost`) learners that hold it will fill."""

    def commit_seed(self, done: Callable[[tuple[int, ...]], None]) -> None:
        """Make what was put as the seed version 0; gives one checksum per fragment."""

    def compare(self, compare: fx.Compare, payloads: list[Payload], done: Callable[[fx.Compared], None]) -> None:
        """Measure how far the contributions agree; not at once."""

    def merge(self, merge: fx.Merge, payloads: list[Payload], done: Callable[[fx.MergeFinished], None]) -> None:
        """Merge into the arrays and note the decision for replay. Nothing is changed if the result is not finite."""

    def heal(self, heal: fx.CommitHealed, payload: Payload, done: Callable[[], None]) -> None: ...
    def version(self, fragment: int) -> int:
        """That the arrays hold."""

    def inline_update(self, fragment: int, version: int) -> bytes | None:
        """The update that leads to this version, if it is here and small enough for a control message."""

    def publish(self, merge: fx.Merge, announce: Callable[[], None]) -> None:
        """Announce a version that is committed."""

    def append(self, rows: Mapping[str, Any]) -> None:
        """Put facts on the tape."""

    def sync(self, done: Callable[[str], None]) -> None:
        """Everything appended so far is durable, or the error says why not."""

    def store(self, item: VersionToStore, done: Callable[[StoreOutcome], None]) -> None: ...
    def check_epoch(self, done: Callable[[], None]) -> None:
        """Look whether a newer syncer has taken over."""

    def durability_lost(self, reason: str) -> None:
        """From now on commits are not durable; training goes on."""

    def durability_back(self, reason: str) -> None:
        """Everything is on disk again; it was not for this reason."""

    def keep_handed(
        self, items: list[tuple[ContributionRecord, Payload]], processed: int, done: Callable[[], None]
    ) -> None:
        """Put what a leaving learner handed over on disk. If that fails it waits in memory only."""

    def drop_handed(self, identity: ContributionId) -> None: ...
    def forget_inner(self, slot: int) -> None:
        """The pieces of inner state in this slot are no longer needed."""


class SyncerDriver:
    """Keeps the bytes that the machine only knows by id, and holds back what the disk does not know yet."""

    def __init__(self, machine: SyncerMachine, host: SyncerDriverHost, gate: DurabilityGate) -> None:
        self.machine = machine
        self.gate = gate
        self.turns = FragmentTurns()
        self.held: dict[ContributionId, Payload] = {}
        """Contributions that are not merged yet."""
        self.watch: Callable[[fx.SyncerInput], None] | None = None
        """Told of every input before the machine."""
        self._heals: dict[int, Payload] = {}
        self._under_way: dict[int, object] = {}
        """By fragment whose turn the driver itself has: the work that must end before the turn is given back."""
        self._host = host
        self._layout: Layout | None = None
        self._replies: list[PushReply] = []
        self._looking = False
        self._notes = NoteBudget()
        self._carried: tuple[Published, Published] | None = None
        """The last notice that went out with its update inside, and that form of it: the next learner gets the same."""

    # ------------------------------------------------------------ machine in, effects out

    def apply(self, event: fx.SyncerInput) -> None:
        """Feed the machine and perform what it says."""
        if self.watch is not None:
            self.watch(event)
        self.perform(self.machine.handle(event, self._host.now_ns()))

    def shard_back(self, event: fx.FragmentsBack) -> None:
        """A shard is there again. What it was doing will never be answered; whoever has its turn next finds its disk's
        versions."""
        ended = [fragment for fragment in event.on_disk if self._under_way.pop(fragment, None) is not None]
        for fragment in event.on_disk:
            self._heals.pop(fragment, None)
        self.apply(event)
        for fragment in ended:
            self.turns.give_back(fragment)

    def _begin_work(self, fragment: int) -> Callable[[], bool]:
        """The driver has the turn of a fragment. Returns what says whether that work still counts."""
        token = self._under_way[fragment] = object()
        return lambda: self._under_way.get(fragment) is token

    def _end_work(self, fragment: int) -> None:
        del self._under_way[fragment]
        self.turns.give_back(fragment)

    def wake(self) -> None:
        """The time that was asked for has come, or an earlier one."""
        wake_ns = self.machine.next_wake_ns()
        if wake_ns is not None and wake_ns <= self._host.now_ns():
            self.apply(fx.Tick())
        else:
            self._host.wake_at(wake_ns)

    def restore(self, recovery: Recovery, load_ns: int = 0) -> list[fx.SyncerEffect]:
        """Continue the run of an earlier syncer. The caller fills the arrays and `held`, and then performs these."""
        effects = self.machine.restore(recovery, self._host.now_ns(), load_ns)
        self._layout = self.machine.layout
        return effects

    def perform(self, effects: list[fx.SyncerEffect]) -> None:
        for effect in effects:
            self._perform(effect)
        self._host.wake_at(self.machine.next_wake_ns())

    def _perform(self, effect: fx.SyncerEffect) -> None:
        match effect:
            case fx.ToLearner():
                self._say(effect.session, effect.message)
            case fx.Answer():
                self._replies.append(effect.reply)
            case fx.Note():
                for event in self._notes.take(effect.event, self._host.now_ns()):
                    self._host.note(fx.Note(event))
            case fx.Remember():
                self._remember(effect)
            case fx.Compare():
                payloads = [self.held[identity] for identity in effect.contributions]
                self._host.compare(effect, payloads, self.apply)
            case fx.Merge():
                self.turns.take(effect.fragment, lambda: self._merge(effect))
            case fx.Forget():
                self.held.pop(effect.contribution, None)
                self._host.drop_handed(effect.contribution)
            case fx.KeepHeld():
                self._keep_held(effect)
            case fx.EndSession():
                self._host.end_session(effect.session, effect.reason)
            case fx.CommitSeed():
                self._host.commit_seed(self._store_seed)
            case fx.CommitHealed():
                self.turns.take(effect.fragment, lambda: self._heal(effect))
            case fx.ForgetInner():
                self._host.forget_inner(effect.slot)
            case fx.LookForNewer():
                self._look_for_newer()
            case fx.Finished():
                self._host.end_finished(effect.reason)
            case _:
                assert_never(effect)

    def fence(self, reason: str) -> None:
        """A newer syncer was seen on the disk: nothing is written or said any more."""
        if not self.gate.fenced:
            self.gate.fence()
            self._host.end_fenced(reason)

    def _look_for_newer(self) -> None:
        """One look at a time: whoever says so may say it as often as it likes."""
        if self.gate.level != "none" and not self._looking and not self.gate.fenced:
            self._looking = True
            self._host.check_epoch(self._looked)

    def _looked(self) -> None:
        self._looking = False

    # ------------------------------------------------------------ sessions and messages

    def open_session(self, session: int, hello: Hello, *, secret: str = "", identity: Identity | None = None) -> None:
        self.apply(fx.SessionOpened(session, hello, secret, identity))
        layout = self.machine.layout
        if layout is not None and layout is not self._layout:
            self._layout = layout
            self._host.lay_out(layout, lost=self.machine.healing is not None)

    def _say(self, session: int, message: SyncerMessage) -> None:
        """Send, once everything that the message follows from is on disk. A refusal follows from nothing."""
        if isinstance(message, Refused):
            self._host.send(session, message)
            return
        whole = self._with_update(session, message) if isinstance(message, Published) else message
        if self.gate.open:
            self._host.send(session, whole)
        else:
            self.gate.after_tape(lambda: self._host.send(session, whole))

    def _with_update(self, session: int, message: Published) -> Published:
        """A small update goes out with its notice, which spares a learner that keeps up a bulk call."""
        if self.machine.keeps_up(session, message.fragment, message.version):
            update = self._host.inline_update(message.fragment, message.version)
            if update is not None:
                if self._carried is None or self._carried[0] is not message:
                    self._carried = (message, replace(message, update=update))
                return self._carried[1]
        return message

    def _keep_held(self, effect: fx.KeepHeld) -> None:
        items = [(item, self.held[item.id]) for item in effect.contributions if item.id in self.held]
        self._host.keep_handed(items, effect.processed, lambda: self._let_leave(effect))

    def _let_leave(self, effect: fx.KeepHeld) -> None:
        for item in effect.contributions:
            if not self.machine.holds(item.id):  # merged while it was being written
                self._host.drop_handed(item.id)
        # Its leaving is a fact on the tape, too: a syncer that forgot it would count the learner as lost.
        self.gate.after_tape(lambda: self._host.end_session(effect.session, LEFT))

    # ------------------------------------------------------------ pushes

    def open_push(self, header: PushHeader) -> PushReply:
        """May these bytes come in?"""
        reply = self._ask(fx.PushOpened(header))
        if reply.code == Refusal.DUPLICATE:
            # A duplicate is also how a learner whose reply was lost asks again: let the machine tell it the fate.
            self._ask(fx.PushCompleted(header, finite=True, norm=0.0))
        return reply

    def complete_push(self, header: PushHeader, payload: Payload, *, finite: bool, norm: float = 0.0) -> PushReply:
        """The bytes are here and were looked at. A seed is in the arrays already, inner state in its slot."""
        event = fx.PushCompleted(header, finite, norm)
        if header.kind is PushKind.CONTRIBUTION:
            return self._take(event, payload)
        if header.kind is PushKind.HEAL:
            return self._take_heal(event, payload)
        return self._ask(event)

    def answer_inline(self, session: int, header: PushHeader, reply: PushReply) -> None:
        """What became of a contribution that came inside a control message."""
        self._host.send(session, InlineReply(header.fragment, header.seq, reply))

    def _take(self, event: fx.PushCompleted, payload: Payload) -> PushReply:
        header = event.header
        identity = ContributionId(header.learner, header.generation, header.fragment, header.seq)
        taken = identity in self.held
        if not taken:
            self.held[identity] = payload
        reply = self._ask(event)
        if not reply.accepted and not taken:
            self.held.pop(identity, None)
        return reply

    def _take_heal(self, event: fx.PushCompleted, payload: Payload) -> PushReply:
        fragment = event.header.fragment
        before = self._heals.get(fragment)
        self._heals[fragment] = payload
        reply = self._ask(event)
        if not reply.accepted:
            self._heals.pop(fragment, None)
            if before is not None:
                self._heals[fragment] = before
        return reply

    def _ask(self, event: fx.PushOpened | fx.PushCompleted) -> PushReply:
        """Every push gets one answer."""
        self.apply(event)
        return self._replies.pop()

    def open_fetch(self, request: FetchRequest) -> PushReply | None:
        """None if this learner may fetch, else the refusal."""
        refusal = self.machine.check_sender(request.learner, request.generation, request.secret)
        if refusal is None:
            self.apply(fx.FetchOpened(request.learner, request.generation))
        return refusal

    # ------------------------------------------------------------ versions

    def _store_seed(self, checksums: tuple[int, ...], fragment: int = 0) -> None:
        """Fragment by fragment: a seed counts when all of it is stored."""
        if fragment == len(checksums):
            self.apply(fx.SeedCommitted(checksums))
            return
        fragment_record = {**self.machine.fragment_record(fragment), "version": 0, "checksum": checksums[fragment]}
        item = VersionToStore(fragment, 0, checksums[fragment], fragment_record, seed=True)
        self._store(item, lambda _: self._store_seed(checksums, fragment + 1))

    def _merge(self, effect: fx.Merge) -> None:
        if not self.machine.merges(effect):
            self.turns.give_back(effect.fragment)  # its shard went away while it waited for its turn
            return
        counts = self._begin_work(effect.fragment)
        payloads = [self.held[identity] for identity in effect.contributions]
        self._host.merge(effect, payloads, lambda result: self._merged(effect, result, counts))

    def _merged(self, effect: fx.Merge, result: fx.MergeFinished, counts: Callable[[], bool]) -> None:
        if not counts():
            return
        if not result.finite:
            self._finish(effect.fragment, result)
            return
        fragment_record = self.machine.record_after_merge(effect.fragment, result.checksum)
        item = VersionToStore(effect.fragment, effect.version, result.checksum, fragment_record)
        self._store(item, lambda stored: self._publish(effect, result, stored), counts)

    def _publish(self, effect: fx.Merge, result: fx.MergeFinished, stored: StoreOutcome) -> None:
        whole = replace(result, store_ns=stored.took_ns, store_bytes=stored.bytes)
        self._host.publish(effect, lambda: self._finish(effect.fragment, whole))

    def _heal(self, effect: fx.CommitHealed) -> None:
        payload = self._heals.pop(effect.fragment, None)
        if payload is None or effect.version <= self._host.version(effect.fragment):
            self.turns.give_back(effect.fragment)  # it came twice, or a newer one came first
        else:
            counts = self._begin_work(effect.fragment)
            self._host.heal(effect, payload, lambda: self._healed(effect, counts))

    def _healed(self, effect: fx.CommitHealed, counts: Callable[[], bool]) -> None:
        if not counts():
            return
        fragment_record = self.machine.record_after_heal(effect.fragment, effect.version, effect.checksum)
        item = VersionToStore(effect.fragment, effect.version, effect.checksum, fragment_record)
        done = fx.HealCommitted(effect.fragment, effect.version, effect.checksum)
        self._store(item, lambda _: self._finish(effect.fragment, done), counts)

    def _finish(self, fragment: int, event: fx.MergeFinished | fx.HealCommitted) -> None:
        """Whoever has the turn next finds a machine that has heard of this change."""
        self.apply(event)
        self._end_work(fragment)

    # ------------------------------------------------------------ the disk

    def _remember(self, effect: fx.Remember) -> None:
        if self.gate.level == "none" or self.gate.fenced:
            return
        self._host.append(effect.rows)
        if self.gate.remembered(first=effect.first):
            self._sync()

    def _sync(self) -> None:
        upto = self.gate.appended
        self._host.sync(lambda error: self._synced(upto, error))

    def _synced(self, upto: int, error: str) -> None:
        if error:
            self._lose(f"the tape cannot be written ({error})")
        if self.gate.synced(upto, error):
            self._sync()

    def _store(
        self,
        item: VersionToStore,
        then: Callable[[StoreOutcome], None],
        counts: Callable[[], bool] = lambda: True,
    ) -> None:
        """Make one version durable as the level says (a seed at every level), then go on, if that still `counts`."""
        if self.gate.level == "none":
            then(StoreOutcome())
        elif not item.seed and not self.gate.writes_commits:
            # Nothing is published by a syncer whose place another one has taken, whatever the disk gets of it.
            self.gate.put_off({item.fragment})
            self._host.check_epoch(lambda: then(StoreOutcome()) if counts() else None)
        else:
            # Facts first: a record must not know that somebody has left, say, before the tape does.
            self.gate.after_tape(lambda: self._store_now(item, then, counts))

    def _store_now(
        self, item: VersionToStore, then: Callable[[StoreOutcome], None], counts: Callable[[], bool]
    ) -> None:
        if counts():
            self._host.store(item, lambda outcome: self._stored(item, outcome, then) if counts() else None)

    def _stored(self, item: VersionToStore, outcome: StoreOutcome, then: Callable[[StoreOutcome], None]) -> None:
        if outcome.error:
            text = f"version {item.version} of fragment {item.fragment} cannot be written ({outcome.error})"
            self._lose(text, item.fragment)
        else:
            self.gate.written(item.fragment)
        then(outcome)

    # ------------------------------------------------------------ the disk when nobody waits for it

    def take_in(self, rows: Mapping[str, Any], fragments: Iterable[int]) -> None:
        """What came from a snapshot is not on this syncer's own disk: put it there, facts first, in the background."""
        if self.gate.level != "none":
            if rows:
                self._host.append(rows)
                self.gate.remembered(first=False)
            self.gate.put_off(fragments)

    def look_after_disk(self) -> None:
        """Begin to write in the background what is not written at once."""
        if self.gate.level != "none":
            self._host.later(self.gate.pause_ns, self._do_chore)

    def _do_chore(self) -> None:
        if self.gate.fenced:
            return
        chore = self.gate.chore(self._host.now_ns())
        match chore:
            case Chore.CATCH_UP:
                self.catch_up(self.look_after_disk)
            case Chore.SYNC:
                self._host.sync(self._loose_synced)
            case Chore.LOOK:
                self._host.check_epoch(self.look_after_disk)
            case _:
                assert_never(chore)

    def _loose_synced(self, error: str) -> None:
        if error:
            self._lose(f"the tape cannot be written ({error})")
        self.look_after_disk()

    def catch_up(self, then: Callable[[], None]) -> None:
        """Write everything that is not on disk, facts first: a record must not know of a member that no row knows."""
        if self.gate.dirty:
            self._host.sync(lambda error: self._give_up(error, then) if error else self._store_dirty([], PASSES, then))
        else:
            self._store_dirty([], 0, then)

    def _store_dirty(self, fragments: list[int], passes: int, then: Callable[[], None]) -> None:
        """These fragments as they stand, then what has become dirty meanwhile, then the facts once more."""
        if fragments:
            self.turns.take(fragments[0], lambda: self._store_again(fragments, passes, then))
        elif passes and self.gate.dirty:
            self._store_dirty(sorted(self.gate.dirty), passes - 1, then)
        else:
            self._host.sync(lambda error: self._give_up(error, then) if error else self._caught_up(then))

    def _store_again(self, fragments: list[int], passes: int, then: Callable[[], None]) -> None:
        fragment, version = fragments[0], self._host.version(fragments[0])
        counts = self._begin_work(fragment)

        def stored(outcome: StoreOutcome) -> None:
            if not counts():
                return
            if not outcome.error:
                self.gate.written(fragment, again=True)
            self._end_work(fragment)
            if outcome.error:
                self._give_up(outcome.error, then, fragment)
            else:
                self._store_dirty(fragments[1:], passes, then)

        if version == NO_VERSION:  # a learner will bring it, and that is written then
            self._end_work(fragment)
            self._store_dirty(fragments[1:], passes, then)
        else:
            fragment_record = self.machine.fragment_record(fragment)
            item = VersionToStore(fragment, version, int(fragment_record["checksum"]), fragment_record)
            self.gate.after_tape(lambda: self._host.store(item, stored))

    def _give_up(self, error: str, then: Callable[[], None], fragment: int | None = None) -> None:
        self._lose(error, fragment)
        then()

    def _caught_up(self, then: Callable[[], None]) -> None:
        reason = self.gate.mended()
        if reason:
            self._host.durability_back(reason)
        then()

    def _lose(self, reason: str, fragment: int | None = None) -> None:
        if self.gate.failed(reason, fragment):
            self._host.durability_lost(reason)
