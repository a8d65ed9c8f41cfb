"""How the syncer begins: with a newcomer's parameters, or with the run that learners hold and it has lost.

`SyncerMachine` builds on this; the rules are in `beginning`. A learner that must wait, or that would bring a second
history into the run, is refused for the time being: it trains on with what it holds and says hello again.
"""

from __future__ import annotations

from abc import abstractmethod

from atoll.core import durable
from atoll.core.beginning import EPOCHS_SKIPPED, SAID_MAX, Begin, Beginning, can_give, holds_run
from atoll.core.config import SECOND_NS, SyncConfig
from atoll.core.effects import EndSession, Forget, ForgetRelay, Note, SyncerEffect, ToLearner
from atoll.core.healing import Healing
from atoll.core.layout import build_layout
from atoll.core.leases import LeaseBook
from atoll.core.ledger import Ledger
from atoll.core.membership import Member, Membership, MemberState
from atoll.core.messages import NO_VERSION, Hello, Ready, Refusal, Refused, Reseed, Welcome
from atoll.core.policy import first_due_step
from atoll.core.relays import Relays
from atoll.core.round_book import RoundBook
from atoll.core.syncer_care import SyncerCare
from atoll.errors import LayoutError

SEED_PATIENCE_NS = 20 * SECOND_NS
"""How long the first learner may take to give its parameters while others wait: 100 MB at 40 Mbit/s."""
FROM_LEARNERS = "learners"
"""Where a run came back from whose state was lost: the rung of the ladder below slots and snapshots."""


