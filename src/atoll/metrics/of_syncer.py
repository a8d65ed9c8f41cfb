"""The metrics of a syncer, from its events."""

from __future__ import annotations

import time

from atoll.metrics.families import Families
from atoll.observe import Event, events

FADE = 0.1
"""Weight of the newest in the mean time between two commits: it follows a change within some ten of them."""


class SyncerMetrics:
    """`take` is called with every event of the syncer."""

    def __init__(self) -> None:
        f = self.families = Families()
        f.gauge("atoll_syncer_epoch", "Counts the syncers of this run.")
        f.gauge("atoll_learners", "Learners by the state that the syncer has them in.", "state")
        f.gauge("atoll_learner_up", "1 for a learner that is active, 0 for one that is away or lost.", "learner")
        f.gauge("atoll_quorum", "Contributions that the newest round needs.")
        f.gauge("atoll_rounds_open", "Rounds that are collecting.")
        f.counter("atoll_rounds_closed", "Rounds that were closed, by why.", "reason")
        f.counter("atoll_rounds_aborted", "Rounds without a quorum in time, launched again.")
        f.counter("atoll_round_seconds", "Time from launch to close, added up over rounds.")
        f.counter("atoll_commits", "Versions that were published.")
        f.gauge("atoll_last_commit_timestamp_seconds", "When the newest version was published.")
        f.gauge("atoll_commit_period_seconds", "Mean time between two commits, lately.")
        f.counter("atoll_contributions", "Contributions by learner, and what became of them.", "learner", "outcome")
        f.counter("atoll_contribution_bytes", "Bytes of contributions by learner.", "learner")
        f.gauge("atoll_last_contribution_timestamp_seconds", "When a learner last contributed.", "learner")
        f.counter(
            "atoll_transfer_bytes", "Bytes through this syncer's process, up (from learners) and down.", "direction"
        )
        f.counter("atoll_tokens_processed", "Tokens that learners have processed.")
        f.counter("atoll_tokens_merged", "Tokens whose progress is in the model.")
        f.gauge("atoll_tokens_pending", "Tokens whose progress is under way.")
        f.counter("atoll_tokens_discarded", "Tokens that will never be merged, by cause.", "cause")
        f.gauge("atoll_ledger_exact", "1 while processed = merged + pending + discarded.")
        f.gauge("atoll_durability_degraded", "1 while commits cannot be written as the run asked for.")
        f.counter("atoll_store_seconds", "Time spent on making commits durable.")
        f.counter("atoll_snapshots", "Snapshots that were tried, by outcome.", "outcome")
        f.gauge("atoll_last_snapshot_timestamp_seconds", "When the newest snapshot was written.")
        f.gauge("atoll_data_chunks", "Chunks of a data stream by what became of them.", "stream", "state")
        f.counter("atoll_warnings", "Warnings that this process gave out.")
        f.set("atoll_ledger_exact", 1.0)
        self._members: dict[str, str] = {}
        self._commit_s = 0.0

    def take(self, event: Event) -> None:
        f, now_s = self.families, time.time()
        match event:
            case events.SyncerStarted():
                f.set("atoll_syncer_epoch", event.epoch)
                f.set("atoll_durability_degraded", 0.0)
            case events.SyncerStats():
                self._stats(event)
            case events.MemberChanged():
                self._member(event)
            case events.RoundLaunched():
                f.set("atoll_quorum", event.quorum)
            case events.RoundClosed():
                f.add("atoll_rounds_closed", 1, event.reason)
                f.add("atoll_round_seconds", event.close_ns / 1e9)
            case events.RoundAborted():
                f.add("atoll_rounds_aborted", 1)
            case events.Committed():
                self._committed(event, now_s)
            case events.ContributionReceived():
                f.add("atoll_contributions", 1, event.learner, "late" if event.late else "in time")
                f.add("atoll_contribution_bytes", event.bytes, event.learner)
                f.set("atoll_last_contribution_timestamp_seconds", now_s, event.learner)
            case events.ContributionRefused():
                f.add("atoll_contributions", 1, event.learner, "refused")
            case events.DurabilityChanged():
                f.set("atoll_durability_degraded", float(event.level != event.wanted))
            case events.SnapshotWritten():
                f.add("atoll_snapshots", 1, "written")
                f.set("atoll_last_snapshot_timestamp_seconds", now_s)
            case events.SnapshotFailed():
                f.add("atoll_snapshots", 1, "failed")
            case events.DataLedger():
                for state in ("done", "in_hand", "pool", "lost"):
                    f.set("atoll_data_chunks", getattr(event, state), event.stream, state)
            case events.Warned():
                f.add("atoll_warnings", 1)
            case _:
                pass

    def _stats(self, event: events.SyncerStats) -> None:
        f = self.families
        f.set("atoll_rounds_open", event.rounds_open)
        for direction, size in (("up", event.bytes_up), ("down", event.bytes_down)):
            f.set("atoll_transfer_bytes", size, direction)
        f.set("atoll_tokens_processed", event.tokens_processed)
        f.set("atoll_tokens_merged", event.tokens_merged)
        f.set("atoll_tokens_pending", event.tokens_pending)
        for cause, tokens in event.tokens_discarded.items():
            f.set("atoll_tokens_discarded", tokens, cause)
        known = event.tokens_merged + event.tokens_pending + sum(event.tokens_discarded.values())
        f.set("atoll_ledger_exact", float(known == event.tokens_processed))

    def _member(self, event: events.MemberChanged) -> None:
        self._members[event.learner] = event.state
        self.families.clear("atoll_learners")
        for state in ("joining", "active", "away", "lost", "left"):
            self.families.set("atoll_learners", sum(one == state for one in self._members.values()), state)
        if event.state != "joining":
            self.families.set("atoll_learner_up", float(event.state == "active"), event.learner)

    def _committed(self, event: events.Committed, now_s: float) -> None:
        f = self.families
        if self._commit_s:
            passed_s, mean_s = now_s - self._commit_s, f.get("atoll_commit_period_seconds")
            f.set("atoll_commit_period_seconds", mean_s + FADE * (passed_s - mean_s) if mean_s else passed_s)
        self._commit_s = now_s
        f.set("atoll_last_commit_timestamp_seconds", now_s)
        f.add("atoll_commits", 1)
        f.add("atoll_store_seconds", event.store_ns / 1e9)
