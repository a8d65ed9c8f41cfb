"""What a recorded run keeps (the seed, every merge with its payloads), and the replay that must give the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.core import Layout, Merge, SyncConfig, SyncerMachine
from atoll.instruments.check import facts
from atoll.instruments.sim.payloads import Payload, SyncerPayloads
from atoll.instruments.sim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Recorded:
    epoch: int
    effect: Merge
    checksum: int
    payloads: tuple[Payload, ...]


class SimTape:
    """Kept for runs with arrays in which no version was ever lost: those replay from the seed to the end."""

    def __init__(self, scenario: Scenario) -> None:
        self.wanted = scenario.arrays
        self._layout: Layout | None = None
        self._config: SyncConfig | None = None
        self._seed: dict[int, tuple[int, int, Any]] = {}
        self._merges: list[Recorded] = []

    def forget(self) -> None:
        """Some of what was merged is not known as it came: there is nothing to replay."""
        self.wanted, self._layout = False, None

    def seed(self, epoch: int, payloads: SyncerPayloads, machine: SyncerMachine) -> None:
        if not self.wanted:
            return
        self._layout, self._config = machine.layout, machine.config
        assert self._layout is not None
        count = len(self._layout.fragments)
        self._seed = {p: (*payloads.version(p), payloads.durable(p)) for p in range(count)}
        self._merges.clear()

    def merge(self, epoch: int, effect: Merge, checksum: int, payloads: Sequence[Payload]) -> None:
        if self.wanted:
            self._merges.append(Recorded(epoch, effect, checksum, tuple(payloads)))

    def replay(self, final: dict[int, tuple[int, int]]) -> list[facts.Replayed]:
        """Do every merge again that is part of the history which ends in `final` (version, checksum per fragment).

        A merge that was noted by a syncer which died before the commit is not part of it: the next syncer made that
        version anew. So of several notes for one version that of the newest syncer counts."""
        if self._layout is None or self._config is None:
            return []
        from atoll.instruments.sim.arrays import ArraySyncer

        again = ArraySyncer(self._layout, self._config)
        again.restore(self._seed)
        in_order = sorted(self._merges, key=lambda note: note.epoch)
        last = {(note.effect.fragment, note.effect.version): note for note in in_order}
        found = []
        for (fragment, version), note in sorted(last.items()):
            if version <= final[fragment][0]:
                effect = note.effect
                made = again.merge(fragment, version, note.payloads, effect.weights, effect.codec_down)
                found.append(facts.Replayed(fragment, version, note.checksum, made.checksum))
        return found + [
            facts.Replayed(fragment, version, checksum, again.version(fragment)[1])
            for fragment, (version, checksum) in sorted(final.items())
        ]
