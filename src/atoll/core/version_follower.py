"""Published versions as one learner follows them: what it fetches, what waits, and how it adopts at a step boundary.

Versions are fetched one after the other as updates, or whole where the chain is broken. They wait, prepared, until the
training thread stands at a boundary: parameters change nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.core.config import parse_adopt
from atoll.core.contribution_maker import ContributionMaker
from atoll.core.effects import (
    Adopt,
    Fetch,
    FetchBroken,
    Fetched,
    ForgetPrepared,
    ForgetResiduals,
    LearnerEffect,
    Note,
    Settle,
)
from atoll.core.events import LearnerAdopted, Warned
from atoll.core.learner_state import LearnerState
from atoll.core.messages import NO_VERSION, Discard, FetchKind, FragmentState, Published, Refusal
from atoll.core.progress import FragmentProgress

PREPARED_MAX = 2
"""Versions of a fragment that may wait for the next step boundary. A learner that pauses for minutes must not collect
hundreds; it catches up afterwards, from the ring or whole."""


class VersionFollower:
    """Versions are adopted at step boundaries only: between two of them the optimizer uses the parameters."""

    def __init__(self, state: LearnerState, contributions: ContributionMaker) -> None:
        self._state = state
        self._contributions = contributions

    @property
    def adopt_ready(self) -> bool:
        ready = [p for p in self._state.fragments if p.prepared]
        return bool(ready) and (not self.reseed_incomplete() or any(not p.reseed for p in ready))

    @property
    def behind(self) -> int:
        """Versions that are published and not adopted, over all fragments."""
        return sum(max(0, p.announced - p.base) for p in self._state.fragments)

    def reseed_incomplete(self) -> bool:
        """A re-seed is adopted at one boundary, whole: a fragment that is still poisoned would poison the healed
        ones."""
        for progress in self._state.fragments:  # noqa: SIM110 - `any` takes twice as long, at every step
            if progress.reseed and not progress.prepared:
                return True
        return False

    # ------------------------------------------------------------ adopting

    def adopt_prepared(self, out: list[LearnerEffect]) -> None:
        """Training thread, at a step boundary: parameters change here and nowhere else."""
        # Of most fragments there is nothing new after most steps.
        new = [p for p in self._state.fragments if p.prepared or p.outstanding or p.announced > p.base or p.reseed]
        incomplete = bool(new) and self.reseed_incomplete()
        for progress in new:
            if progress.reseed and incomplete:
                continue
            for version in progress.prepared:
                self._adopt(progress, version, out)
            progress.prepared = []
            self._take_late_news(progress, out)
            self._fetch_next(progress, out)

    def adopt_ordered(self, adopts: Sequence[Adopt], out: list[LearnerEffect]) -> None:
        """Adopt as was fixed a boundary ago, and nothing else."""
        for effect in adopts:
            progress = self._state.fragments[effect.fragment]
            progress.prepared = [version for version in progress.prepared if version > effect.version]
            self._carry_out(progress, effect, out)
        for progress in self._state.fragments:
            if parse_adopt(self._state.config.adopt)[0] != "rebase":
                self._take_late_news(progress, out)
            self._fetch_next(progress, out)

    def _take_late_news(self, progress: FragmentProgress, out: list[LearnerEffect]) -> None:
        """News of a merge came after its version had been adopted whole. Under rebase the progress is in theta twice
        now, and adopting the same version again takes one of them out; the other rules only settle the account."""
        late = progress.merged_in(progress.base)
        if late and parse_adopt(self._state.config.adopt)[0] == "rebase":
            self._adopt(progress, progress.base, out)
        else:
            for sent in late:
                progress.outstanding.remove(sent)
                out.append(Settle(progress.index, sent.seq, merged=not sent.discarded))

    def _adopt(self, progress: FragmentProgress, version: int, out: list[LearnerEffect]) -> None:
        self._carry_out(progress, self.plan_adopt(progress.index, version), out)

    def _carry_out(self, progress: FragmentProgress, effect: Adopt, out: list[LearnerEffect]) -> None:
        version, rule = effect.version, effect.rule
        out.append(effect)
        merged = progress.merged_in(version)
        for sent in merged:
            progress.outstanding.remove(sent)
            out.append(Settle(progress.index, sent.seq, merged=not sent.discarded))
        if rule == "overwrite":
            cause = progress.reseed or Discard.OVERWRITTEN
            self._state.discard(progress, progress.local.tokens, cause, out)
            progress.settle(progress.local)
            for sent in progress.outstanding:
                sent.overwritten = True
        if progress.based:
            adopted = LearnerAdopted(self._state.learner, progress.index, version, bool(merged), self._state.step)
            out.append(Note(adopted))
        progress.reseed, progress.too_old = "", False
        assert version >= progress.base, f"I1: fragment {progress.index} went from {progress.base} to {version}"
        known = progress.base_checksum if version == progress.base else 0
        progress.base_checksum = progress.checksums.get(version, known)
        progress.base, progress.based = version, True
        progress.checksums = {v: c for v, c in progress.checksums.items() if v > version}
        self._contributions.drop_snapshot(progress, out)

    def plan_adopt(self, fragment: int, version: int, *, ahead: bool = False) -> Adopt:
        """How this version would be adopted now. The shell asks ahead of time, to have the values ready: by then a
        learner that does not wait has taken a step, so that there is progress of its own to keep."""
        progress = self._state.fragments[fragment]
        merged = progress.merged_in(version)
        rule, alpha = parse_adopt(self._state.config.adopt)
        if not progress.based or progress.reseed:
            rule = "overwrite"
        elif (
            rule == "rebase"
            and progress.local_steps == 0
            and len(merged) == len(progress.outstanding)
            and (not ahead or self._state.config.synchronous)
        ):
            rule = "overwrite"  # no progress of its own to keep: the same values, and exactly Theta
        already_merged = tuple(s.seq for s in merged if not s.overwritten) if rule == "rebase" else ()
        return Adopt(fragment, version, rule, alpha, already_merged)

    # ------------------------------------------------------------ what is published

    def published(self, message: Published, out: list[LearnerEffect]) -> None:
        """A version is out; it may hold a contribution of ours, which then must not be added a second time."""
        progress = self._state.fragments[message.fragment]
        for sent in progress.outstanding:
            if sent.seq <= message.merged_seq and sent.merged_version == NO_VERSION:
                sent.merged_version = message.version
        due_step = message.due_step or message.clock_step + self._state.config.sync_every
        progress.period = max(1, due_step - message.clock_step)
        progress.due_step = max(progress.due_step, due_step)
        if message.version > progress.newest:
            progress.announced = message.version
            progress.checksums[message.version] = message.checksum
            self._fetch_next(progress, out)

    def start(
        self, progress: FragmentProgress, state: FragmentState, restarted: bool, out: list[LearnerEffect]
    ) -> None:
        """The run goes on with the fragment in this state. `restarted`: by another syncer than the last time."""
        if progress.base != NO_VERSION and self._foreign(progress, state):
            self._roll_back(progress, state.version, out)
        elif progress.knows_beyond(state.version):
            # Announced, lost by the syncer, and not fetched yet: these versions will never come.
            self._contributions.lost_beyond(progress, state.version, out)
            progress.announced = min(progress.announced, state.version)
            progress.checksums = {v: c for v, c in progress.checksums.items() if v <= state.version}
        if state.version > progress.newest or progress.base == NO_VERSION:
            # A syncer that was restarted may have gone back and made other versions of the same numbers since:
            # its updates need not fit what is here.
            progress.whole = progress.whole or restarted
            progress.announced = state.version
            progress.checksums[state.version] = state.checksum
        progress.fetching = NO_VERSION
        self._fetch_next(progress, out)

    def _foreign(self, progress: FragmentProgress, state: FragmentState) -> bool:
        """True if the run no longer knows the version that this learner holds: the syncer lost it with its disk, and
        nobody could bring it back in time."""
        other = state.version == progress.newest and progress.newest_checksum not in (0, state.checksum)
        return state.version < progress.newest or other

    def _roll_back(self, progress: FragmentProgress, version: int, out: list[LearnerEffect]) -> None:
        """Take the run's older version, keeping what was trained since: contributions that were merged into a lost
        version and not adopted yet are the learner's own again."""
        text = f"fragment {progress.index} goes back from version {progress.newest} to {version}: the syncer lost it"
        out.append(Note(Warned(self._state.learner, text)))
        self._contributions.lost_beyond(progress, version, out)
        self._forget_base(progress, out)
        out.append(ForgetPrepared(progress.index, went_back=True))

    def _forget_base(self, progress: FragmentProgress, out: list[LearnerEffect]) -> None:
        progress.prepared, progress.checksums = [], {}
        progress.announced = progress.base = NO_VERSION
        progress.base_checksum = 0
        self._contributions.drop_snapshot(progress, out)

    def new_run(self, out: list[LearnerEffect]) -> None:
        """The syncer came back without its state, as a new run: contributions in the air are the learner's own again,
        versions count anew. Published parameters, which every learner still holds, become the new run's seed."""
        for progress in self._state.fragments:
            for sent in list(progress.outstanding):
                self._contributions.dropped(progress, sent, Refusal.UNKNOWN_ROUND, out)
            self._forget_base(progress, out)
            self._state.leave_to_earlier_run(progress)
        out.append(ForgetPrepared(went_back=True))

    def reseed(self, reason: str, out: list[LearnerEffect]) -> None:
        """The syncer does not trust this learner's parameters: all of them are fetched whole and overwritten."""
        out += [ForgetResiduals(), ForgetPrepared()]
        out.append(Note(Warned(self._state.learner, f"re-seeded: {reason}")))
        for progress in self._state.fragments:
            if progress.index in self._state.away:
                continue  # nobody has it to give: what is here stays until its shard is back
            progress.reseed = Discard.QUARANTINED
            progress.prepared = []
            progress.announced = max(progress.announced, progress.base)
            progress.fetching = NO_VERSION
            self._fetch_next(progress, out)

    # ------------------------------------------------------------ fetching

    def _fetch_next(self, progress: FragmentProgress, out: list[LearnerEffect]) -> None:
        full = len(progress.prepared) >= (1 if progress.reseed else PREPARED_MAX)
        if progress.fetching != NO_VERSION or not self._state.linked or full:
            return
        # Updates that have left the ring are not worth asking for.
        newest = progress.newest
        behind = progress.announced - newest > self._state.config.ring_versions
        whole = newest == NO_VERSION or bool(progress.reseed) or progress.whole or behind
        if progress.announced == NO_VERSION or (not whole and progress.announced <= newest):
            return
        version = progress.announced if whole else newest + 1
        kind = FetchKind.THETA if whole else FetchKind.UPDATE
        progress.fetching = version
        out.append(Fetch(kind, progress.index, version, progress.checksums.get(version, 0)))

    def fetched(self, event: Fetched, out: list[LearnerEffect]) -> None:
        """A version is on this host. It waits for the next step boundary."""
        progress = self._state.fragments[event.fragment]
        if progress.fetching != event.asked:
            return  # asked for before the link broke, and again since: the second answer counts
        progress.fetching, progress.whole = NO_VERSION, False
        if event.checksum:
            progress.checksums[event.version] = event.checksum
        if progress.reseed and event.version >= progress.base:
            progress.prepared = [event.version]
        elif not progress.reseed and event.version > progress.newest:
            progress.prepared.append(event.version)
        self._fetch_next(progress, out)

    def fetch_broken(self, event: FetchBroken, out: list[LearnerEffect]) -> None:
        """An update that has left the ring will not come back, so the whole fragment is fetched instead."""
        progress = self._state.fragments[event.fragment]
        if progress.fetching != event.version:
            return
        progress.fetching = NO_VERSION
        if event.gone and self._state.linked:
            progress.fetching = progress.announced
            checksum = progress.checksums.get(progress.announced, 0)
            out.append(Fetch(FetchKind.THETA, progress.index, progress.announced, checksum))
        elif self._state.started:
            self._fetch_next(progress, out)
