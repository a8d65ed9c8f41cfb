"""Which run this syncer goes on with: its own, one that a newcomer begins, or one that learners hold and it has lost.

The rules of who may begin are in `beginning`. A learner that must wait, or that would bring a second history into the
run, is refused for the time being: it trains on with what it holds and says hello again.
"""

from __future__ import annotations

from atoll.core import durable
from atoll.core.beginning import EPOCHS_SKIPPED, Beginning, can_give, holds_run
from atoll.core.effects import EndSession, Forget, SyncerEffect, ToLearner
from atoll.core.inner_handoff import InnerHandoff
from atoll.core.layout import build_layout
from atoll.core.membership import Member
from atoll.core.messages import Hello, Refusal, Refused, Reseed
from atoll.core.seed_intake import SeedIntake
from atoll.core.syncer_recovery import SyncerRecovery
from atoll.core.syncer_state import SyncerState, warned
from atoll.errors import LayoutError


class RunSelection:
    """Nothing may begin anew where somebody still holds the run: that would be two histories under one name."""

    def __init__(
        self,
        state: SyncerState,
        beginning: Beginning,
        *,
        recovery: SyncerRecovery,
        seeding: SeedIntake,
        handoff: InnerHandoff,
    ) -> None:
        self._state = state
        self._beginning = beginning
        self._recovery = recovery
        self._seeding = seeding
        self._handoff = handoff
        self._given_up: set[str] = set()
        """Runs that began here with a newcomer's seed and gave way to one that a learner held."""

    @property
    def begun(self) -> bool:
        return not self.fresh or bool(self._seeding.seeder)

    @property
    def fresh(self) -> bool:
        """Nobody's parameters are here, or on their way from disk or from those who held them."""
        return not self._state.committed and not self._seeding.committing and self._recovery.healing is None

    @property
    def has_past(self) -> bool:
        """True if learners may know more of this run than this syncer: it came back, or goes on from another one."""
        return bool(self._recovery.source) or self._seeding.rooted

    @property
    def _young(self) -> bool:
        """Nothing was merged into what a newcomer gave, so that nothing is lost if it is given up."""
        seeding, recovery = self._seeding, self._recovery
        if seeding.rooted or seeding.committing or recovery.healing is not None or recovery.source:
            return False
        return all(track.version <= 0 and not track.merging for track in self._state.book.tracks)

    def gives_way(self, hello: Hello) -> bool:
        """True if what this learner holds is worth more than what is here."""
        if self._beginning.begin.new_run or not holds_run(hello):
            return False
        return self._young and (hello.run != self._state.run or not self.begun)

    def meet(self, hello: Hello, now_ns: int, out: list[SyncerEffect]) -> Refused | None:
        """A learner says which run it was in, if any: may it begin this one, or join it?"""
        if self.gives_way(hello):
            if can_give(hello):
                return self._take_run(hello, out)
            if self.begun:
                self._drop_run(out)
                self._state.run = f"{self._state.run}-again"
        elif self._is_stranger(hello):
            return self._wait(self._two_histories(hello))
        why = "" if self.begun else self._beginning.why_wait(hello, now_ns, self._state.config)
        return self._wait(why) if why else None

    def _wait(self, why: str) -> Refused:
        self._beginning.waits = why
        return Refused(Refusal.BUSY, why)

    def _is_stranger(self, hello: Hello) -> bool:
        begin = self._beginning.begin
        if not self.begun or not holds_run(hello) or hello.run == self._state.run or hello.run in self._given_up:
            return False
        return not begin.new_run and not begin.takes_strangers

    def _two_histories(self, hello: Hello) -> str:
        versions = [track.version for track in self._state.book.tracks]
        return (
            f"learner {hello.learner!r} holds run {hello.run} (versions {min(hello.bases)} to {max(hello.bases)}) and "
            f"this syncer has run {self._state.run} (versions {min(versions)} to {max(versions)}): two histories. The "
            "learner trains on alone and keeps what it holds. To go on with its run, stop this syncer and start one "
            "with an empty --run-folder and without these --snapshots; to give its run up, restart the learner, or the "
            "syncer with --new-run"
        )

    def reseed(self, member: Member, hello: Hello, out: list[SyncerEffect]) -> None:
        """What a learner trained from a seed that was given up is progress of another model."""
        if hello.run in self._given_up and hello.bases:
            reason = f"run {hello.run} was given up for run {self._state.run}"
            out.append(ToLearner(member.session, Reseed(reason)))

    # ------------------------------------------------------------ from one run to another

    def _take_run(self, hello: Hello, out: list[SyncerEffect]) -> Refused | None:
        """Go on with the run that this learner holds: its name, its version numbers, and what it and others bring."""
        fragments, state = len(hello.bases), self._state
        try:
            layout = build_layout(hello.tensors, fragments)
        except LayoutError as error:
            return Refused(Refusal.LAYOUT, str(error))
        self._drop_run(out)
        state.run, state.epoch = hello.run, max(state.epoch, hello.epoch + EPOCHS_SKIPPED)
        state.lay_out(layout)
        state.membership.generations_skipped = durable.GENERATIONS_SKIPPED * (state.epoch - 1)
        self._recovery.from_learners(fragments)
        state.remember_run(seeded=False)  # a restart before everything is here asks the learners again
        state.remember(durable.EPOCH_KEY, state.epoch)
        text = (
            f"this syncer has no state and learner {hello.learner!r} holds run {hello.run}: it goes on from what "
            "learners hold. Outer momentum, data leases and the ledger of learners that are gone are lost"
        )
        if state.given.fragments not in (0, fragments):
            text += f"; it has {fragments} fragments, so that --fragments {state.given.fragments} does not count"
        out.append(warned(text))
        self._beginning.waits = ""
        return None

    def give_up_claimed(self, out: list[SyncerEffect]) -> None:
        """A learner said that it holds a run, and brought nothing of it: a run begins with whoever is here. If somebody
        does hold it after all, it is not taken for one of those that gave way here."""
        claimed = self._state.run
        self._drop_run(out)
        self._given_up.discard(claimed)
        self._recovery.forget_run()
        self._state.run = f"{claimed}-again"
        out.append(
            warned(f"nobody brought anything of run {claimed}, which a learner claimed to hold; a new one begins")
        )

    def _drop_run(self, out: list[SyncerEffect]) -> None:
        """Give up what a newcomer began. Everybody says hello again, to whichever run there is then."""
        detail = "a learner holds an earlier run, which goes on instead of the one that had begun; say hello again"
        for member in self._state.membership.connected():
            out += [ToLearner(member.session, Refused(Refusal.BUSY, detail)), EndSession(member.session, detail)]
        for track in self._state.book.tracks:
            rounds = track.round.contributions if track.round is not None else {}
            out += [Forget(identity) for identity in sorted({*track.held, *rounds})]
        self._handoff.clear(out)
        if self._state.membership.members:
            self._given_up.add(self._state.run)
        self._seeding.clear()
        self._state.clear()
