"""The metrics of a shard and of a relay: they are told, once a second, what those say of themselves in their status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.metrics.families import Families
from atoll.observe import Event, Warned


class ShardMetrics:
    def __init__(self) -> None:
        f = self.families = Families()
        f.gauge("atoll_shard_led", "1 while a syncer leads this shard.")
        f.gauge("atoll_shard_epoch", "Epoch of the syncer that led it last.")
        f.gauge("atoll_shard_fragments", "Fragments that this shard has.")
        f.counter("atoll_shard_versions", "Versions of those fragments, added up.")
        f.gauge("atoll_shard_contributions_held", "Contributions of open rounds that are held here.")
        f.counter("atoll_transfer_bytes", "Bytes through this process, up (from learners) and down.", "direction")
        f.counter("atoll_warnings", "Warnings that this process gave out.")

    def take(self, event: Event) -> None:
        if isinstance(event, Warned):
            self.families.add("atoll_warnings", 1)

    def told(self, status: Mapping[str, Any], bytes_up: int, bytes_down: int) -> None:
        f, versions = self.families, status["versions"]
        f.set("atoll_shard_led", float(status["led"]))
        f.set("atoll_shard_epoch", status["epoch"])
        f.set("atoll_shard_fragments", len(versions))
        f.set("atoll_shard_versions", sum(versions.values()))
        f.set("atoll_shard_contributions_held", status["held"])
        f.set("atoll_transfer_bytes", bytes_up, "up")
        f.set("atoll_transfer_bytes", bytes_down, "down")


class RelayMetrics:
    def __init__(self) -> None:
        f = self.families = Families()
        f.gauge("atoll_relay_learners", "Learners that reach the syncer through this relay.")
        f.gauge("atoll_relay_epoch", "Epoch of the syncer that it passes on to.")
        f.counter("atoll_relay_fetched_bytes", "Bytes that came down from the syncer, once for the site.")
        f.counter("atoll_relay_served_bytes", "Bytes that learners of the site were given.")
        f.counter("atoll_relay_passed_up_bytes", "Bytes of contributions that went up.")

    def take(self, event: Event) -> None:
        """A relay has no events."""

    def told(self, status: Mapping[str, Any]) -> None:
        f = self.families
        f.set("atoll_relay_learners", len(status["learners"]))
        f.set("atoll_relay_epoch", status["epoch"])
        f.set("atoll_relay_fetched_bytes", status["bytes_fetched"])
        f.set("atoll_relay_served_bytes", status["bytes_served"])
        f.set("atoll_relay_passed_up_bytes", status["bytes_up"])
