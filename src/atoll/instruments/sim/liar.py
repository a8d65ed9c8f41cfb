"""A learner that lies: the machine, driver and host of every other, and a layer that falsifies what goes out.

It trains, answers and adopts as the others do, apart from the lies (`lies`) that the scenario has it tell at the
moment. The ids that it makes up, or takes from others, are phantoms: no learner is behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from atoll.core import (
    NO_VERSION,
    PROTOCOL_VERSION,
    ContributionId,
    DataLeases,
    DataReport,
    FetchKind,
    FetchRequest,
    Heal,
    Hello,
    InlinePush,
    LearnerMessage,
    Leave,
    OutgoingPayload,
    Payload,
    Progress,
    PushHeader,
    PushKind,
    PushReply,
    Ready,
    Refused,
    Start,
    Welcome,
    messages,
)
from atoll.instruments.chaos import LIES, NUMBERS_APART, VALUES, falsified, renumbered
from atoll.instruments.sim.calls import Call
from atoll.instruments.sim.connection import Connection
from atoll.instruments.sim.data_reader import STREAM
from atoll.instruments.sim.learner_host import LearnerHost
from atoll.instruments.sim.process import Process

if TYPE_CHECKING:
    from atoll.instruments.sim.scenario import SimFault
    from atoll.instruments.sim.world import World

MISCHIEF_NS = 500_000_000
"""How often the liar does what it was not asked for."""
CROWD_MAX = 60
"""Ids that one liar makes up: ten times as many as there are honest learners."""
KEEPS_WORD = 10.0
"""Bolder lies are kept up: what was claimed is given. Others are not: whoever asked may wait."""
CHURN_NS = 2_000_000_000


class LyingLearner(LearnerHost):
    @property
    def lies(self) -> dict[str, float]:
        """Those that are told now, and how bold each is."""
        return {fault.variant: fault.amount for fault in self.world.lies}

    def start(self) -> None:
        super().start()
        if not self.dead:
            self._serial, self.reader = 0, None
            self._mischief()

    def lie_begins(self, lie: SimFault) -> None:
        if LIES[lie.variant].says_hello and self.connection is not None:
            self.connection.cut()  # to say hello again

    # ------------------------------------------------------------ what goes out

    def hello(self) -> Hello:
        hello, lies = self.machine.hello(), self.lies
        syncer = self.world.reachable()
        if syncer is not None and any(LIES[name].says_hello for name in lies):
            hello = replace(hello, run=hello.run or syncer.machine.run)  # it has been in the run before, it says
        if self.payloads is not None and {"versions", "checksums"} & lies.keys():
            hello = replace(hello, checksums=tuple(self._forged(p).checksum for p in range(len(hello.bases))))
        return falsified(hello, lies)  # type: ignore[no-any-return]

    def send(self, message: LearnerMessage) -> None:
        told = falsified(message, self.lies)
        if told is None:
            return
        super().send(told)
        if isinstance(told, InlinePush) and told.header.kind is PushKind.CONTRIBUTION:
            for header in self._also(told.header):
                super().send(InlinePush(header, told.payload))

    def push(self, header: PushHeader, payload: Payload, done: Callable[[PushReply | None], None]) -> None:
        told = falsified(header, self.lies)
        if told is None:
            done(None)
            return
        super().push(told, payload, done)
        if told.kind is PushKind.CONTRIBUTION:
            for also in self._also(told):
                super().push(also, payload, lambda reply: None)

    def _encode(self, header: PushHeader, done: Callable[[OutgoingPayload | str], None]) -> None:
        for seq in (header.seq, *(also.seq for also in self._also(header))):
            identity = ContributionId(self.name, header.generation, header.fragment, seq)
            self.world.steps_true[identity] = header.steps
        self.poison = next((name for name in self.lies if name in VALUES), "")
        super()._encode(header, done)

    def _also(self, header: PushHeader) -> list[PushHeader]:
        """The same bytes again: under other numbers, in another's name."""
        lies, more = self.lies, []
        if "numbers" in lies:
            more += renumbered(header)
        if "names" in lies:
            for victim, generation in self._others():
                more.append(replace(header, learner=victim, generation=generation, seq=header.seq + NUMBERS_APART))
        return more

    def _others(self) -> list[tuple[str, int]]:
        """The honest ones, and the generations that they have: small numbers, easily guessed."""
        hosts = [host for name, host in self.world.learners.items() if name != self.name and not host.dead]
        return [(host.name, host.machine.generation) for host in hosts]

    # ------------------------------------------------------------ what comes in

    def on_message(self, connection: Connection, message: Any) -> None:
        if isinstance(message, Heal) and {"versions", "checksums"} & self.lies.keys():
            for fragment in message.fragments if max(self.lies.values()) > KEEPS_WORD else ():
                self._give_forged(fragment)
        elif not isinstance(message, DataLeases):
            super().on_message(connection, message)

    def _forged(self, fragment: int) -> OutgoingPayload:
        forged = self.arrays.forged(fragment)
        self.world.forged.add(forged.checksum)
        return forged

    def _give_forged(self, fragment: int) -> None:
        """What was asked for, as claimed: bytes that fit their checksum, of a version that was never made."""
        claimed, forged = self.hello().bases[fragment], self._forged(fragment)
        who = (self.name, self.machine.generation)
        healed = messages.HealedVersion(*who, fragment, claimed, forged.size, forged.checksum, self.machine.secret)
        Call(self, forged.size).push(healed.header(), forged.payload, lambda reply: None)

    # ------------------------------------------------------------ what nobody asked for

    def _mischief(self) -> None:
        lies = self.lies
        if self.connection is not None and self.machine.joined:
            if "chunks" in lies:
                self._claim_chunks()
            if "names" in lies:
                self._fetch_for_others()
            if self.world.now_ns % CHURN_NS < MISCHIEF_NS and {"churn", "words"} & lies.keys():
                self.send(Leave("until soon"))
        if self.world.finishing:
            return
        if "ids" in lies:
            for victim, _ in self._others()[:1]:
                self.world.add_phantom(victim)
        if len(self.world.phantoms) < min(lies.get("crowd", 0.0), CROWD_MAX):
            self.world.add_phantom(f"crowd-{len(self.world.phantoms)}")
        self.later(MISCHIEF_NS, self._mischief)

    def _claim_chunks(self) -> None:
        self._serial += 1
        here = len(self.world.finished)  # about where the others are
        self.send(DataReport(STREAM, self._serial, 0, 1, (here,)))

    def _fetch_for_others(self) -> None:
        for victim, generation in self._others():
            request = FetchRequest(FetchKind.THETA, victim, generation, 0, NO_VERSION)
            Call(self, 100).fetch(request, lambda found: None)


