"""The one interpreter of a learner's effects, for every world: production, simulator, lab, fleet and tests.

It owns the LearnerMachine and the small machines that move bytes for it, and asks its host for what only a world can
do (`learner_host`). It is as pure as they are: no clock, thread, IO or array.

    training thread --Stepped, Boundary, Closing--> handle
    link            --messages, its end-->          heard, link_down
    host            --results-->                    the `done` that came with the call
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from atoll.core import effects as fx
from atoll.core.learner_fetches import VersionFetches
from atoll.core.learner_gifts import LearnerGifts
from atoll.core.learner_host import LearnerDriverHost, LinkState
from atoll.core.learner_inner import InnerTransfer
from atoll.core.learner_machine import LearnerMachine
from atoll.core.learner_pushes import ContributionPushes
from atoll.core.learner_waits import HEARTBEAT_NS
from atoll.core.messages import InlineReply, Published, SyncerMessage, Welcome


class LearnerDriver:
    """Order matters here and nowhere else: a world that performed effects by itself would drift from the others."""

    def __init__(self, machine: LearnerMachine, host: LearnerDriverHost) -> None:
        self.machine = machine
        self.link = LinkState()
        self.left = False
        """Everything was handed over and the goodbye is said; the syncer may not have let go yet."""
        self.watch: Callable[[fx.LearnerInput], None] | None = None
        """Told of every input before the machine."""
        self._host = host
        self.pushes = ContributionPushes(machine, host, self.link, self._feed)
        self.fetches = VersionFetches(machine, host, self.handle)
        self._gifts = LearnerGifts(machine, host, self.link)
        self._inner = InnerTransfer(machine, host)

    def start(self) -> None:
        self._host.later(HEARTBEAT_NS, self._beat)

    def _beat(self) -> None:
        message = self.machine.heartbeat()
        if message is not None:
            self._host.send(message)
        self._host.later(HEARTBEAT_NS, self._beat)

    # ------------------------------------------------------------ in

    def handle(self, event: fx.LearnerInput) -> None:
        """Feed the machine and do what it says, in its order."""
        if self.watch is not None:
            self.watch(event)
        for effect in self.machine.handle(event, self._host.now_ns()):
            self._perform(effect)

    def _feed(self, event: fx.LearnerInput) -> None:
        """Something happened in the background."""
        self.handle(event)
        self._host.news()

    def heard(self, message: SyncerMessage) -> None:
        if isinstance(message, Published):
            self.fetches.keep_update(message)
        elif isinstance(message, InlineReply):
            self.pushes.received(message)
            return
        elif isinstance(message, Welcome):
            self.link.up, self.link.session = True, self.link.session + 1
        self._feed(fx.FromSyncer(message))

    def link_down(self, reason: str, *, let_go: bool) -> None:
        """The session is over. `let_go`: the syncer ended it, in order."""
        self.link.up = False
        if self.left and let_go:
            self._host.let_go()
            return
        if self.left:
            self.left = False  # the link broke before that: hand over again what the syncer does not have
            self.machine.leave_again()
        self._feed(fx.LinkDown(reason))
        self.fetches.link_down()
        self.pushes.link_down()

    # ------------------------------------------------------------ out

    def _perform(self, effect: fx.LearnerEffect) -> None:
        host = self._host
        match effect:
            case fx.ToSyncer():
                host.send(effect.message)
            case fx.Note():
                host.note(effect)
            case fx.TakeSnapshot():
                host.arrays.take(effect.fragment)
            case fx.DropSnapshot():
                host.arrays.drop(effect.fragment)
            case fx.Adopt():
                host.adopted(effect, host.arrays.adopt(effect))
                self.fetches.adopted(effect.fragment, effect.version)
            case fx.Contribute():
                self.pushes.contribute(effect)
            case fx.PushAgain():
                host.later(0, self.pushes.push, (effect.fragment, effect.seq))
            case fx.Settle():
                self.pushes.settle(effect.fragment, effect.seq)
                host.arrays.settle(effect.fragment, effect.seq, effect.merged)
            case fx.Fetch():
                host.later(0, self.fetches.begin, effect)
            case fx.PushSeed():
                host.later(0, self._gifts.seed)
            case fx.GiveHeal():
                host.later(0, self._gifts.heal, effect)
            case fx.GiveInner():
                self._inner.give(effect.slot)
            case fx.TakeInner():
                self._inner.take(effect)
            case fx.ForgetResiduals():
                host.arrays.forget_residuals()
                host.reseeded()
            case fx.ForgetPrepared():
                host.arrays.forget_prepared(effect.fragment)
                if effect.went_back:
                    host.went_back(effect.fragment)
            case fx.Stopped():
                host.stopped(effect)
            case fx.Left():
                self.left = True
            case fx.Joined():
                pass  # `machine.joined` says so to whoever waits for it
            case _:
                assert_never(effect)
