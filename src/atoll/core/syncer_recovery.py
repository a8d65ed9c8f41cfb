"""How the syncer comes back after a restart: from its record, and from the learners, who may hold newer versions.

The rules of what is asked from whom are in `healing`. While anything may still come, no round runs and learners train
on. Then each of them hears what became of the contributions that it could not follow, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.core import durable
from atoll.core.effects import (
    Answer,
    CommitHealed,
    FragmentsBack,
    HealCommitted,
    MergeFinished,
    Note,
    SyncerEffect,
    ToLearner,
)
from atoll.core.events import FragmentHealed, SyncerRecovered
from atoll.core.healing import VERSION_MAX, Healing, VersionClaim
from atoll.core.leases import LeaseBook
from atoll.core.membership import Member, MemberState
from atoll.core.mending import Mending
from atoll.core.messages import (
    NO_VERSION,
    Discard,
    Fate,
    Heal,
    HealedVersion,
    Hello,
    Outstanding,
    PushReply,
    Ready,
    Refusal,
)
from atoll.core.plausible import AWAY_STEPS_MAX
from atoll.core.policy import first_due_step, heal_limit, norm_limit_absolute
from atoll.core.rounds import ContributionId
from atoll.core.syncer_state import SyncerState, warned
from atoll.errors import AtollError, StoreError

FROM_LEARNERS = "learners"
"""Where a run came back from whose state was lost: the rung of the ladder below slots and snapshots."""


class SyncerRecovery:
    """Rounds wait until it is over: a merge onto an old version could not be taken back."""

    def __init__(self, state: SyncerState) -> None:
        self._state = state
        self.healing: Healing | None = None
        """Set from a restart until it is clear that no learner holds anything newer."""
        self.waits = ""
        """What the operator should know while a part of the run is nowhere to be had."""
        self.source = ""
        """The rung of the ladder that this run came back from; empty: it began here."""
        self._healed: dict[int, int] = {}
        """Fragments that learners brought back after the restart, and in which version."""
        self._tape_version: dict[int, int] = {}
        """Up to which version of each fragment the tape knows what was merged."""
        self._tape_merged: dict[ContributionId, int] = {}
        """Contributions of the last versions before a restart, and which version holds each."""
        self.mending = Mending()
        self.away: frozenset[int] = frozenset()
        """Fragments whose shard was not there when this syncer began."""
        self.holders: set[str] = set()
        """Of a run that comes back from learners: those that were in it, until the first of them says at which step."""

    # ------------------------------------------------------------ from the record

    def restore(self, recovery: durable.Recovery, now_ns: int, load_ns: int) -> Note:
        """Continue the run of an earlier syncer. Raises StoreError for a record that makes no sense, ConfigError for
        one that does not fit the settings; this syncer is of no use then."""
        try:
            return self._restore(recovery, now_ns, load_ns)
        except AtollError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            text = f"the record of this run makes no sense ({error!r:.200}); recover from an older snapshot"
            raise StoreError(text) from error

    def _restore(self, recovery: durable.Recovery, now_ns: int, load_ns: int) -> Note:
        self._state.restore(recovery, now_ns)
        self.source, self.away = recovery.source, recovery.away
        self._state.book.set_down(recovery.away)
        # Even if every commit was on disk before its publication, a disk that failed for a while may have missed some:
        # rounds begin when those who were in the run have said what they hold. They train on meanwhile.
        self.healing = self._healing_from(recovery.rows)
        recovered = SyncerRecovered(
            source=recovery.source,
            exact=recovery.exact,
            versions=[track.version for track in self._state.book.tracks],
            tokens_merged=self._state.ledger.totals().merged,
            load_ns=load_ns,
            problems=list(recovery.problems),
        )
        return Note(recovered)

    def _healing_from(self, rows: Mapping[str, Any]) -> Healing:
        known = {}
        for fragment in range(self._state.config.fragments):
            row = rows.get(durable.version_key(fragment))
            if row is not None:
                known[fragment] = VersionClaim(int(row["version"]), int(row["checksum"]))
                self._tape_version[fragment] = int(row["version"])
                if fragment in self.away:  # or a little newer; its shard will say
                    track = self._state.book.tracks[fragment]
                    track.version, track.checksum = int(row["version"]), int(row["checksum"])
            for name, generation, seq, version in (row or {}).get("merged", []):
                identity = ContributionId(str(name), int(generation), fragment, int(seq))
                self._tape_merged[identity] = int(version)
        expected = {m.learner for m in self._state.membership.members.values() if m.state is MemberState.AWAY}
        # What is on the disk of a shard that is away is lost to nobody: no learner is asked for it.
        versions = [VERSION_MAX if t.index in self.away else t.version for t in self._state.book.tracks]
        return Healing(versions, known, expected)

    # ------------------------------------------------------------ from learners

    def from_learners(self, fragments: int) -> None:
        """No record is left at all: every fragment must come from a learner."""
        self.healing = Healing([NO_VERSION] * fragments, {}, set(), strangers=True)
        self._state.leases = LeaseBook(lost_rows=True)
        self.source = FROM_LEARNERS

    @property
    def in_vain(self) -> bool:
        """True if this syncer has waited for a run that somebody claimed to hold and did not deliver, and has nothing
        of it."""
        return self.source == FROM_LEARNERS and self.healing is not None and self.healing.in_vain

    def forget_run(self) -> None:
        """There is no such run."""
        self.healing, self.waits, self.source, self.holders = None, "", "", set()

    def heal(self, now_ns: int, out: list[SyncerEffect]) -> list[Member]:
        """Ask learners for what they hold and this syncer has lost. When there is nothing more to be had, the run goes
        on: returns the members with whom."""
        healing = self.healing
        if healing is None:
            return []
        for learner, wanted in sorted(healing.ask(now_ns).items()):
            member = self._state.membership.members[learner]
            out.append(ToLearner(member.session, Heal(tuple(fragment for fragment, _ in wanted))))
        out += [warned(text) for text in healing.warnings]
        healing.warnings = []
        self._look_for_the_lost(healing.nowhere(now_ns), out)
        if not healing.over(now_ns):
            return []
        self.healing, self.waits, self._healed = None, "", dict(healing.healed)
        self._state.committed = True
        connected = self._state.membership.connected()
        if self.source != FROM_LEARNERS:
            return connected
        self._state.remember_run(seeded=True)
        versions = [track.version for track in self._state.book.tracks]
        problems = ["no state was left but what learners hold"]
        out.append(Note(SyncerRecovered(FROM_LEARNERS, False, versions, 0, 0, problems)))
        self.holders = {member.learner for member in connected if member.recovered}
        return [member for member in connected if member.recovered or not self.holders]

    def _look_for_the_lost(self, fragments: list[int], out: list[SyncerEffect]) -> None:
        """Nobody who is connected holds these: newcomers wait, and only the operator can say that nobody ever will."""
        text = (
            f"nobody who is connected holds fragments {fragments} of run {self._state.run}, and they are not on disk: "
            "learners wait for one that does. If none is left, start the syncer again with --new-run"
        )
        if fragments and self.waits != text:
            out.append(warned(text))
        self.waits = text if fragments else ""

    # ------------------------------------------------------------ shards that come and go

    def may_begin(self, member: Member, hello: Hello | None) -> bool:
        """Whoever lacks a fragment whose shard is away has to wait for it."""
        held = hello.bases if hello is not None else member.bases
        return all(len(held) > fragment and held[fragment] != NO_VERSION for fragment in self.away)

    def shard_back(self, event: FragmentsBack, now_ns: int, out: list[SyncerEffect]) -> None:
        """Its fragments go on from its disk. What that lacks is asked of learners; what it holds beyond the last word
        of it was committed, and only the answer was lost."""
        book = self._state.book
        for fragment, (version, checksum) in sorted(event.on_disk.items()):
            track = book.tracks[fragment]
            if track.merging and version == track.version + 1:
                book.merge_finished(MergeFinished(fragment, True, checksum), now_ns, out)
                self._state.remember_version(fragment)
            book.begin_anew(fragment, event.handed, out)
            if (version, checksum) != (track.version, track.checksum):
                self.mending.want(fragment, now_ns)
            else:
                self.mending.done(fragment)
        book.set_down((book.down - event.on_disk.keys()) | self.mending.fragments, book.resting)

    def mend(self, now_ns: int, out: list[SyncerEffect]) -> None:
        """Ask learners for what a shard has lost."""
        asked = self.mending.ask(self._state.book.tracks, self._state.membership.connected(), now_ns)
        for fragment, member in sorted(asked.items()):
            out.append(ToLearner(member.session, Heal((fragment,))))

    def _mended(self, event: HealCommitted, out: list[SyncerEffect]) -> bool:
        book = self._state.book
        track, giver = book.tracks[event.fragment], self.mending.giver(event.fragment)
        if (event.version, event.checksum) != (track.version, track.checksum) or not self.mending.done(event.fragment):
            return False
        out.append(Note(FragmentHealed(event.fragment, NO_VERSION, event.version, giver)))
        book.set_down(book.down - {event.fragment}, book.resting)
        return True

    def hear(self, hello: Hello, *, claimed: bool, now_ns: int) -> None:
        """A learner is back, and says which versions it holds."""
        if self.healing is not None:
            self.healing.hear(hello.learner, hello.bases if claimed else (), hello.checksums, now_ns)

    def check(self, healed: HealedVersion) -> PushReply | None:
        """Only what was asked for, and proven by its checksum, may replace what the disk has."""
        claim = self.healing.asked(healed.fragment, healed.learner) if self.healing is not None else None
        if self.mending.is_asked(healed.fragment, healed.learner):
            track = self._state.book.tracks[healed.fragment]
            claim = VersionClaim(track.version, track.checksum)
        if claim is None or claim.version != healed.version or claim.checksum != healed.checksum:
            detail = (
                f"learner {healed.learner!r}: version {healed.version} of fragment {healed.fragment} was not "
                "asked for; wait for Start"
            )
            return PushReply(False, Refusal.NOT_READY, detail)
        return None

    def check_values(self, healed: HealedVersion, distance: float) -> PushReply | None:
        """What one learner alone vouches for must be near what the disk has; `distance` is the norm of the
        difference."""
        track, claim = self._state.book.tracks[healed.fragment], VersionClaim(healed.version, healed.checksum)
        if self.healing is None or track.version < 0 or not self.healing.is_lone(healed.fragment, claim):
            return None
        limit = heal_limit(self._state.config, track.norms, healed.version - track.version)
        assert self._state.layout is not None
        parameters = self._state.layout.fragments[healed.fragment].parameters
        limit = min(limit, norm_limit_absolute(self._state.config, parameters))
        if distance <= limit:
            return None
        detail = (
            f"learner {healed.learner!r}: version {healed.version} of fragment {healed.fragment}, which nobody "
            f"else holds, is {distance:.3g} from the disk's version {track.version}, more than {limit:.3g}"
        )
        return PushReply(False, Refusal.NORM_OUTLIER, detail)

    def reject(self, healed: HealedVersion) -> None:
        """What this learner gave cannot be used, so another one is asked."""
        self.mending.reject(healed.fragment, healed.learner)
        if self.healing is not None:
            self.healing.reject(healed.fragment, healed.learner)

    def take(self, healed: HealedVersion, out: list[SyncerEffect]) -> None:
        """The parameters of a lost version are here, and they are what was asked for."""
        if self.healing is not None:
            self.healing.take(healed.fragment, healed.learner)
            self._state.book.drop_handed(healed.fragment, healed.version, out)
        out.append(Answer(PushReply(accepted=True)))
        out.append(CommitHealed(healed.fragment, healed.version, healed.checksum))

    def put_in_place(self, event: HealCommitted, out: list[SyncerEffect]) -> None:
        """A lost version is back. Commits between the record and it were made by the earlier syncer, and count."""
        track = self._state.book.tracks[event.fragment]
        if self._mended(event, out) or self.healing is None or event.version <= track.version:
            return  # it came twice
        giver = self.healing.giver(event.fragment)
        out.append(Note(FragmentHealed(event.fragment, track.version, event.version, giver)))
        self._state.book.commits += event.version - max(0, track.version)
        track.version, track.checksum = event.version, event.checksum
        self.healing.done(event.fragment, event.version)

    # ------------------------------------------------------------ at which step a run from learners goes on

    def must_wait_for_clock(self, member: Member) -> bool:
        """A newcomer starts at the run's step, which only those that were in the run can tell."""
        return bool(self.holders) and not member.recovered

    def hear_clock(self, message: Ready) -> list[Member]:
        """The first of them is ready: the run is at its step, and fragments fall due from there on. Returns the members
        that have waited for this."""
        book, config = self._state.book, self._state.config
        step = max(min(message.step, AWAY_STEPS_MAX), book.clock_last)
        book.clock_last = step
        for track in book.tracks:
            # Those who wait in a synchronous run have reached a step that the lost record knew: ask them now.
            track.due_step = step + (0 if config.synchronous else first_due_step(config, track.index))
        return self._waiting_for_clock()

    def gone(self, learner: str) -> list[Member]:
        """This learner is gone. Returns the members that wait in vain for the step that it would have told."""
        self.mending.gone(learner)
        if self.healing is not None:
            self.healing.forget(learner)
        if learner not in self.holders:
            return []
        self.holders.discard(learner)
        return self._waiting_for_clock() if not self.holders and self._state.committed else []

    def _waiting_for_clock(self) -> list[Member]:
        self.holders = set()
        return [member for member in self._state.membership.connected() if member.learner in self._state.hellos]

    # ------------------------------------------------------------ what became of contributions

    def tell_fates(self, member: Member, hello: Hello, out: list[SyncerEffect]) -> None:
        """A learner that was away learns what became of the contributions it could not follow."""
        for item in hello.outstanding:
            if not 0 <= item.fragment < self._state.config.fragments or item.fragment in self.away:
                continue
            identity = ContributionId(member.learner, member.generation, item.fragment, item.seq)
            version = dict(member.merged[item.fragment]).get(item.seq, self._merged_on_tape(identity))
            if version is not None:
                member.seq_seen[item.fragment] = max(member.seq_seen[item.fragment], item.seq)
                out.append(ToLearner(member.session, Fate(item.fragment, item.seq, version, "")))
            elif self._state.book.holds(identity):
                continue
            elif item.seq <= member.seq_seen[item.fragment] or member.recovered:
                # Received and dropped, or received by an earlier syncer and lost with it: the learner has it still.
                # From here on its number is used up, so that a push of it that is under way cannot come in as well.
                member.seq_seen[item.fragment] = max(member.seq_seen[item.fragment], item.seq)
                out.append(ToLearner(member.session, self._fate_of_lost(member, item)))

    def _fate_of_lost(self, member: Member, item: Outstanding) -> Fate:
        """Of a contribution that this syncer knows nothing of: its learner gives it again. Unless a learner brought the
        fragment back in a version beyond the record of what was merged: then it may be in there."""
        recorded = self._tape_version.get(item.fragment, NO_VERSION)
        if member.recovered and recorded < self._healed.get(item.fragment, NO_VERSION):
            return Fate(item.fragment, item.seq, self._state.book.tracks[item.fragment].version, Discard.UNCERTAIN)
        return Fate(item.fragment, item.seq, -1, Refusal.UNKNOWN_ROUND)

    def _merged_on_tape(self, identity: ContributionId) -> int | None:
        """The version that holds this contribution, by the tape: a learner may have brought back a version whose record
        was never written."""
        version = self._tape_merged.get(identity)
        return (
            version if version is not None and version <= self._state.book.tracks[identity.fragment].version else None
        )

    def balance(self, member: Member, pending: tuple[int, ...]) -> None:
        """After a restart that lost something: what a learner has neither pending nor discarded was merged by the
        earlier syncer. It is in the parameters if a learner brought them back, else it was rolled back."""
        member.unbalanced = False
        account = self._state.ledger.account(member.learner, member.generation)
        for fragment, tokens in enumerate(pending[: self._state.config.fragments]):
            account.balance(fragment, tokens, merged=fragment in self._healed or fragment in self.away)
