"""The rank that speaks for its learner: it has the machine, the link, and the word on what all ranks do.

To the driver it is a host like any other. What the driver asks of arrays becomes commands to all ranks; what it asks of
the training thread becomes orders, which all ranks carry out at the same boundary (`seats`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import xxhash

from atoll.codec import block_bytes
from atoll.core import (
    INLINE_BYTES_MAX,
    FetchedPayload,
    Layout,
    LearnerMachine,
    OutgoingPayload,
    Payload,
    PreparedVersion,
    Request,
    SyncConfig,
    SyncerMessage,
)
from atoll.core import effects as fx
from atoll.errors import ConfigError
from atoll.learner.arrays import whole_payload
from atoll.learner.island.arrays import RankArrays
from atoll.learner.island.link import RankLink
from atoll.learner.island.parameters import RankParameters
from atoll.learner.island.work import (
    Op,
    RankCommand,
    RankWork,
    config_bytes,
    contribute_command,
    signed,
    stage_command,
)
from atoll.learner.island.worker import RankWorker
from atoll.learner.parameters import F32
from atoll.learner.shell import LearnerShell
from atoll.learner.vault import HeldVersion, Vault
from atoll.observe import Writer
from atoll.wire import ClientOptions


class SpeakerArrays:
    """`HostArrays` of the driver: its own part at a boundary, and commands for the rest. Under the shell's lock."""

    def __init__(self, worker: RankWorker) -> None:
        self._worker = worker
        self.rank: RankArrays | None = None
        self._taken: dict[int, int] = {}
        """The boundary at which the copy of a fragment was taken that may still be asked for."""
        self.staged: dict[int, fx.Adopt] = {}
        """What every rank has ready."""
        self.kept = False
        """Whether the last version that was offered will be adopted."""

    @property
    def here(self) -> RankArrays:
        assert self.rank is not None
        return self.rank

    @property
    def vault(self) -> Vault:
        return self.here.vault

    @property
    def snapshot_ns(self) -> int:
        return self.rank.snapshot_ns if self.rank is not None else 0

    @property
    def adopt_ns(self) -> int:
        return self.rank.adopt_ns if self.rank is not None else 0

    def show_published(self) -> None:
        self.here.show_published()

    def published(self) -> list[F32]:
        return self.here.published()

    def take(self, fragment: int) -> None:
        self.drop(fragment)
        self._taken[fragment] = self._worker.boundary
        self.here.take(fragment, self._worker.boundary)

    def drop(self, fragment: int) -> None:
        boundary = self._taken.pop(fragment, None)
        if boundary is not None:
            self._worker.post(RankCommand(Op.DROP, (fragment, boundary)))

    def give(self, fragment: int) -> int:
        """The copy belongs to a contribution from now on."""
        return self._taken.pop(fragment)

    def adopt(self, effect: fx.Adopt) -> int:
        self.staged.pop(effect.fragment, None)
        return self.here.adopt(effect)

    def settle(self, fragment: int, seq: int, merged: bool) -> None:
        self._worker.post(RankCommand(Op.SETTLE, (fragment, seq, int(merged))))

    def forget_residuals(self) -> None:
        self._worker.post(RankCommand(Op.FORGET_RESIDUALS))

    def forget_prepared(self, fragment: int) -> None:
        self.staged = {f: adopt for f, adopt in self.staged.items() if fragment not in (-1, f)}
        self._worker.post(RankCommand(Op.FORGET_PREPARED, (fragment,)))

    def keep(self, fragment: int, made: Any) -> None:
        self.kept = True


