"""What the syncer knows: the run and its settings, membership, ledger, rounds and data leases, and what is durable.

Every part of the `SyncerMachine` works on this one object, and none keeps a second copy of what is in it. Facts that
must survive a restart are marked with `remember`; at the end of every input the machine puts them in front of whatever
it says, so that nothing is said that a kill -9 could unsay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from atoll.core import durable
from atoll.core.config import SyncConfig
from atoll.core.effects import Note, Remember, SyncerEffect
from atoll.core.events import MemberChanged, Warned
from atoll.core.layout import Layout, build_layout
from atoll.core.leases import PREFIX, LeaseBook
from atoll.core.ledger import Ledger
from atoll.core.membership import Member, Membership, MemberState
from atoll.core.messages import FragmentState, Hello, Start, Welcome
from atoll.core.round_scheduler import ADAPTIVE_KEY, RoundScheduler
from atoll.core.rounds import HandedOver
from atoll.errors import ConfigError

RANK_PROTOCOL = 2
"""The protocol whose Welcome knows ranks."""
REASON_CHARS_MAX = 500
"""Of a reason that a learner gives, or a connection's error: a few lines of a terminal."""
VERSIONS_TOLD = 3
"""Versions of a fragment whose contributions are on the tape: what was published while its record was not written."""


