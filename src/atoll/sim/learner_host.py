"""One process of a learner in virtual time: what `learner.learner`, `engine` and `exchange` do with the machine's
effects, from its start to its end.

The training thread and the background are told apart as in production: a step takes its time and adopts at its end,
everything else happens in between.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from atoll.check import facts
from atoll.core import effects as fx
from atoll.core.layout import build_layout
from atoll.core.learner_machine import LearnerMachine
from atoll.core.messages import (
    INNER_PIECE_BYTES,
    NO_VERSION,
    Contribution,
    FetchKind,
    FetchRequest,
    Published,
    PushHeader,
    PushKind,
    PushReply,
    Received,
    Refusal,
    Refused,
    Reseed,
    Start,
    Welcome,
)
from atoll.errors import PayloadError
from atoll.sim.calls import Call
from atoll.sim.connection import Connection
from atoll.sim.link import Link
from atoll.sim.payloads import LearnerPayloads, Payload
from atoll.sim.process import Process
from atoll.wire.control import REFUSED_FOR_NOW, SYNCER_ENDED
from atoll.wire.limits import BACKOFF_FACTOR, BACKOFF_JITTER, BACKOFF_S_MAX, BACKOFF_S_MIN, CONNECT_S

if TYPE_CHECKING:
    from atoll.sim.scenario import LearnerSpec
    from atoll.sim.world import World

MS = 1_000_000
SECOND = 1_000_000_000
HEARTBEAT_NS = 2 * SECOND
RETRY_NS = SECOND // 2
BACKOFF_NS = (int(BACKOFF_S_MIN * SECOND), int(BACKOFF_S_MAX * SECOND))
CONNECT_NS = int(CONNECT_S * SECOND)
JOIN_TIMEOUT_NS = 120 * SECOND
CLOSE_TIMEOUT_NS = 15 * SECOND
LET_GO_NS = 5 * SECOND
INNER_WAIT_NS = 20 * SECOND
SYNC_WAIT_NS = 600 * SECOND
SLICE_NS = SECOND // 2
"""All as in `learner`, whose modules need torch."""


class LearnerHost(Process):
    def __init__(self, world: World, name: str, instance: str, spec: LearnerSpec, link: Link) -> None:
        super().__init__(world)
        self.name = name
        self.instance = instance
        self.spec = spec
        self.link = link
        self.dice = Random(f"{world.scenario.seed}/{instance}")
        self.machine = LearnerMachine(name, instance, world.tensors)
        self.payloads: LearnerPayloads | None = None
        self.ended = ""
        """Why the process has ended by itself."""
        self.connection: Connection | None = None
        self.calls: dict[Call, None] = {}
        self.slow = 1.0
        self.poison = ""
        self.mute = False
        """Its contributions do not arrive."""
        self.began_ns = world.now_ns
        self.trains = False
        """Joined, and the training loop runs."""
        self.able_ns = 0
        self.able_since_ns = -1
        self.slowed = False
        self._backoff_ns = BACKOFF_NS[0]
        self._connecting = False
        self._stepping = False
        self._closing_ns = -1
        self._close_wanted = ""
        self._left = False
        self._alone = False
        self._waiting_since_ns = -1
        self._inner_until_ns = -1
        self._updates: dict[tuple[int, int], Payload] = {}
        self._sent: set[tuple[int, int]] = set()
        self._pushing: set[tuple[int, int]] = set()
        self._seeding = False
        self._seed_wanted = False

    # ------------------------------------------------------------ life

    def start(self) -> None:
        if self.dead:
            return
        self.machine.wants_inner = self.world.scenario.inner and self.instance.endswith("+")
        self._connect()
        self.later(HEARTBEAT_NS, self._heartbeat)
        self.later(JOIN_TIMEOUT_NS, self._check_joined)

    def die(self) -> None:
        """SIGKILL."""
        self.count_able()
        super().die()
        if self.connection is not None:
            self.connection.process_died(learner=True)

    def _end(self, reason: str) -> None:
        """The process ends by itself."""
        self.count_able()
        self.ended, self.dead = reason, True
        if self.connection is not None:
            self.connection.closed_by_learner()
        self.world.learner_ended(self)

    def freeze(self) -> None:
        self.count_able()
        super().freeze()

    def thaw(self) -> None:
        self.frozen = False
        self.count_able(True)
        super().thaw()

    def count_able(self, again: bool = False) -> None:
        """Keep count of the time in which this process was able to train."""
        if self.able_since_ns >= 0:
            self.able_ns += self.world.now_ns - self.able_since_ns
        trains = again and self.trains and not self.dead and not self.frozen and self._closing_ns < 0
        self.able_since_ns = self.world.now_ns if trains else -1

    def _check_joined(self) -> None:
        if not self.machine.joined:
            self._end("could not join in time")

    # ------------------------------------------------------------ machine in, effects out

    def apply(self, event: fx.LearnerInput) -> None:
        world = self.world
        world.events += 1
        if world.tracing:
            world.trace(self.instance, event)
        for effect in self.machine.handle(event, world.now_ns):
            self._perform(effect)

    def news(self, event: fx.LearnerInput) -> None:
        """Something happened in the background; a training thread that waits looks up."""
        self.apply(event)
        if not self._stepping:
            self._look_up()

    def _perform(self, effect: fx.LearnerEffect) -> None:
        if isinstance(effect, fx.ToSyncer):
            if self.connection is not None:
                self.connection.to_syncer(effect.message)
            return
        if isinstance(effect, fx.Note):
            self.world.note(self.instance, effect)
            return
        if isinstance(effect, fx.Stopped):
            self._close_wanted = self._close_wanted or effect.reason
            return
        payloads = self.payloads
        assert payloads is not None
        if isinstance(effect, fx.TakeSnapshot):
            payloads.take(effect.fragment)
        elif isinstance(effect, fx.DropSnapshot):
            payloads.drop(effect.fragment)
        elif isinstance(effect, fx.Adopt):
            checksum = payloads.adopt(effect)
            self.world.state(facts.Adopted(self.name, self.instance, effect.fragment, effect.version, checksum))
            for key in [k for k in self._updates if k[0] == effect.fragment and k[1] <= effect.version]:
                del self._updates[key]
        elif isinstance(effect, fx.Contribute):
            self._contribute(effect)
        elif isinstance(effect, fx.PushAgain):
            self.later(0, self._push, effect.fragment, effect.seq)
        elif isinstance(effect, fx.Settle):
            payloads.settle(effect.fragment, effect.seq, effect.merged)
        elif isinstance(effect, fx.Fetch):
            small = (effect.fragment, effect.version) in self._updates
            self.later(0, self._take_small if small else self._fetch, effect)
        elif isinstance(effect, fx.PushSeed):
            self.later(0, self._push_seed)
        elif isinstance(effect, fx.ForgetResiduals):
            payloads.forget_residuals()
        elif isinstance(effect, fx.ForgetPrepared):
            payloads.forget_prepared(effect.fragment)
            self._may_go_back(effect.fragment)
        elif isinstance(effect, fx.GiveHeal):
            self.later(0, self._give_heal, list(effect.versions))
        elif isinstance(effect, fx.GiveInner):
            self.later(MS, self._push_inner, effect.slot)
        elif isinstance(effect, fx.TakeInner):
            self._inner_until_ns = -1
            if effect.pieces:
                self.world.take_inner(effect.slot)
        elif isinstance(effect, fx.Left):
            self._left = True

    def _may_go_back(self, fragment: int) -> None:
        """The machine goes back in versions exactly when it has no base any more."""
        for progress in self.machine.fragments:
            if fragment in (-1, progress.index) and progress.base == NO_VERSION:
                self.world.state(facts.WentBack(self.name, self.instance, progress.index))

    # ------------------------------------------------------------ the training thread

    def _look_up(self) -> None:
        """The training thread is between two steps: wait, close, or take the next step."""
        machine = self.machine
        if self.dead or self._stepping or self._closing_ns >= 0:
            return
        if not machine.joined:
            self._try_to_join()
            return
        if self._close_wanted:
            self._close()
            return
        if self._inner_until_ns > self.world.now_ns:
            return
        if machine.must_wait and not self._alone:
            if machine.boundary_wanted:
                self.apply(fx.Boundary())
            if machine.must_wait:
                if self._waiting_since_ns < 0:
                    self._waiting_since_ns = self.world.now_ns
                    self.later(SYNC_WAIT_NS, self._waited_enough, self._waiting_since_ns)
                return
        elif not machine.must_wait:
            self._alone = False
        self._waiting_since_ns = -1
        self._begin_step()

    def _try_to_join(self) -> None:
        if self.machine.boundary_wanted:
            self.apply(fx.Boundary())
        if self.machine.joined:
            self._joined()

    def _waited_enough(self, since_ns: int) -> None:
        if self._waiting_since_ns == since_ns:
            self._alone = True
            self._look_up()

    def _joined(self) -> None:
        if self.machine.wants_inner and self.machine.step > 0:
            self._inner_until_ns = self.world.now_ns + INNER_WAIT_NS
            self._wait_for_inner()
        else:
            self._train()

    def _wait_for_inner(self) -> None:
        if self._inner_until_ns > self.world.now_ns and not self._close_wanted:
            self.later(SLICE_NS, self._wait_for_inner)
            self.apply(fx.Boundary())
        else:
            self._inner_until_ns = -1
            self._train()

    def _train(self) -> None:
        self.trains = True
        self.count_able(True)
        self._look_up()

    def _begin_step(self) -> None:
        self._stepping = True
        took_ns = int(self.spec.step_ns * self.slow)
        if self.spec.jitter:
            took_ns = int(took_ns * (1.0 + self.spec.jitter * (self.dice.random() - 0.5)))
        self.later(took_ns, self._end_step, took_ns)

    def _end_step(self, took_ns: int) -> None:
        assert self.payloads is not None
        self._stepping = False
        self.payloads.step()
        self.apply(fx.Stepped(self.spec.tokens, took_ns, 1.0))
        self._look_up()

    # ------------------------------------------------------------ leaving

    def close(self, reason: str) -> None:
        """Asked to leave: at the next step boundary. One that has not joined simply ends, as SIGTERM does to it."""
        self._close_wanted = reason
        if not self.machine.joined:
            self._end(reason)
        else:
            self._look_up()

    def _close(self) -> None:
        self.count_able()
        self._closing_ns = self.world.now_ns
        self.apply(fx.Closing(True, self._close_wanted))
        self._closing()

    def _closing(self) -> None:
        waited_ns = self.world.now_ns - self._closing_ns
        if (
            (self._left and self.connection is None)
            or waited_ns >= CLOSE_TIMEOUT_NS + LET_GO_NS
            or (not self._left and waited_ns >= CLOSE_TIMEOUT_NS)
        ):
            self._end("left without an answer")
        else:
            if not self._left:
                self.apply(fx.Boundary())
            self.later(SLICE_NS // 5, self._closing)

    # ------------------------------------------------------------ the session

    def _connect(self) -> None:
        if self.connection is not None or self._connecting or self.dead:
            return
        self._connecting = True
        self.world.connect(self)

    def connected(self, connection: Connection) -> None:
        """The connection stands: say hello."""
        self._connecting = False
        self.connection = connection
        connection.to_syncer_hello(self.machine.hello())

    def not_connected(self) -> None:
        self._connecting = False
        self._retry()

    def _retry(self) -> None:
        wait_ns = int(self._backoff_ns * self.dice.uniform(1.0 - BACKOFF_JITTER, 1.0))
        self._backoff_ns = min(int(self._backoff_ns * BACKOFF_FACTOR), BACKOFF_NS[1])
        self.later(wait_ns, self._connect)

    def on_message(self, connection: Connection, message: Any) -> None:
        if connection is not self.connection:
            return
        if isinstance(message, Refused):
            self._refused(message)
            return
        if isinstance(message, Received):
            self._received(message)
            return
        if isinstance(message, Welcome) and self.payloads is None:
            layout = build_layout(self.world.tensors, message.config.fragments)
            self.payloads = self.world.new_learner_payloads(layout, message.config, self.name)
        if isinstance(message, Published) and not (isinstance(message.update, bytes) and not message.update):
            self._updates[message.fragment, message.version] = message.update
        if isinstance(message, Start):
            self._backoff_ns = BACKOFF_NS[0]
        self.news(fx.FromSyncer(message))

    def _refused(self, message: Refused) -> None:
        if message.code in REFUSED_FOR_NOW:
            assert self.connection is not None
            self.connection.cut()
        else:
            self.world.state(facts.Refused(self.name, message.code, True))
            self._end(f"refused: {message.code}")

    def on_down(self, connection: Connection, reason: str) -> None:
        if connection is not self.connection:
            return
        self.connection = None
        if self._left and reason == SYNCER_ENDED:
            self._end("left")
            return
        if self._left:
            self._left = False
            self.machine.leave_again()
        self.news(fx.LinkDown(reason))
        self._updates.clear()
        for key in sorted(self._sent):
            self._sent.discard(key)
            self.news(fx.PushBroken(*key))
        if not self.dead:
            self._retry()

    def _heartbeat(self) -> None:
        message = self.machine.heartbeat()
        if message is not None and self.connection is not None:
            self.connection.to_syncer(message)
        self.later(HEARTBEAT_NS, self._heartbeat)

    # ------------------------------------------------------------ contributions

    def _contribute(self, effect: fx.Contribute) -> None:
        assert self.payloads is not None
        self.payloads.start_sending(effect.header, effect.minus, effect.feedback)
        self.later(self.spec.encode_ns, self._encode, effect.header)

    def _encode(self, header: PushHeader) -> None:
        assert self.payloads is not None
        if self.machine.fragments[header.fragment].find(header.seq) is None:
            return
        encoded = self.payloads.encode(header.fragment, header.seq, self.poison)
        if encoded is None:
            refusal = PushReply(False, Refusal.NOT_FINITE, "not finite")
            self.news(fx.PushDone(header.fragment, header.seq, refusal))
            self.news(fx.FromSyncer(Reseed("a delta that is not finite")))
            return
        self._push(header.fragment, header.seq)

    def _push(self, fragment: int, seq: int) -> None:
        assert self.payloads is not None
        key = (fragment, seq)
        sending = self.payloads.sending(fragment, seq)
        if sending is None or key in self._pushing:
            return
        header, payload = sending
        if self.mute:
            self._pushing.add(key)
            self.later(RETRY_NS, self._push_broken, key)
            return
        if self.world.scenario.inline:
            if self.connection is not None and key not in self._sent:
                self._sent.add(key)
                self.connection.to_syncer(Contribution(header, payload))
            return
        self._pushing.add(key)
        Call(self, header.size).push(header, payload, lambda reply: self._pushed(key, reply))

    def _pushed(self, key: tuple[int, int], reply: PushReply | None) -> None:
        if reply is None or reply.code == Refusal.BUSY:
            self.later(RETRY_NS, self._push_broken, key)
            return
        self._pushing.discard(key)
        self.news(fx.PushDone(*key, reply))

    def _push_broken(self, key: tuple[int, int]) -> None:
        self._pushing.discard(key)
        self.news(fx.PushBroken(*key))

    def _received(self, message: Received) -> None:
        key = (message.fragment, message.seq)
        self._sent.discard(key)
        if message.reply.code == Refusal.BUSY:
            self.later(RETRY_NS, self.news, fx.PushBroken(*key))
        else:
            self.news(fx.PushDone(*key, message.reply))

    # ------------------------------------------------------------ whole fragments, to the syncer

    def _push_seed(self, fragment: int = 0) -> None:
        """Give the run its first parameters, one fragment after the other."""
        assert self.payloads is not None
        if self._seeding:
            self._seed_wanted = True
            return
        if fragment >= len(self.machine.fragments):
            self._seeding = False
            return
        self._seeding = True
        header = self._whole_header(PushKind.SEED, fragment, NO_VERSION, 0)
        self._push_whole(header, self.payloads.seed(fragment), lambda reply: self._seed_pushed(fragment, reply))

    def _push_whole(self, header: PushHeader, payload: Payload, done: Callable[[PushReply | None], None]) -> None:
        """Push something that the syncer waits for; again and again while the session lasts."""
        session = self.connection

        def answered(reply: PushReply | None) -> None:
            if reply is not None and reply.code not in (Refusal.BUSY, Refusal.CHECKSUM):
                done(reply)
            elif self.connection is None or self.connection is not session:
                done(None)
            else:
                self.later(RETRY_NS, lambda: Call(self, header.size).push(header, payload, answered))

        Call(self, header.size).push(header, payload, answered)

    def _seed_pushed(self, fragment: int, reply: PushReply | None) -> None:
        self._seeding = False
        if self._seed_wanted:
            self._seed_wanted = False
            self._push_seed()  # asked again, by a syncer that has forgotten what came
        elif reply is not None and reply.accepted:
            self._push_seed(fragment + 1)  # else the syncer asks again, or asks somebody else

    def _give_heal(self, versions: list[tuple[int, int]]) -> None:
        assert self.payloads is not None
        while versions:
            fragment, version = versions.pop(0)
            held = self.payloads.held(fragment, version)
            if held is not None:
                payload, checksum = held
                header = self._whole_header(PushKind.HEAL, fragment, version, checksum)
                self._push_whole(header, payload, lambda reply: self._heal_given(versions, reply))
                return

    def _heal_given(self, versions: list[tuple[int, int]], reply: PushReply | None) -> None:
        if reply is not None:
            self._give_heal(versions)

    def _whole_header(self, kind: PushKind, fragment: int, version: int, checksum: int) -> PushHeader:
        size = self.world.whole_bytes
        return PushHeader(
            kind, self.name, self.machine.generation, fragment, 0, 0, 0, version, 0, 0, "fp32", size, checksum
        )

    def _push_inner(self, slot: int) -> None:
        size = min(1000, INNER_PIECE_BYTES)
        header = PushHeader(
            PushKind.INNER, self.name, self.machine.generation, slot, 0, 0, 0, -1, 1, size, "inner", size, 1
        )
        Call(self, size).push(header, None, lambda reply: None)

    # ------------------------------------------------------------ versions

    def _take_small(self, effect: fx.Fetch) -> None:
        payload = self._updates.pop((effect.fragment, effect.version), None)
        self._prepare(effect, effect.version, payload, whole=False)

    def _fetch(self, effect: fx.Fetch) -> None:
        whole = effect.kind is FetchKind.THETA
        request = FetchRequest(
            effect.kind,
            self.name,
            self.machine.generation,
            effect.fragment,
            NO_VERSION if whole else effect.version,
        )
        Call(self, 100).fetch(request, lambda result: self._fetched(effect, result))

    def _fetched(self, effect: fx.Fetch, result: tuple[int, Payload, int] | str | None) -> None:
        if result is None:
            self.later(RETRY_NS, self.news, fx.FetchBroken(effect.fragment, effect.version, gone=False))
        elif result == Refusal.BUSY:
            self.later(20 * MS, self._fetch, effect)
        elif isinstance(result, str):
            gone = result == Refusal.UNKNOWN_VERSION
            self.later(0 if gone else RETRY_NS, self.news, fx.FetchBroken(effect.fragment, effect.version, gone=gone))
        else:
            self._prepare(effect, result[0], result[1], whole=effect.kind is FetchKind.THETA)

    def _prepare(self, effect: fx.Fetch, version: int, payload: Payload, *, whole: bool) -> None:
        assert self.payloads is not None
        fragment = effect.fragment
        try:
            if payload is None:
                raise PayloadError("nothing came")
            if whole:
                checksum = self.payloads.prepare_whole(fragment, version, payload)
            else:
                checksum = self.payloads.prepare_update(fragment, version, payload, effect.checksum)
        except PayloadError:
            self.news(fx.FetchBroken(fragment, effect.version, gone=True))
            return
        self.apply(fx.Fetched(fragment, version, effect.version, checksum))
        if version in self.machine.fragments[fragment].prepared:
            self.payloads.keep(fragment, version)
        if not self._stepping:
            self._look_up()