class SpeakerShell(LearnerShell):
    _arrays: Any

    def __init__(
        self,
        parameters: RankParameters,
        machine: LearnerMachine,
        options: ClientOptions,
        writer: Writer,
        link: RankLink,
    ) -> None:
        super().__init__(parameters, machine, options, writer)
        self.work = RankWork(parameters, link, self.changed)
        self.worker = RankWorker(link, self.work, self.changed)
        self.laid_out = False
        """All ranks know the layout."""
        self.fresh = False
        """Something has happened since the training thread last looked."""
        self.standing = True
        """The training thread does not step: it joins, waits or leaves."""
        self._staging: set[int] = set()

    # ------------------------------------------------------------ life

    def start(self) -> None:
        self.worker.start()
        super().start()

    def stop(self, timeout_s: float) -> None:
        with self.changed:
            self.worker.end()  # first: the other ranks wait for it
        super().stop(timeout_s)
        self.worker.stop(timeout_s)

    def news(self) -> None:
        self.fresh = True
        super().news()

    def _fail(self, error: Exception) -> None:
        self.fresh = True
        super()._fail(error)

    def _answer(self, done: Callable[[Any], None], result: Any) -> None:
        """From the worker's thread into the driver."""
        self._post(self._call, done, result)

    def _order(self, command: RankCommand, done: Callable[[Any], None], payload: Any = None) -> None:
        self.worker.post(command, payload, partial(self._answer, done))

    # ------------------------------------------------------------ layout

    def _make_arrays(self, layout: Layout, config: SyncConfig) -> None:
        self._arrays = SpeakerArrays(self.worker)

    def _take_settings(self, config: SyncConfig) -> None:
        for codec in (config.codec_up, config.codec_down):
            block_bytes(codec)
        self._order(RankCommand(Op.LAY_OUT, (len(config_bytes(config)),)), self._laid_out, config)

    def _laid_out(self, failed: str | None) -> None:
        assert failed is None, failed
        self._arrays.rank = self.work.arrays
        self.laid_out = True
        self.news()

    @property
    def vault(self) -> Vault | None:
        return self._arrays.vault if self.laid_out else None

    # ------------------------------------------------------------ what will be adopted

    def is_ready(self, effect: fx.Adopt) -> bool:
        """Whether all ranks have the values of this adopt where they need them."""
        return self._arrays.staged.get(effect.fragment) == effect and bool(self._arrays.here.is_staged(effect))

    def stage_wanted(self) -> None:
        """Have what may be adopted next brought to where it is needed. Under the lock."""
        if not self.laid_out:
            return
        for effect in self.machine.wanted_adopts(standing=self.standing):
            if effect.fragment not in self._staging and not self.is_ready(effect):
                self._staging.add(effect.fragment)
                self._order(stage_command(effect), partial(self._staged, effect))

    def _staged(self, effect: fx.Adopt, failed: str | None) -> None:
        assert failed is None, failed
        self._staging.discard(effect.fragment)
        self._arrays.staged[effect.fragment] = effect
        self.stage_wanted()
        self.news()

    # ------------------------------------------------------------ the driver's world

    def on_message(self, message: SyncerMessage) -> None:
        if isinstance(message, Request) and message.codec and not _has_blocks(message.codec):
            message = replace(message, codec="")  # an adaptive run may ask for one that ranks cannot share: codec_up
        super().on_message(message)

    def contribute(self, effect: fx.Contribute, done: Callable[[OutgoingPayload | str], None]) -> None:
        command = contribute_command(effect, self._arrays.give(effect.header.fragment))
        self._order(command, lambda made: done(made if isinstance(made, str) else _outgoing(made)))

    def prepare_whole(self, fragment: int, came: FetchedPayload, done: Callable[[PreparedVersion | str], None]) -> None:
        command = RankCommand(Op.WHOLE, (fragment, came.version, signed(came.checksum)))
        self._order(command, partial(self._prepared, fragment, done), np.frombuffer(came.payload, np.uint8))

    def prepare_update(self, wanted: fx.Fetch, payload: Payload, done: Callable[[PreparedVersion | str], None]) -> None:
        command = RankCommand(Op.UPDATE, (wanted.fragment, wanted.version, signed(wanted.checksum)))
        self._order(command, partial(self._prepared, wanted.fragment, done), np.frombuffer(payload, np.uint8))

    def _prepared(self, fragment: int, done: Callable[[PreparedVersion | str], None], made: HeldVersion | str) -> None:
        self._arrays.kept = False
        done(made)
        if not self._arrays.kept and isinstance(made, HeldVersion):
            self.worker.post(RankCommand(Op.DISCARD, (fragment, made.version)))
        self.stage_wanted()

    def read_seed(self, fragment: int, done: Callable[[OutgoingPayload], None]) -> None:
        self._order(RankCommand(Op.READ_SEED, (fragment,)), lambda values: done(whole_payload(_values(values))))

    def read_held(self, fragment: int, version: int, done: Callable[[OutgoingPayload | None], None]) -> None:
        def answer(values: F32 | str) -> None:
            done(None if isinstance(values, str) else whole_payload(values))

        self._order(RankCommand(Op.READ_HELD, (fragment, version)), answer)

    def find_own(self, wanted: fx.Fetch, done: Callable[[FetchedPayload | None], None]) -> None:
        def answer(values: F32) -> None:
            own = whole_payload(_values(values))
            fits = own.checksum == wanted.checksum
            done(FetchedPayload(wanted.version, own.payload, 0, own.checksum) if fits else None)

        self._order(RankCommand(Op.READ_SEED, (wanted.fragment,)), answer)

    def copy_inner(self, done: Callable[[Sequence[OutgoingPayload]], None]) -> None:
        """Ranks of an island have their parts of the state: nobody has one that he could give."""


def _has_blocks(codec: str) -> bool:
    try:
        return bool(block_bytes(codec))
    except ConfigError:
        return False


def _values(made: F32 | str) -> F32:
    assert not isinstance(made, str), made
    return made


def _outgoing(payload: Any) -> OutgoingPayload:
    size, checksum = int(payload.nbytes), xxhash.xxh3_64_intdigest(payload.data)
    return OutgoingPayload(payload.tobytes() if size <= INLINE_BYTES_MAX else payload, size, checksum)
