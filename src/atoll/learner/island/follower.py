"""A rank that does not speak: its arrays, and the thread that carries out commands. Of links
to the syncer it has only one for its parts of payloads (`carrier`)."""

from __future__ import annotations

import threading
from typing import Any

from atoll.core import NO_VERSION, SyncConfig
from atoll.errors import ConfigError
from atoll.learner.island.arrays import RankArrays
from atoll.learner.island.link import RankLink
from atoll.learner.island.parameters import RankParameters
from atoll.learner.island.work import RankWork
from atoll.learner.island.worker import RankWorker
from atoll.learner.vault import Vault
from atoll.wire import ClientOptions


class FollowerShell:
    """What a Learner sees of it, as of a LearnerShell."""

    def __init__(self, parameters: RankParameters, link: RankLink, options: ClientOptions) -> None:
        self.changed = threading.Condition()
        self.work = RankWork(parameters, link, self.changed, options)
        self.worker = RankWorker(link, self.work, self.changed)
        self.healing = False
        self.laid_out = True
        self.left_in_order = False
        """The speaker has said that it is over: it will end this rank's worker."""

    def start(self) -> None:
        self.worker.start()

    def stop(self, timeout_s: float) -> None:
        if self.left_in_order:
            self.worker.finish()
        self.worker.stop(timeout_s)
        self.work.carrier.stop(timeout_s)

    @property
    def failure(self) -> Exception | None:
        return self.worker.failure

    @property
    def arrays(self) -> RankArrays:
        assert self.work.arrays is not None
        return self.work.arrays

    @property
    def vault(self) -> Vault | None:
        return self.work.arrays.vault if self.work.arrays is not None else None

    def passed(self, boundary: int) -> None:
        with self.changed:
            self.worker.passed(boundary)

    def config(self) -> SyncConfig:
        return self.arrays.vault.config

    def bases(self) -> tuple[int, ...]:
        return tuple(held.version if held is not None else NO_VERSION for held in self.arrays.vault.current)

    def data_sources(self) -> list[Any]:
        return []

    def attach_data(self, source: Any) -> None:
        raise ConfigError(
            "leases are held by the rank of a learner that speaks (learner.island_rank == 0); call atoll.data.loader "
            "in the same way on every rank, without island=: it shares the samples out"
        )

    def poke_data(self, stream: str) -> None:
        return
