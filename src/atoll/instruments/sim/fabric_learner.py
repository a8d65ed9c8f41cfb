"""A learner of a run with a fabric: the same process, with several addresses and a way to each shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.core import Hello, PreparedVersion, Refused, Serving, Welcome
from atoll.core import effects as fx
from atoll.instruments.sim.connection import Connection
from atoll.instruments.sim.learner_host import LearnerHost
from atoll.instruments.sim.link import VirtualLink
from atoll.instruments.sim.payloads import Payload
from atoll.instruments.sim.scenario import LearnerSpec
from atoll.wire import RELAY_LOOK_S

if TYPE_CHECKING:
    from atoll.instruments.sim.fabric import FabricWorld


class FabricLearner(LearnerHost):
    """A learner that knows several addresses, and sends fragments where the syncer says."""

    world: FabricWorld

    def __init__(self, world: FabricWorld, name: str, instance: str, spec: LearnerSpec, link: VirtualLink) -> None:
        super().__init__(world, name, instance, spec, link)
        self.places = list(world.addresses_of(name))
        self.found = self.places[0]
        """Where the last session found a syncer, or a relay."""
        self.shards: tuple[str, ...] = ()
        self.shard_of: tuple[int, ...] = ()
        self._first = self.places[0]
        self._tried = 0

    def hello(self) -> Hello:
        return replace(super().hello(), shards=True, moves=self.world.scenario.follows)

    def not_connected(self) -> None:
        self.next_place()
        super().not_connected()

    def next_place(self) -> None:
        """Each address in turn; one that has opened a session is tried again first."""
        self.places.append(self.places.pop(0))
        self._tried += 1

    def on_message(self, connection: Connection, message: Any) -> None:
        if connection is self.connection:
            if isinstance(message, Welcome):
                self.found, self._tried = self.places[0], 0
                self.shards, self.shard_of = message.shards, message.shard_of
                if self.found != self._first and self._first in self.world.relay_names:
                    self.later(int(RELAY_LOOK_S * 1e9), self._look_for_relay, connection)
            elif isinstance(message, Serving):
                self.shards, self.shard_of = message.shards, message.shard_of
                return
            elif isinstance(message, Refused):
                self.next_place()
        super().on_message(connection, message)

    def _look_for_relay(self, connection: Connection) -> None:
        """As `wire.run_sessions`: whoever had to go past its relay goes back to it when that answers."""
        if connection is not self.connection or not connection.learner_open:
            return
        if not self.world.answers(self.name, self._first):
            self.later(int(RELAY_LOOK_S * 1e9), self._look_for_relay, connection)
            return
        self.places.remove(self._first)
        self.places.insert(0, self._first)
        connection.closed_by_learner()
        self.on_down(connection, "the relay is back")

    def prepare_update(self, wanted: fx.Fetch, payload: Payload, done: Callable[[PreparedVersion | str], None]) -> None:
        """What came inside a notice of production's syncer is bytes, as on the wire."""
        super().prepare_update(wanted, np.frombuffer(payload, np.uint8), done)

    @property
    def inline_bytes_max(self) -> int:
        return 0 if self.shard_of else super().inline_bytes_max