class SyncerState:
    """Shared by the machine's parts. It holds facts and decides nothing, so parts can be read one by one."""

    def __init__(self, config: SyncConfig, run: str, epoch: int = 1) -> None:
        self.given = config
        """The settings as the operator gave them."""
        self.config = config
        """The run's settings; complete once the first learner has said what the model looks like."""
        self.run = run
        self.epoch = epoch
        self.layout: Layout | None = None
        self.frozen = ("", 0)
        """The first learner of this layout that has frozen parameters, and their checksum."""
        self.membership = Membership()
        self.ledger = Ledger(())
        self.book = RoundScheduler(config, self.membership, self.ledger)
        self.leases = LeaseBook()
        self.committed = False
        """True once version 0 exists, and again after a restart once nothing newer can be had from learners."""
        self.hellos: dict[str, Hello] = {}
        """Of learners that wait for the run to begin, or to go on after a restart."""
        self._rows: dict[str, Any | None] = {}
        self._rows_late: dict[str, Any | None] = {}
        self._lease_rows: dict[str, Any | None] = {}
        self._excess_told = 0
        """Of the tokens that do not count, what is on the tape."""

    def lay_out(self, layout: Layout) -> None:
        """The model is known, and with it what the fragments are. Nothing was merged yet."""
        self.layout, self.frozen = layout, ("", 0)
        self.config = replace(self.given, fragments=len(layout.fragments))
        self.ledger = Ledger([fragment.parameters for fragment in layout.fragments])
        self.book = RoundScheduler(self.config, self.membership, self.ledger)

    def clear(self) -> None:
        """Give up this run and all that is on the tape of it."""
        for learner in self.membership.members:
            self.remember(durable.member_key(learner), None)
        for key in self._lease_rows:
            self.remember(key, None)
        self.committed, self.hellos, self.layout, self.config = False, {}, None, self.given
        self.membership, self.leases, self._lease_rows, self.ledger = Membership(), LeaseBook(), {}, Ledger(())
        self.book = RoundScheduler(self.config, self.membership, self.ledger)

    # ------------------------------------------------------------ what learners are told of it

    def welcome(self, member: Member, *, seed: bool) -> Welcome:
        assert self.layout is not None
        rank = member.rank if member.protocol >= RANK_PROTOCOL else -1
        place = (self.layout.fingerprint, seed, member.protocol, rank, member.secret)
        config = replace(self.config, codec_up=member.codec_up or self.config.codec_up)
        return Welcome(self.run, self.epoch, member.generation, config, *place)

    def start(self) -> Start:
        tracks = self.book.tracks
        states = tuple(FragmentState(max(0, t.version), t.checksum) for t in tracks)
        self.book.clock()
        return Start(self.book.clock_last, states, tuple(t.due_step for t in tracks))

    # ------------------------------------------------------------ what is durable

    def remember(self, key: str, row: Any | None) -> None:
        """This fact must be on disk before anything that follows from it is said."""
        self._rows[key] = row

    def remember_member(self, member: Member) -> None:
        self.remember(durable.member_key(member.learner), durable.member_row(member))

    def remember_run(self, *, seeded: bool) -> None:
        """`seeded`: version 0 is on disk. A record without it is of a run that had no parameters yet."""
        self.remember("run", self._run_row(seeded))
        self.remember(durable.SETTINGS_KEY, self.config.to_dict())

    def remember_version(self, fragment: int) -> None:
        """What was merged into the last versions. It follows the publication: the record on disk goes before it."""
        track = self.book.tracks[fragment]
        merged = [
            [member.learner, member.generation, seq, version]
            for _, member in sorted(self.membership.members.items())
            for seq, version in member.merged[fragment]
            if version > track.version - VERSIONS_TOLD
        ]
        row = {"version": track.version, "checksum": track.checksum, "merged": merged}
        self._rows_late[durable.version_key(fragment)] = row

    def retire(self, member: Member) -> None:
        """This generation can never come back."""
        self.ledger.retire(member.learner, member.generation)
        self.remember("ledger", self._ledger_row())

    def judge_tokens(self, member: Member, now_ns: int) -> None:
        """What of this learner's tokens counts for the budget. A syncer that comes back must know, too: but a learner
        that claims more with every report does not fill the tape."""
        grown = self.book.spending.judge(member, now_ns) if self.config.tokens_budget else False
        if grown and self.ledger.excess > 2 * self._excess_told:
            self.remember("ledger", self._ledger_row())

    def _ledger_row(self) -> dict[str, int]:
        self._excess_told = self.ledger.excess
        return {"gone_processed": self.ledger.gone_processed, "excess": self._excess_told}

    def prune_members(self) -> None:
        for member in self.membership.prune(self.config.fragments):
            self.retire(member)
            self.remember(durable.member_key(member.learner), None)

    def remembered(self, out: list[SyncerEffect]) -> list[SyncerEffect]:
        """Put what must be durable in front of what was decided."""
        leases = self.leases.take_dirty()
        if not (leases or self._rows or self._rows_late):
            return out
        self._lease_rows |= leases
        self._lease_rows = {key: row for key, row in self._lease_rows.items() if row is not None}
        rows = {**self._rows, **leases}
        late, self._rows, self._rows_late = self._rows_late, {}, {}
        front: list[SyncerEffect] = [Remember(rows, first=True)] if rows else []
        return front + out + ([Remember(late, first=False)] if late else [])

    def rows(self) -> dict[str, Any]:
        """All facts as they stand, for a snapshot."""
        rows: dict[str, Any] = {"run": self._run_row(self.committed), durable.SETTINGS_KEY: self.config.to_dict()}
        rows["ledger"] = self._ledger_row()
        if self.book.adaptive.decided:
            rows[ADAPTIVE_KEY] = self.book.adaptive.row()
        for member in self.membership.members.values():
            rows[durable.member_key(member.learner)] = durable.member_row(member)
        return rows | {key: row for key, row in self._lease_rows.items() if row is not None}

    def _run_row(self, seeded: bool) -> dict[str, Any]:
        assert self.layout is not None
        return durable.run_row(self.run, self.layout.tensors, self.config.fragments, seeded)

    def fragment_record(self, fragment: int) -> durable.FragmentRecord:
        """The fragment's durable record as things stand; no merge of it may be under way."""
        return durable.column_of(self.book, self.membership, self.ledger, fragment)

    def record_after_merge(self, fragment: int, checksum: int) -> durable.FragmentRecord:
        """The record that goes to disk with the merge that is under way."""
        return durable.record_after_merge(self.book, self.membership, self.ledger, fragment, checksum)

    # ------------------------------------------------------------ coming back

    def restore(self, recovery: durable.Recovery, now_ns: int) -> None:
        """Continue the run of an earlier syncer. Everybody is away until heard of again."""
        fragments = int(recovery.rows["run"]["fragments"])
        if self.given.fragments not in (0, fragments):
            raise ConfigError(
                f"this run has {fragments} fragments and cannot go on with {self.given.fragments}; leave --fragments "
                "away, or start a new run folder"
            )
        self.run = str(recovery.rows["run"]["run"])
        self.lay_out(build_layout(durable.tensors_of(recovery.rows), fragments))
        self.membership = durable.restore_members(recovery.rows, recovery.fragment_records, fragments, now_ns)
        self.membership.generations_skipped = durable.GENERATIONS_SKIPPED * max(1, self.epoch - 1)
        self.book = RoundScheduler(self.config, self.membership, self.ledger)
        live = durable.live_generations(self.membership)
        waiting = [h for h in recovery.handed if _waits(h, recovery.fragment_records)]
        live |= {(h.contribution.id.learner, h.contribution.id.generation) for h in waiting}
        for fragment, fragment_record in sorted(recovery.fragment_records.items()):
            durable.restore_column(self.book, self.membership, self.ledger, fragment, fragment_record, live)
        self._hold_again(waiting)
        self.book.adaptive.restore(recovery.rows.get(ADAPTIVE_KEY, {}), self.book.clock_last)
        processed_gone = int(recovery.rows.get("ledger", {}).get("gone_processed", 0))
        self.ledger.restore_gone(processed_gone, durable.excess_of(recovery.rows, recovery.fragment_records))
        for member in self.membership.members.values():
            if member.state is not MemberState.LEFT:
                self.ledger.set_gone(member.learner, member.generation, member.state is MemberState.LOST)
                account = self.ledger.account(member.learner, member.generation)
                account.spend.before = account.processed
        # Where every grant was on the tape before it was told, what the tape does not know was never granted. (If the
        # disk failed meanwhile, some chunks are read again: better than data that one learner's word takes away.)
        self.leases.load(recovery.rows, lost_rows=not recovery.exact)
        self._lease_rows = {key: row for key, row in recovery.rows.items() if key.startswith(PREFIX)}
        if recovery.rows.get(durable.SETTINGS_KEY) != self.config.to_dict():
            self.remember(durable.SETTINGS_KEY, self.config.to_dict())

    def _hold_again(self, waiting: Sequence[HandedOver]) -> None:
        for handed in waiting:
            item = handed.contribution
            account = self.ledger.account(item.id.learner, item.id.generation)
            account.report(handed.processed, ())
            self.ledger.hold(item.id.learner, item.id.generation, item.id.fragment, item.tokens)
            self.book.tracks[item.id.fragment].held[item.id] = item
            member = self.membership.members.get(item.id.learner)
            if member is not None and member.generation == item.id.generation:
                seen = member.seq_seen
                seen[item.id.fragment] = max(seen[item.id.fragment], item.id.seq)
        for learner, generation in sorted({(h.contribution.id.learner, h.contribution.id.generation) for h in waiting}):
            member = self.membership.members.get(learner)
            # The crash may have come between its files and the word that it has left: then it may come back.
            if member is None or member.generation != generation or member.state is MemberState.LEFT:
                self.ledger.retire(learner, generation)


def _waits(handed: HandedOver, fragment_records: Mapping[int, durable.FragmentRecord]) -> bool:
    """True if this contribution of a learner that left was not merged before the crash."""
    fragment_record = fragment_records.get(handed.contribution.id.fragment)
    return fragment_record is not None and not durable.is_merged(handed.contribution.id, fragment_record)


def warned(text: str) -> Note:
    """Something that the operator should read."""
    return Note(Warned("syncer", text))


def changed(member: Member, reason: str, silent_ns: int = 0) -> Note:
    """A member's state is another one now."""
    told = reason if len(reason) <= REASON_CHARS_MAX else reason[: REASON_CHARS_MAX - 1] + "…"
    return Note(MemberChanged(member.learner, member.generation, str(member.state), told, silent_ns))
