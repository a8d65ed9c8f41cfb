"""One process of a learner in virtual time, from its start to its end: a `LearnerDriverHost` whose link, clock and
arrays are the simulator's, and a training loop.

The training thread and the background are told apart as in production: a step takes its time and adopts at its end,
everything else happens in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from atoll.core import (
    CLOSE_TIMEOUT_NS,
    INLINE_BYTES_MAX,
    INNER_WAIT_NS,
    JOIN_TIMEOUT_NS,
    LET_GO_NS,
    SYNC_WAIT_NS_MAX,
    WAIT_SLICE_NS,
    DataLeases,
    FetchAnswer,
    FetchedPayload,
    FetchKind,
    FetchRequest,
    Hello,
    LearnerDriver,
    LearnerDriverHost,
    LearnerMachine,
    LearnerMessage,
    OutgoingPayload,
    Payload,
    PreparedVersion,
    Progress,
    Published,
    PushHeader,
    PushKind,
    PushReply,
    Refused,
    Request,
    Start,
    Welcome,
    build_layout,
    messages,
)
from atoll.core import effects as fx
from atoll.errors import PayloadError
from atoll.instruments.check import facts
from atoll.instruments.sim.calls import Call
from atoll.instruments.sim.connection import Connection
from atoll.instruments.sim.data_reader import DataReader
from atoll.instruments.sim.link import VirtualLink
from atoll.instruments.sim.parties import Server
from atoll.instruments.sim.payloads import LearnerPayloads
from atoll.instruments.sim.process import Process
from atoll.wire import (
    BACKOFF_FACTOR,
    BACKOFF_JITTER,
    BACKOFF_S_MAX,
    BACKOFF_S_MIN,
    CONNECT_S,
    REFUSED_FOR_NOW,
    SYNCER_ENDED,
)

if TYPE_CHECKING:
    from atoll.instruments.sim.scenario import LearnerSpec
    from atoll.instruments.sim.world import World

MS = 1_000_000
SECOND = 1_000_000_000
BACKOFF_NS = (int(BACKOFF_S_MIN * SECOND), int(BACKOFF_S_MAX * SECOND))
CONNECT_NS = int(CONNECT_S * SECOND)
CLOSE_LOOK_NS = WAIT_SLICE_NS // 5
INNER_BYTES = 1000


class LearnerHost(Process, LearnerDriverHost):
    def __init__(self, world: World, name: str, instance: str, spec: LearnerSpec, link: VirtualLink) -> None:
        super().__init__(world)
        self.name = self.key = name
        self.instance = instance
        self.spec = spec
        self.link = link
        self.dice = Random(f"{world.scenario.seed}/{instance}")
        self.machine = LearnerMachine(name, instance, world.tensors)
        self.driver = LearnerDriver(self.machine, self)
        self.driver.watch = self._watch
        self.payloads: LearnerPayloads | None = None
        self.ended = ""
        """Why the process has ended by itself."""
        self.connection: Connection | None = None
        self.calls: dict[Call, None] = {}
        self.slow = 1.0
        self.poison = spec.lies
        self.mute = False
        """Its contributions do not arrive."""
        self.reported: Progress | None = None
        """The last report, whether it arrived or not."""
        self.reader = DataReader() if world.reads_data else None
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
        self._alone = False
        self._waiting_since_ns = -1
        self._inner_until_ns = -1

    def _watch(self, event: fx.LearnerInput) -> None:
        self.world.events += 1
        if self.world.tracing:
            self.world.trace(self.instance, event)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        if self.dead:
            return
        if self.world.scenario.inner and self.instance.endswith("+"):
            self.driver.handle(fx.InnerMissing())
        self._connect()
        self.driver.start()
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
        if self._inner_until_ns > self.world.clock.now_ns:
            return
        must_wait = machine.must_wait
        if must_wait and not self._alone:
            if machine.boundary_wanted:
                self.driver.handle(fx.Boundary())
            if machine.must_wait:
                if self._waiting_since_ns < 0:
                    self._waiting_since_ns = self.world.now_ns
                    self.later(SYNC_WAIT_NS_MAX, self._waited_enough, self._waiting_since_ns)
                return
        elif not must_wait:
            self._alone = False
        self._waiting_since_ns = -1
        self._begin_step()

    def _try_to_join(self) -> None:
        if self.machine.boundary_wanted:
            self.driver.handle(fx.Boundary())
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
            self.later(WAIT_SLICE_NS, self._wait_for_inner)
            self.driver.handle(fx.Boundary())
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
        self.driver.handle(fx.Stepped(self.spec.tokens, took_ns, 1.0))
        if self.reader is not None:
            finished, report = self.reader.step()
            if finished is not None:
                self.world.finished.add(finished)
            self.send(report)
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
        self.driver.handle(fx.Closing(True, self._close_wanted))
        self._closing()

    def _closing(self) -> None:
        waited_ns = self.world.now_ns - self._closing_ns
        if (
            (self.driver.left and self.connection is None)
            or waited_ns >= CLOSE_TIMEOUT_NS + LET_GO_NS
            or (not self.driver.left and waited_ns >= CLOSE_TIMEOUT_NS)
        ):
            self._end("left without an answer")
        else:
            if not self.driver.left:
                self.driver.handle(fx.Boundary())
            self.later(CLOSE_LOOK_NS, self._closing)

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
        connection.to_syncer_hello(self.hello())

    def hello(self) -> Hello:
        return self.machine.hello()

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
        match message:
            case (
                Published() | messages.Upcoming() | Request() | messages.InlineReply()
            ):  # most of them, and nothing to do here
                pass
            case Refused():
                self._refused(message)
                return
            case DataLeases():
                if self.reader is not None:
                    self.reader.answered(message)
                return
            case Start():
                self._backoff_ns = BACKOFF_NS[0]
            case Welcome() if self.payloads is None:
                layout = build_layout(self.world.tensors, message.config.fragments)
                self.payloads = self.world.new_learner_payloads(layout, message.config, self.name)
        self.driver.heard(message)

    def _refused(self, message: Refused) -> None:
        if message.code in REFUSED_FOR_NOW:
            assert self.connection is not None
            self.connection.cut()
        else:
            self.world.observe(facts.Refused(self.name, message.code, True))
            if self.world.is_honest(self.name):
                self.world.observe(facts.TurnedAway(self.name, message.code))
            self._end(f"refused: {message.code}")

    def on_down(self, connection: Connection, reason: str) -> None:
        if connection is not self.connection:
            return
        self.connection = None
        self.driver.link_down(reason, let_go=reason == SYNCER_ENDED)
        if not self.dead:
            self._retry()

    # ------------------------------------------------------------ what the driver asks for: the world

    def now_ns(self) -> int:
        return self.world.clock.now_ns

    def news(self) -> None:
        if not self._stepping:
            self._look_up()

    def send(self, message: LearnerMessage) -> None:
        if isinstance(message, Progress):
            self.reported = message
        if self.connection is not None:
            self.connection.to_syncer(message)

    def way(self, fragment: int) -> tuple[Server | None, VirtualLink]:
        """Who serves this fragment (-1: who serves the rest), and the link there."""
        return self.world.way_to(self, fragment)

    def push(self, header: PushHeader, payload: Payload, done: Callable[[PushReply | None], None]) -> None:
        if self.mute and header.kind is PushKind.CONTRIBUTION:
            done(None)
        else:
            fragment = -1 if header.kind is PushKind.INNER else header.fragment
            Call(self, header.size, fragment).push(header, payload, done)

    @property
    def inline_bytes_max(self) -> int:
        return INLINE_BYTES_MAX if self.world.scenario.inline and not self.mute else 0

    def fetch(self, request: FetchRequest, done: Callable[[FetchAnswer], None]) -> None:
        def came(result: tuple[int, Payload, int] | str | None) -> None:
            done(FetchedPayload(*result) if isinstance(result, tuple) else result)

        fragment = -1 if request.kind is FetchKind.INNER else request.fragment
        Call(self, 100, fragment).fetch(request, came)

    def note(self, note: fx.Note) -> None:
        self.world.note(self.instance, note)

    def stopped(self, effect: fx.Stopped) -> None:
        self._close_wanted = self._close_wanted or effect.reason

    def fail(self, code: str, detail: str) -> None:
        self._end(f"refused: {code}")

    def let_go(self) -> None:
        self._end("left")

    # ------------------------------------------------------------ what the driver asks for: arrays

    @property
    def arrays(self) -> LearnerPayloads:
        assert self.payloads is not None
        return self.payloads

    def adopted(self, effect: fx.Adopt, checksum: int) -> None:
        self.world.observe(facts.Adopted(self.name, self.instance, effect.fragment, effect.version, checksum))

    def went_back(self, fragment: int) -> None:
        for index in range(len(self.machine.bases)) if fragment < 0 else (fragment,):
            self.world.observe(facts.WentBack(self.name, self.instance, index))

    def contribute(self, effect: fx.Contribute, done: Callable[[OutgoingPayload | str], None]) -> None:
        self.arrays.start_sending(effect)
        self.later(self.spec.encode_ns, self._encode, effect.header, done)

    def _encode(self, header: PushHeader, done: Callable[[OutgoingPayload | str], None]) -> None:
        if self.driver.pushes.is_open(header.fragment, header.seq):
            made = self.arrays.encode(header.fragment, header.seq, self.poison)
            done("not finite" if made is None else made)

    def prepare_whole(self, fragment: int, came: FetchedPayload, done: Callable[[PreparedVersion | str], None]) -> None:
        done(self.arrays.prepare_whole(fragment, came))

    def prepare_update(self, wanted: fx.Fetch, payload: Payload, done: Callable[[PreparedVersion | str], None]) -> None:
        try:
            made = self.arrays.prepare_update(wanted, payload)
        except PayloadError as error:
            done(str(error))
        else:
            done(made)

    def read_seed(self, fragment: int, done: Callable[[OutgoingPayload], None]) -> None:
        done(OutgoingPayload(self.arrays.seed(fragment), self.world.whole_bytes, 0))

    def read_held(self, fragment: int, version: int, done: Callable[[OutgoingPayload | None], None]) -> None:
        held = self.arrays.held(fragment, version)
        done(None if held is None else OutgoingPayload(held[0], self.world.whole_bytes, held[1]))

    def copy_inner(self, done: Callable[[Sequence[OutgoingPayload]], None]) -> None:
        self.later(MS, done, [OutgoingPayload(None, INNER_BYTES, 1)])

    def inner_came(self, pieces: Sequence[Payload], peer: str, reason: str) -> None:
        self._inner_until_ns = -1
