"""The training thread of each rank at a step boundary: all do the same between the same two steps.

While everybody trains, one word travels (`word`). At the next boundary it is heard, its orders are carried out, and the
next word is given. Where nobody steps (joining, a synchronous run's wait, leaving) words are given and heard one after
the other, until the speaker says that it goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from atoll.core import ASKED_TO_LEAVE, PREEMPTED, BoundaryOrders, Refusal
from atoll.core import effects as fx
from atoll.errors import (
    AtollError,
    ConfigError,
    FencedError,
    IslandError,
    RefusedError,
    UnreachableError,
)
from atoll.learner.doctor import Doctor
from atoll.learner.island.follower import FollowerShell
from atoll.learner.island.link import PendingWord, RankLink
from atoll.learner.island.speaker import SpeakerShell
from atoll.learner.island.word import BoundaryWord, Flag, Place, pack, unpack
from atoll.learner.joining import join
from atoll.learner.leave_deadline import LeaveDeadline
from atoll.learner.leaving import hand_over, run_closed
from atoll.learner.preempt import Preemption
from atoll.learner.seat import SingleSeat
from atoll.learner.view import RunView

NO_FLAG = Flag(0)
STAND_S = 0.05
"""The speaker gives a word that often while nobody steps, and at once when there is something to do."""
FAILURES: tuple[type[AtollError], ...] = (IslandError, UnreachableError, ConfigError, RefusedError, FencedError)


class WordCarrier:
    """Gives and hears words, and checks that all ranks are at the same place."""

    def __init__(self, link: RankLink, preemption: Preemption | None) -> None:
        self.link = link
        self._preemption = preemption
        self._pending: PendingWord | None = None
        self._place = Place.JOINING
        self.fragments = 0
        self.boundary = 0
        self.heard = BoundaryWord()
        self.copy_inner: Callable[[], None] = lambda: None
        """A joiner is to have this learner's inner state, as it is at this boundary."""

    @property
    def waiting(self) -> bool:
        """A word was given and not heard."""
        return self._pending is not None

    def give(self, place: Place, word: BoundaryWord) -> None:
        self._place = place
        word.place, word.boundary = int(place), self.boundary
        word.sigterms = int(self._preemption is not None and self._preemption.requested)
        self._pending = self.link.start(pack(word, self.fragments))

    def hear(self) -> BoundaryWord:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        word = unpack(pending.wait(), self.fragments)
        if (word.place, word.boundary) != (self.link.size * self._place, self.link.size * self.boundary):
            raise IslandError(
                f"the ranks of this learner do different things: rank {self.link.rank} is {self._place.name.lower()} "
                f"at boundary {self.boundary}, and others are not; call step, global_params and close as "
                "often on every rank"
            )
        self.heard = word
        if Flag.GIVE in word.flag:
            self.copy_inner()
        return word

    @property
    def told_to_leave(self) -> str:
        if self._preemption is None:
            return ""
        return PREEMPTED if self.heard.sigterms else ASKED_TO_LEAVE if Flag.DISMISSED in self.heard.flag else ""

    @property
    def done(self) -> bool:
        flag = self.heard.flag
        return Flag.DONE in flag and not (self._preemption is not None and Flag.DISMISSED in flag)