class SyncerBegin(SyncerCare):
    def __init__(self, config: SyncConfig, run: str, epoch: int = 1, begin: Begin | None = None) -> None:
        super().__init__(config, run, epoch)
        self._beginning = Beginning(begin or Begin())
        self.waits = ""
        """What the operator should know while the run cannot begin or a learner cannot be taken in."""
        self.stopping = ""
        self._seeder = ""
        self._seeds: set[int] = set()
        self._hellos: dict[str, Hello] = {}
        """Of learners that wait for the run to begin, or to go on after a restart."""
        self._committing = False
        self._rooted = False
        """True if this run is more than a newcomer's seed: it was continued, or began by the operator's word."""
        self._holders: set[str] = set()
        """Of a run that comes back from learners: those that were in it, until the first of them says at which step."""
        self._given_up: set[str] = set()
        """Runs that began here with a newcomer's seed and gave way to one that a learner held."""
        self._said: set[str] = set()
        self._seed_ns = -1
        """Since when the first parameters are awaited from this seeder; -1: they are not."""
        self._seed_patience_ns = SEED_PATIENCE_NS

    @abstractmethod
    def _welcome(self, member: Member, seed: bool) -> Welcome:
        """What this learner is welcomed with."""

    # ------------------------------------------------------------ who may begin

    @property
    def _begun(self) -> bool:
        return self.committed or self._committing or self.healing is not None or bool(self._seeder)

    @property
    def _young(self) -> bool:
        """Nothing was merged into what a newcomer gave, so that nothing is lost if it is given up."""
        if self._rooted or self._committing or self.healing is not None or self.recovered_from:
            return False
        return all(track.version <= 0 and not track.merging for track in self.book.tracks)

    def _gives_way(self, hello: Hello) -> bool:
        """True if what this learner holds is worth more than what is here."""
        if self._beginning.begin.new_run or not holds_run(hello):
            return False
        return self._young and (hello.run != self.run or not self._begun)

    def _meet(self, hello: Hello, now_ns: int, out: list[SyncerEffect]) -> Refused | None:
        """A learner says which run it was in, if any: may it begin this one, or join it?"""
        if self._gives_way(hello):
            if can_give(hello):
                return self._take_run(hello, out)
            if self._begun:
                self._drop_run(out)
                self.run = f"{self.run}-again"
        elif self._is_stranger(hello):
            return self._wait(self._two_histories(hello))
        why = "" if self._begun else self._beginning.why_wait(hello, now_ns, self.config)
        return self._wait(why) if why else None

    def _wait(self, why: str) -> Refused:
        self.waits = why
        return Refused(Refusal.BUSY, why)

    def _is_stranger(self, hello: Hello) -> bool:
        begin = self._beginning.begin
        if not self._begun or not holds_run(hello) or hello.run == self.run or hello.run in self._given_up:
            return False
        return not begin.new_run and not begin.takes_strangers

    def _two_histories(self, hello: Hello) -> str:
        versions = [track.version for track in self.book.tracks]
        return (
            f"learner {hello.learner!r} holds run {hello.run} (versions {min(hello.bases)} to {max(hello.bases)}) and "
            f"this syncer has run {self.run} (versions {min(versions)} to {max(versions)}): two histories. The learner "
            "trains on alone and keeps what it holds. To go on with its run, stop this syncer and start one with an "
            "empty --run-folder and without these --snapshots; to give its run up, restart the learner, or the syncer "
            "with --new-run"
        )

    def _is_news(self, text: str) -> bool:
        """True the first time that something is said: whoever is refused comes back every few seconds."""
        if text in self._said or len(self._said) >= SAID_MAX:
            return False
        self._said.add(text)
        return True

    # ------------------------------------------------------------ a run that learners hold

    def _take_run(self, hello: Hello, out: list[SyncerEffect]) -> Refused | None:
        """Go on with the run that this learner holds: its name, its version numbers, and what it and others bring."""
        fragments = len(hello.bases)
        try:
            layout = build_layout(hello.tensors, fragments)
        except LayoutError as error:
            return Refused(Refusal.LAYOUT, str(error))
        self._drop_run(out)
        asked = self._given.fragments
        self.run, self.epoch = hello.run, max(self.epoch, hello.epoch + EPOCHS_SKIPPED)
        self._lay_out(layout)
        self.membership.generations_skipped = durable.GENERATIONS_SKIPPED * (self.epoch - 1)
        self.healing = Healing([NO_VERSION] * fragments, {}, set(), strangers=True)
        self.recovered_from = FROM_LEARNERS
        self._remember_run(seeded=False)  # a restart before everything is here asks the learners again
        self._remember(durable.EPOCH_KEY, self.epoch)
        text = (
            f"this syncer has no state and learner {hello.learner!r} holds run {hello.run}: it goes on from what "
            "learners hold. Outer momentum, data leases and the ledger of learners that are gone are lost"
        )
        if asked not in (0, fragments):
            text += f"; it has {fragments} fragments, so that --fragments {asked} does not count"
        out.append(Note("Warned", {"source": "syncer", "text": text}))
        self.waits = ""
        return None

    def _drop_run(self, out: list[SyncerEffect]) -> None:
        """Give up what a newcomer began. Everybody says hello again, to whichever run there is then."""
        detail = "a learner holds an earlier run, which goes on instead of the one that had begun; say hello again"
        for member in self.membership.connected():
            out += [ToLearner(member.session, Refused(Refusal.BUSY, detail)), EndSession(member.session, detail)]
        for track in self.book.tracks:
            rounds = track.round.contributions if track.round is not None else {}
            out += [Forget(identity) for identity in sorted({*track.held, *rounds})]
        out += [ForgetRelay(slot) for slot in sorted(self.relays.open)]
        for learner in self.membership.members:
            self._remember(durable.member_key(learner), None)
        for key in self._lease_rows:
            self._remember(key, None)
        if self.membership.members:
            self._given_up.add(self.run)
        self.committed, self._seeder, self._seeds, self._hellos = False, "", set(), {}
        self.membership, self.leases, self.relays, self._lease_rows = Membership(), LeaseBook(), Relays(), {}
        self.layout, self.config, self.ledger = None, self._given, Ledger(())
        self.book = RoundBook(self.config, self.membership, self.ledger)

    def _go_on(self, out: list[SyncerEffect]) -> None:
        if self.recovered_from != FROM_LEARNERS:
            super()._go_on(out)
            return
        self._remember_run(seeded=True)
        versions = [track.version for track in self.book.tracks]
        fields = {"source": FROM_LEARNERS, "exact": False, "versions": versions, "tokens_merged": 0, "load_ns": 0}
        out.append(Note("SyncerRecovered", {**fields, "problems": ["no state was left but what learners hold"]}))
        connected = self.membership.connected()
        self._holders = {member.learner for member in connected if member.recovered}
        for member in connected:
            if member.recovered or not self._holders:
                self._begin_with(member, out)

    def _must_wait_for_clock(self, member: Member) -> bool:
        """A newcomer starts at the run's step, which only those that were in the run can tell."""
        return bool(self._holders) and not member.recovered

    def _hear_clock(self, message: Ready, out: list[SyncerEffect]) -> None:
        """The first of them is ready: the run is at its step, and fragments fall due from there on."""
        step = max(message.step, self.book.clock_last)
        self.book.clock_last = step
        for track in self.book.tracks:
            # Those who wait in a synchronous run have reached a step that the lost record knew: ask them now.
            track.due_step = step + (0 if self.config.synchronous else first_due_step(self.config, track.index))
        self._begin_waiting(out)

    def _holder_gone(self, learner: str, out: list[SyncerEffect]) -> None:
        if learner in self._holders:
            self._holders.discard(learner)
            if not self._holders and self.committed:
                self._begin_waiting(out)

    def _begin_waiting(self, out: list[SyncerEffect]) -> None:
        self._holders = set()
        for member in self.membership.connected():
            if member.learner in self._hellos:
                self._begin_with(member, out)

    def _reseed_from(self, member: Member, hello: Hello, out: list[SyncerEffect]) -> None:
        """What a learner trained from a seed that was given up is progress of another model."""
        if hello.run in self._given_up and hello.bases:
            reason = f"run {hello.run} was given up for run {self.run}"
            out.append(ToLearner(member.session, Reseed(reason)))

    # ------------------------------------------------------------ a seed

    def _pass_seed_on(self, out: list[SyncerEffect]) -> None:
        """The learner that was to give the first parameters is gone, or too slow: ask another one that waits, and of
        those rather one that was in a run."""
        waiting = self._others_to_seed()
        self._seeder, self._seeds = "", set()
        if waiting:
            first = min(waiting, key=lambda m: not holds_run(self._hellos[m.learner]))
            self._seed_with(first)
            out.append(ToLearner(first.session, self._welcome(first, True)))

    def _watch_seed(self, now_ns: int, out: list[SyncerEffect]) -> None:
        """Whoever gives the run its first parameters may have the thinnest link of all. If others wait as well, another
        is asked after a while; each has twice the time of the one before, so that large models come through."""
        if not self._seeder or self.committed or self._committing:
            self._seed_ns = -1
            return
        self._seed_ns = now_ns if self._seed_ns < 0 else self._seed_ns
        if now_ns < self._seed_ns + self._seed_patience_ns or not self._others_to_seed():
            return
        slow, self._seed_patience_ns = self._seeder, 2 * self._seed_patience_ns
        self._pass_seed_on(out)
        text = f"the first parameters do not come from learner {slow!r} in time; learner {self._seeder!r} is asked"
        out.append(Note("Warned", {"source": "syncer", "text": text}))
        self._seed_ns = now_ns

    def _others_to_seed(self) -> list[Member]:
        waiting = [m for m in self.membership.connected() if m.state is MemberState.JOINING]
        return [m for m in waiting if m.learner != self._seeder]

    def _seed_wake_ns(self) -> int | None:
        return self._seed_ns + self._seed_patience_ns if self._seed_ns >= 0 and self._others_to_seed() else None

    def _seed_with(self, member: Member) -> None:
        self._seeder = member.learner
        self._rooted = self._beginning.begin.new_run or holds_run(self._hellos[member.learner])
        self.waits = ""
