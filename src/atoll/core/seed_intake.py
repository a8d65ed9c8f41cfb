"""The run's first parameters: who gives them, what has come of them, and who is asked instead of one that is too slow.

Every other learner waits for them. The rules of who may give them are in `beginning`.
"""

from __future__ import annotations

from atoll.core.beginning import Beginning, holds_run
from atoll.core.config import SECOND_NS
from atoll.core.effects import Answer, CommitSeed, SyncerEffect, ToLearner
from atoll.core.membership import Member, MemberState
from atoll.core.messages import WHOLE_CODEC, PushReply, Refusal, SeedPart
from atoll.core.syncer_state import SyncerState, warned

SEED_PATIENCE_NS = 20 * SECOND_NS
"""How long the first learner may take to give its parameters while others wait: 100 MB at 40 Mbit/s."""


class SeedIntake:
    """The seed is version 0 of everything that follows, so it counts only whole."""

    def __init__(self, state: SyncerState, beginning: Beginning) -> None:
        self._state = state
        self._beginning = beginning
        self.seeder = ""
        """The learner that was asked for the first parameters; empty: nobody was."""
        self.committing = False
        """They are here, and on their way to disk."""
        self.rooted = False
        """True if this run is more than a newcomer's seed: it was continued, or began by the operator's word."""
        self._seeds: set[int] = set()
        self._since_ns = -1
        """Since when the first parameters are awaited from this seeder; -1: they are not."""
        self._patience_ns = SEED_PATIENCE_NS

    def ask(self, member: Member) -> None:
        """This learner, whose Welcome says so, gives the first parameters."""
        self.seeder = member.learner
        self.rooted = self._beginning.begin.new_run or holds_run(self._state.hellos[member.learner])
        self._beginning.waits = ""

    def clear(self) -> None:
        self.seeder, self._seeds = "", set()

    # ------------------------------------------------------------ what comes

    def check(self, part: SeedPart) -> PushReply | None:
        who = f"learner {part.learner!r}, fragment {part.fragment}"
        if self._state.committed or self.committing or part.learner != self.seeder:
            return PushReply(False, Refusal.NOT_READY, f"{who}: not asked for the first parameters")
        if part.codec != WHOLE_CODEC:
            return PushReply(False, Refusal.CODEC, f"{who}: the first parameters must be sent as {WHOLE_CODEC}")
        return None

    def take(self, part: SeedPart, out: list[SyncerEffect]) -> None:
        """One fragment is here. The run is on record before its seed is: a crash in between begins it again."""
        self._seeds.add(part.fragment)
        out.append(Answer(PushReply(accepted=True)))
        if len(self._seeds) == self._state.config.fragments:
            self.committing = True
            self._state.remember_run(seeded=False)
            out.append(CommitSeed())

    def committed(self, checksums: tuple[int, ...]) -> list[Member]:
        """Version 0 exists. Returns the members that have waited for it."""
        self._state.committed, self.committing = True, False
        self._state.remember_run(seeded=True)
        for track, checksum in zip(self._state.book.tracks, checksums, strict=True):
            track.version, track.checksum = 0, checksum
        return self._state.membership.connected()

    # ------------------------------------------------------------ what does not come

    def gone(self, learner: str, out: list[SyncerEffect]) -> None:
        if self.seeder == learner and not self._state.committed and not self.committing:
            self._pass_on(out)

    def _pass_on(self, out: list[SyncerEffect]) -> None:
        """The learner that was to give the first parameters is gone, or too slow: ask another one that waits, and of
        those rather one that was in a run."""
        waiting = self._others()
        self.clear()
        if waiting:
            first = min(waiting, key=lambda m: not holds_run(self._state.hellos[m.learner]))
            self.ask(first)
            out.append(ToLearner(first.session, self._state.welcome(first, seed=True)))

    def watch(self, now_ns: int, out: list[SyncerEffect]) -> None:
        """Whoever gives the run its first parameters may have the thinnest link of all. If others wait as well, another
        is asked after a while; each has twice the time of the one before, so that large models come through."""
        if not self.seeder or self._state.committed or self.committing:
            self._since_ns = -1
            return
        self._since_ns = now_ns if self._since_ns < 0 else self._since_ns
        if now_ns < self._since_ns + self._patience_ns or not self._others():
            return
        slow, self._patience_ns = self.seeder, 2 * self._patience_ns
        self._pass_on(out)
        text = f"the first parameters do not come from learner {slow!r} in time; learner {self.seeder!r} is asked"
        out.append(warned(text))
        self._since_ns = now_ns

    def next_wake_ns(self) -> int | None:
        return self._since_ns + self._patience_ns if self._since_ns >= 0 and self._others() else None

    def _others(self) -> list[Member]:
        waiting = [m for m in self._state.membership.connected() if m.state is MemberState.JOINING]
        return [m for m in waiting if m.learner != self.seeder]