class SpeakerSeat(SingleSeat):
    """Rank 0."""

    _shell: SpeakerShell

    def __init__(self, shell: SpeakerShell, preemption: Preemption | None, link: RankLink) -> None:
        super().__init__(shell, preemption)
        self._words = WordCarrier(link, preemption)
        self._words.copy_inner = shell.work.copy_inner
        self.capture_due: Callable[[], bool] = lambda: False
        """Whether it is time for a checkpoint."""
        self._estimate = 0
        self._debt = 0
        """Tokens that were counted too few (or, below 0, too many) so far."""
        self._fresh_tokens = 0
        self._heals = 0

    # ------------------------------------------------------------ words

    def _word(self, tokens: int, flags: Flag) -> BoundaryWord:
        machine = self._machine
        over = bool(machine.stopped) or run_closed(self._shell.failure)
        flags |= (Flag.DONE if over else NO_FLAG) | (Flag.DISMISSED if machine.dismissed else NO_FLAG)
        flags |= Flag.GIVE if self._shell.is_asked_for_inner() else NO_FLAG
        flags |= (Flag.JOINED if machine.joined else NO_FLAG) | (Flag.LAID_OUT if self._shell.laid_out else NO_FLAG)
        word = BoundaryWord(tokens=tokens, flags=int(flags), step=machine.step, rank=machine.rank)
        word.generation, word.healed = machine.generation, self._heals
        failure = self._failure
        if failure is not None:
            word.failed, word.failure, word.text = 1, _kind(failure), _told(failure)
        return word

    @property
    def _failure(self) -> Exception | None:
        failure = self._shell.worker.failure or self._shell.failure
        return None if run_closed(failure) else failure

    def _hear(self) -> BoundaryWord:
        word = self._words.hear()
        if Flag.LAID_OUT in word.flag and not self._words.fragments:
            self._words.fragments = self._machine.config.fragments
        self._debt += word.tokens - self._estimate
        self._estimate = 0
        if word.failed:
            raise_for(word, self._failure)
        return word

    def _pass(self, event: fx.Stepped | fx.Boundary | None) -> None:
        """One boundary. Under the lock. What is posted from here on is for ranks that have it behind them."""
        self._words.boundary += 1
        self._shell.worker.passed(self._words.boundary)
        if Flag.GIVE in self._words.heard.flag:
            self._shell.pack_inner()
        if event is not None:
            self._shell.apply(event)
        self._shell.stage_wanted()

    def _stand(self) -> None:
        self._stand_at(Place.WAITING)

    def _stand_at(self, place: Place) -> None:
        """One word while nobody steps, and what it orders."""
        shell = self._shell
        with shell.changed:
            if not shell.fresh:
                shell.changed.wait(STAND_S)
            shell.fresh = False
            word = self._word(self._fresh_tokens, Flag.STAY)
            self._fresh_tokens = 0
            if self._words.fragments:
                shell.stage_wanted()
                word.orders = self._machine.fix_orders(shell.is_ready, standing=True)
        self._words.give(place, word)
        self._hear()
        with shell.changed:
            self._pass(fx.Boundary() if self._words.fragments else None)

    def _release(self, place: Place, flags: Flag = NO_FLAG, unhanded: int = 0) -> None:
        """The last word of a standstill: all ranks go on."""
        with self._shell.changed:
            word = self._word(self._fresh_tokens, flags)
            self._fresh_tokens, word.unhanded = 0, unhanded
        self._words.give(place, word)
        self._hear()
        with self._shell.changed:
            self._pass(None)

    # ------------------------------------------------------------ joining

    def join(self, doctor: Doctor | None, address: str, timeout_s: float) -> None:
        try:
            join(self._shell, doctor, address, timeout_s, lambda: self._stand_at(Place.JOINING))
        except AtollError as error:
            self._tell_failure(Place.JOINING, error)
            raise
        self._release(Place.JOINING)
        self._shell.standing = self._machine.config.synchronous
        self._give_ahead(0)

    def _tell_failure(self, place: Place, error: AtollError) -> None:
        """The others wait for a word: they shall know why there will be no other."""
        if isinstance(error, IslandError) or self._words.waiting:
            return  # they have heard it, or cannot
        word = self._word(0, NO_FLAG)
        word.failed, word.failure, word.text = 1, _kind(error), str(error)
        try:
            self._words.give(place, word)
            self._words.hear()
        except IslandError:
            return

    def _give_ahead(self, tokens: int) -> None:
        """The word that is heard at the next boundary. A synchronous run has none under way while it trains."""
        if self._machine.config.synchronous:
            return
        with self._shell.changed:
            self._shell.stage_wanted()
            word = self._word(tokens, Flag.CAPTURE if self.capture_due() else NO_FLAG)
            word.orders = self._machine.fix_orders(self._shell.is_ready, standing=False)
        self._words.give(Place.STEPPED, word)

    # ------------------------------------------------------------ training

    def step(self, tokens: int, step_ns: int, loss: float) -> tuple[int, int]:
        if self._words.waiting:
            self._hear()
        counted = self._count(tokens)
        shell = self._shell
        with shell.changed:
            stepped = fx.Stepped(counted, step_ns, loss)
            if self._machine.config.synchronous:
                shell.apply(stepped)
            else:
                self._pass(stepped)
            if shell.healing and not self._machine.reseeding:
                self._heals += 1
        if not self._machine.config.synchronous:
            self._give_ahead(tokens)
            return counted, 0
        self._fresh_tokens = tokens
        stall_ns = self._wait_if_synchronous(self._stand)
        self._release(Place.WAITING, Flag.CAPTURE if self.capture_due() else NO_FLAG)
        return counted, stall_ns

    def _count(self, tokens: int) -> int:
        """The tokens of all ranks are known one step late: until then all have as many as this one."""
        self._estimate = tokens * self._words.link.size
        counted = self._estimate + self._debt
        self._debt = min(0, counted - 1)
        return max(1, counted)

    # ------------------------------------------------------------ leaving

    def hand_over(self, address: str, deadline: LeaveDeadline, *, flush: bool, reason: str) -> tuple[int, str]:
        shell = self._shell
        if not flush:  # something went wrong here: the others do not come along
            return hand_over(shell, address, self._stand_alone, deadline, flush=False, reason=reason)
        shell.standing = True
        if self._words.waiting:
            self._hear()
            with shell.changed:
                self._pass(fx.Boundary())
        with shell.changed:
            self._machine.correct_tokens(self._debt)
        tokens, why = hand_over(
            shell,
            address,
            lambda: self._stand_at(Place.LEAVING),
            deadline,
            told=lambda: self._words.heard.sigterms > 0,
            flush=True,
            reason=reason,
        )
        self._release(Place.LEAVING, Flag.OVER, tokens)
        return tokens, why

    def _stand_alone(self) -> None:
        with self._shell.changed:
            self._shell.changed.wait(STAND_S)

    def raise_failure(self) -> None:
        """What ends this learner ends all of its ranks at the same boundary: `_hear` raises it."""

    @property
    def done(self) -> bool:
        return self._words.done

    @property
    def told_to_leave(self) -> str:
        return self._words.told_to_leave

    @property
    def capture_now(self) -> bool | None:
        return Flag.CAPTURE in self._words.heard.flag