class Phantom(Process):
    """An id without a learner: it says hello and ready, reports steps while the liar's crowd is out, and answers
    nothing."""

    def __init__(self, world: World, liar: LearnerHost, name: str, instance: str) -> None:
        super().__init__(world)
        self.name, self.key = name, liar.key
        self.instance = instance
        self.link = liar.link
        self.dice = Random(instance)
        self.calls: dict[Call, None] = {}
        self.connection: Connection | None = None
        self._step = 0
        self._bases: tuple[int, ...] = ()
        self._steps = 0

    def connected(self, connection: Connection) -> None:
        self.connection = connection
        connection.to_syncer_hello(Hello(self.name, self.instance, PROTOCOL_VERSION, self.world.tensors))

    def not_connected(self) -> None:
        self.dead = True

    def on_message(self, connection: Connection, message: Any) -> None:
        if isinstance(message, Welcome) and message.seed:
            self.vanish()  # it has no parameters to give
        elif isinstance(message, Refused):
            self.vanish()
        elif isinstance(message, Start):
            self._step, self._bases = message.step, tuple(state.version for state in message.fragments)
            connection.to_syncer(Ready(self._step, self._bases))
            self._report()

    def _report(self) -> None:
        if self.connection is not None and self._bases:
            self._steps += 1
            steps = self._steps
            self.connection.to_syncer(Progress(self._step + steps, steps, steps, MISCHIEF_NS, 1.0, self._bases))
            self.later(MISCHIEF_NS, self._report)

    def on_down(self, connection: Connection, reason: str) -> None:
        self.connection, self.dead = None, True

    def vanish(self) -> None:
        if self.connection is not None and not self.dead:
            self.connection.closed_by_learner()
        self.dead = True
