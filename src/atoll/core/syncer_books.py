"""The books of the syncer: membership, ledger, rounds and data leases, what of them is durable, and how they come back.

`SyncerMachine` builds on this. Facts that must survive a restart are marked with `_remember`; at the end of every input
the machine puts them in front of whatever it says, so that nothing is said that a kill -9 could unsay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from atoll.core import durable
from atoll.core.config import SyncConfig
from atoll.core.effects import Note, Remember, SyncerEffect
from atoll.core.healing import Claim, Healing
from atoll.core.layout import Layout, build_layout
from atoll.core.leases import LeaseBook
from atoll.core.ledger import Ledger
from atoll.core.membership import Member, Membership, MemberState
from atoll.core.relays import Relays
from atoll.core.round_book import RoundBook
from atoll.core.rounds import ContributionId, HandedOver
from atoll.errors import AtollError, ConfigError, StoreError


class SyncerBooks:
    """Everything that the syncer knows, apart from how it answers."""

    def __init__(self, config: SyncConfig, run: str, epoch: int = 1) -> None:
        self.config = config
        """The run's settings; complete once the first learner has said what the model looks like."""
        self._given = config
        self.run = run
        self.epoch = epoch
        self.layout: Layout | None = None
        self._frozen = ("", 0)
        """The first learner of this layout that has frozen parameters, and their checksum."""
        self.membership = Membership()
        self.ledger = Ledger(())
        self.book = RoundBook(config, self.membership, self.ledger)
        self.leases = LeaseBook()
        self.relays = Relays()
        self.committed = False
        """True once version 0 exists, and again after a restart once nothing newer can be had from learners."""
        self.healing: Healing | None = None
        """Set from a restart until it is clear that no learner holds anything newer."""
        self._healed: dict[int, int] = {}
        """Fragments that learners brought back after the restart, and in which version."""
        self.recovered_from = ""
        self._tape_version: dict[int, int] = {}
        """Up to which version of each fragment the tape knows what was merged."""
        self._tape_merged: dict[ContributionId, int] = {}
        """Contributions of the last versions before a restart, and which version holds each."""
        self._rows: dict[str, Any | None] = {}
        self._rows_late: dict[str, Any | None] = {}
        self._lease_rows: dict[str, Any | None] = {}

    # ------------------------------------------------------------ what is durable

    def _remember(self, key: str, row: Any | None) -> None:
        """This fact must be on disk before anything that follows from it is said."""
        self._rows[key] = row

    def _remember_member(self, member: Member) -> None:
        self._remember(durable.member_key(member.learner), durable.member_row(member))

    def _retire(self, member: Member) -> None:
        """This generation can never come back."""
        self.ledger.retire(member.learner, member.generation)
        self._remember("ledger", {"gone_processed": self.ledger.gone_processed})

    def _prune_members(self) -> None:
        for member in self.membership.prune():
            self._retire(member)
            self._remember(durable.member_key(member.learner), None)

    def _remembered(self, out: list[SyncerEffect]) -> list[SyncerEffect]:
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
        assert self.layout is not None
        rows: dict[str, Any] = {"run": self._run_row(self.committed), durable.SETTINGS_KEY: self.config.to_dict()}
        rows["ledger"] = {"gone_processed": self.ledger.gone_processed}
        for member in self.membership.members.values():
            rows[durable.member_key(member.learner)] = durable.member_row(member)
        return rows | {key: row for key, row in self._lease_rows.items() if row is not None}

    def _run_row(self, seeded: bool) -> dict[str, Any]:
        assert self.layout is not None
        return durable.run_row(self.run, self.layout.tensors, self.config.fragments, seeded)

    def _remember_run(self, *, seeded: bool) -> None:
        self._remember("run", self._run_row(seeded))
        self._remember(durable.SETTINGS_KEY, self.config.to_dict())

    def column(self, fragment: int) -> durable.Column:
        """The fragment's durable column as things stand; no merge of it may be under way."""
        return durable.column_of(self.book, self.membership, self.ledger, fragment)

    def column_after_merge(self, fragment: int, checksum: int) -> durable.Column:
        """The column that goes to disk with the merge that is under way."""
        return durable.column_after_merge(self.book, self.membership, self.ledger, fragment, checksum)

    # ------------------------------------------------------------ coming back

    def restore(self, recovery: durable.Recovery, now_ns: int, load_ns: int = 0) -> list[SyncerEffect]:
        """Continue the run of an earlier syncer. Everybody is away until heard of again. Raises StoreError for a record
        that makes no sense, ConfigError for one that does not fit the settings; this machine is of no use then."""
        try:
            return self._restore(recovery, now_ns, load_ns)
        except AtollError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            text = f"the record of this run makes no sense ({error!r:.200}); recover from an older snapshot"
            raise StoreError(text) from error

    def _restore(self, recovery: durable.Recovery, now_ns: int, load_ns: int) -> list[SyncerEffect]:
        fragments = int(recovery.rows["run"]["fragments"])
        if self._given.fragments not in (0, fragments):
            raise ConfigError(
                f"this run has {fragments} fragments and cannot go on with {self._given.fragments}; leave --fragments "
                "away, or start a new run folder"
            )
        self.run = str(recovery.rows["run"]["run"])
        self._lay_out(build_layout(durable.tensors_of(recovery.rows), fragments))
        self.membership = durable.restore_members(recovery.rows, recovery.columns, fragments, now_ns)
        self.membership.generations_skipped = durable.GENERATIONS_SKIPPED * max(1, self.epoch - 1)
        self.book = RoundBook(self.config, self.membership, self.ledger)
        live = durable.live_generations(self.membership)
        waiting = [h for h in recovery.handed if self._waits(h, recovery.columns)]
        live |= {(h.contribution.id.learner, h.contribution.id.generation) for h in waiting}
        for fragment, column in sorted(recovery.columns.items()):
            durable.restore_column(self.book, self.membership, self.ledger, fragment, column, live)
        self._hold_again(waiting)
        self.ledger.restore_gone(int(recovery.rows.get("ledger", {}).get("gone_processed", 0)))
        for member in self.membership.members.values():
            if member.state is MemberState.LEFT:
                continue
            self.ledger.set_gone(member.learner, member.generation, member.state is MemberState.LOST)
        self.leases.load(recovery.rows)
        self._lease_rows = {key: row for key, row in recovery.rows.items() if key.startswith("data/")}
        self.recovered_from = recovery.source
        if recovery.rows.get(durable.SETTINGS_KEY) != self.config.to_dict():
            self._remember(durable.SETTINGS_KEY, self.config.to_dict())
        # Even if every commit was on disk before its publication, a disk that failed for a while may have missed some:
        # rounds begin when those who were in the run have said what they hold. They train on meanwhile.
        self.healing = self._heal_from(recovery.rows)
        return self._remembered([self._recovered(recovery, load_ns)])

    def _waits(self, handed: HandedOver, columns: Mapping[int, durable.Column]) -> bool:
        """True if this contribution of a learner that left was not merged before the crash."""
        column = columns.get(handed.contribution.id.fragment)
        return column is not None and not durable.is_merged(handed.contribution.id, column)

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

    def holds(self, identity: ContributionId) -> bool:
        """True while this contribution waits for a round, is in one, or is being merged."""
        return self.book.holds(identity)

    def _recovered(self, recovery: durable.Recovery, load_ns: int) -> Note:
        fields = {
            "source": recovery.source,
            "exact": recovery.exact,
            "versions": [track.version for track in self.book.tracks],
            "tokens_merged": self.ledger.totals().merged,
            "load_ns": load_ns,
            "problems": list(recovery.problems),
        }
        return Note("SyncerRecovered", fields)

    def _heal_from(self, rows: Mapping[str, Any]) -> Healing:
        known = {}
        for fragment in range(self.config.fragments):
            row = rows.get(durable.version_key(fragment))
            if row is not None:
                known[fragment] = Claim(int(row["version"]), int(row["checksum"]))
                self._tape_version[fragment] = int(row["version"])
            for name, generation, seq, version in (row or {}).get("merged", []):
                identity = ContributionId(str(name), int(generation), fragment, int(seq))
                self._tape_merged[identity] = int(version)
        expected = {m.learner for m in self.membership.members.values() if m.state is MemberState.AWAY}
        return Healing([track.version for track in self.book.tracks], known, expected)

    def _lay_out(self, layout: Layout) -> None:
        self.layout, self._frozen = layout, ("", 0)
        self.config = replace(self._given, fragments=len(layout.fragments))
        self.ledger = Ledger([fragment.parameters for fragment in layout.fragments])
        self.book = RoundBook(self.config, self.membership, self.ledger)

    def _balance(self, member: Member, pending: tuple[int, ...]) -> None:
        """After a restart that lost something: what a learner has neither pending nor discarded was merged by the
        earlier syncer. It is in the parameters if a learner brought them back, else it was rolled back."""
        member.unbalanced = False
        account = self.ledger.account(member.learner, member.generation)
        for fragment, tokens in enumerate(pending[: self.config.fragments]):
            account.balance(fragment, tokens, merged=fragment in self._healed)