class FollowerSeat:
    """Every other rank."""

    def __init__(self, shell: FollowerShell, view: RunView, preemption: Preemption | None, link: RankLink) -> None:
        self._shell = shell
        self._view = view
        self._words = WordCarrier(link, preemption)
        self._words.copy_inner = shell.work.copy_inner
        self._heals = 0

    def _give(self, place: Place, tokens: int) -> None:
        failure = self._shell.failure
        word = BoundaryWord(tokens=tokens)
        if failure is not None:
            word.failed, word.failed_rank = 1, self._words.link.rank
            print(f"atoll: rank {self._words.link.rank} cannot go on: {failure}", file=sys.stderr, flush=True)
        self._words.give(place, word)

    def _hear(self) -> BoundaryWord:
        """And do what it says."""
        word = self._words.hear()
        if word.failed:
            raise_for(word, self._shell.failure)
        if Flag.LAID_OUT in word.flag and not self._words.fragments:
            self._words.fragments = len(self._shell.arrays.layout.fragments)
        self._words.boundary += 1
        self._carry_out(word.orders)
        self._shell.passed(self._words.boundary)
        if self._words.fragments:
            self._view.config = self._shell.config()
            self._view.bases = self._shell.bases()
        self._view.hear(word)
        self._view.joined = Flag.JOINED in word.flag
        if word.healed > self._heals:
            self._heals, self._shell.healing = word.healed, True
        return word

    def _carry_out(self, orders: BoundaryOrders) -> None:
        if not orders:
            return
        arrays = self._shell.arrays
        for fragment in orders.given:
            arrays.take(fragment, self._words.boundary)
        for effect in orders.adopts:
            arrays.adopt(effect)
        for fragment in orders.takes:
            arrays.take(fragment, self._words.boundary)

    def _follow(self, place: Place, tokens: int = 0) -> int:
        """Words until the speaker goes on; returns the nanoseconds that took."""
        began_ns = time.perf_counter_ns()
        self._give(place, tokens)
        while Flag.STAY in self._hear().flag:
            self._give(place, 0)
        return time.perf_counter_ns() - began_ns

    def join(self, doctor: Doctor | None, address: str, timeout_s: float) -> None:
        self._follow(Place.JOINING)
        if not self._view.config.synchronous:
            self._give(Place.STEPPED, 0)

    def step(self, tokens: int, step_ns: int, loss: float) -> tuple[int, int]:
        self._view.stepped(tokens, step_ns)
        if self._view.config.synchronous:
            return tokens, self._follow(Place.WAITING, tokens)
        self._hear()
        self._view.step += 1  # the word is of the boundary before this one
        self._give(Place.STEPPED, tokens)
        return tokens, 0

    def hand_over(self, address: str, deadline: LeaveDeadline, *, flush: bool, reason: str) -> tuple[int, str]:
        if not flush:
            return 0, ""
        if self._words.waiting:
            self._hear()
        self._follow(Place.LEAVING)
        self._shell.left_in_order = True
        return self._words.heard.unhanded, ""

    def raise_failure(self) -> None:
        """`_hear` raises it, on all ranks."""

    @property
    def done(self) -> bool:
        return self._words.done

    @property
    def told_to_leave(self) -> str:
        return self._words.told_to_leave

    @property
    def capture_now(self) -> bool | None:
        return Flag.CAPTURE in self._words.heard.flag


def _kind(error: Exception) -> int:
    if isinstance(error, RefusedError) and error.code == Refusal.FENCED:
        return FAILURES.index(FencedError)
    return next((index for index, kind in enumerate(FAILURES) if type(error) is kind), 0)


def _told(error: Exception) -> str:
    """For the other ranks. Atoll's own errors say all that one needs."""
    if isinstance(error, AtollError):
        return str(error)
    what = f"{type(error).__name__}: {error}"[:200]
    return f"rank 0 of this learner cannot go on ({what}), and so no rank can; see its log, and start all ranks again"


def raise_for(word: BoundaryWord, own: Exception | None) -> None:
    """All ranks end here, each with what it knows."""
    if own is not None:
        if isinstance(own, RefusedError) and own.code == Refusal.FENCED:
            raise FencedError(own.code, own.detail)
        raise own
    if word.text:
        kind = FAILURES[word.failure]
        if issubclass(kind, RefusedError):
            code = Refusal.FENCED if kind is FencedError else Refusal.CLOSED
            raise kind(str(code), word.text)
        raise kind(word.text)
    who = f"rank {word.failed_rank}" if word.failed == 1 else f"{word.failed} ranks"
    raise IslandError(f"{who} of this learner cannot go on, and so no rank can; see its log, and start all ranks again")
