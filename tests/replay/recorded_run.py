"""A recorded run without a network: the syncer's real shell, keeper and store, and learners that only speak.

The learners answer every request with a random contribution, follow published updates, and bring lost versions back. A
life of the syncer can be ended in order or cut off, as by kill -9: what was only in memory is gone then.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from atoll.codec import get_codec, update_codec
from atoll.core import effects as fx
from atoll.core.config import CODECS, SyncConfig
from atoll.core.layout import build_layout
from atoll.core.messages import (
    NO_VERSION,
    PROTOCOL_VERSION,
    FetchKind,
    FetchRequest,
    Heal,
    Hello,
    InlinePush,
    Progress,
    Published,
    PushHeader,
    PushKind,
    Ready,
    Request,
    Start,
    TensorSpec,
    Welcome,
)
from atoll.observe import EventWriter
from atoll.store import open_store
from atoll.store.tape import TAPE_FILES_ALL
from atoll.syncer.recover import recover
from atoll.syncer.shell import SyncerShell
from atoll.syncer.state_writer import StateWriter

TENSORS = (TensorSpec("w", (24, 64), "float32", "rda"), TensorSpec("e", (700,), "float32", "mean"))
WAIT_S = 120.0
"""The first run may compile the kernels."""
TOKENS = 10


def settings(**changes: Any) -> SyncConfig:
    return SyncConfig(**{"fragments": 3, "sync_every": 3, "learners_expected": 2, "quorum": "all", **changes})


class Puppet:
    """A learner without training. It outlives the syncers."""

    def __init__(self, number: int, seed: int = 0, way: float = 0.0) -> None:
        self.way = way
        """How far its contributions lie along one direction that all have in common; negative: against it."""
        self.name, self.instance, self.session = f"p{number}", secrets.token_hex(4), number
        self.dice = np.random.default_rng([number, seed])
        self.layout = build_layout(TENSORS, 3)
        self.inbox: list[Any] = []
        self.generation = 0
        self.run, self.epoch, self.secret = "", 0, ""
        self.step = self.steps = 0
        self.versions = [NO_VERSION] * 3
        self.thetas = [np.zeros(fragment.size, np.float32) for fragment in self.layout.fragments]
        self.seqs = [0] * 3
        self.ready = False
        self.read_in: set[str] = set()
        """Codecs of updates that came."""

    def join(self, shell: SyncerShell) -> None:
        self.inbox, self.ready = [], False
        known = self.generation > 0
        hello = Hello(
            self.name,
            self.instance,
            PROTOCOL_VERSION,
            TENSORS,
            generation=self.generation,
            run=self.run,
            epoch=self.epoch,
            bases=tuple(self.versions) if known else (),
            checksums=tuple(xxhash.xxh3_64_intdigest(theta.data) for theta in self.thetas) if known else (),
            codecs=CODECS.names(),
            any_update=True,
        )
        shell.open_session(self.session, hello, self.inbox.append)

    def header(self, kind: PushKind, fragment: int, data: bytes, codec: str, **more: int) -> PushHeader:
        fields: dict[str, Any] = {
            "round": 0,
            "attempt": 0,
            "seq": 0,
            "base_version": NO_VERSION,
            "steps": 0,
            "tokens": 0,
            **more,
        }
        checksum = xxhash.xxh3_64_intdigest(data)
        fields |= {"codec": codec, "size": len(data), "checksum": checksum, "secret": self.secret}
        return PushHeader(kind, self.name, self.generation, fragment, **fields)

    async def pump(self, shell: SyncerShell) -> None:
        while self.inbox:
            message = self.inbox.pop(0)
            if isinstance(message, Welcome):
                self.generation, self.run, self.epoch = message.generation, message.run, message.epoch
                self.secret = message.secret
                for fragment in range(3) if message.seed else ():
                    theta = self.dice.standard_normal(self.thetas[fragment].size).astype(np.float32)
                    theta *= fragment > 0  # many models begin with zeros in places
                    header = self.header(PushKind.SEED, fragment, theta.tobytes(), "fp32")
                    await shell.push_complete(header, theta.view(np.uint8))
            elif isinstance(message, Start):
                await self.fetch(shell, message)
            elif isinstance(message, Heal):
                for fragment in message.fragments:
                    data = self.thetas[fragment].copy().view(np.uint8)
                    header = self.header(
                        PushKind.HEAL, fragment, data.tobytes(), "fp32", base_version=self.versions[fragment]
                    )
                    await shell.push_complete(header, data)
            elif isinstance(message, Request):
                self.contribute(shell, message)
            elif isinstance(message, Published) and message.version == self.versions[message.fragment] + 1:
                config, fragment = shell.machine.config, message.fragment
                codec = update_codec(config.codec_down, self.layout, fragment, len(message.update))
                codec.decode_add(message.update, self.thetas[fragment])
                self.read_in.add(codec.name)
                self.versions[message.fragment] = message.version

    async def fetch(self, shell: SyncerShell, message: Start) -> None:
        for fragment in range(3):
            who = (self.name, self.generation)
            request = FetchRequest(FetchKind.THETA, *who, fragment, NO_VERSION, secret=self.secret)
            header, data = await shell.fetch_open(request)
            self.thetas[fragment] = np.frombuffer(data, np.float32).copy()
            self.versions[fragment] = header.version
        self.step, self.ready = max(self.step, message.step), True
        shell.receive(self.session, Ready(self.step, tuple(self.versions)))

    def contribute(self, shell: SyncerShell, request: Request) -> None:
        fragment, codec = request.fragment, shell.machine.config.codec_up
        if shell.machine.config.adaptive == "network" and self.session % 2:
            codec = "topk:3%"  # as if its link were thin: a round then holds several codecs
        delta = ((self.dice.standard_normal(self.thetas[fragment].size) + self.way) * 1e-2).astype(np.float32)
        payload = get_codec(codec).encode_delta(delta, None, None)[0].tobytes()
        header = self.header(
            PushKind.CONTRIBUTION,
            fragment,
            payload,
            codec,
            round=request.round,
            attempt=request.attempt,
            seq=self.seqs[fragment],
            base_version=self.versions[fragment],
            steps=1,
            tokens=TOKENS,
        )
        self.seqs[fragment] += 1
        shell.receive(self.session, InlinePush(header, payload))

    def take_step(self, shell: SyncerShell) -> None:
        self.step += 1
        self.steps += 1
        loss = 1.0
        shell.receive(
            self.session, Progress(self.step, self.steps, TOKENS * self.steps, 10**6, loss, tuple(self.versions))
        )


class RecordedRun:
    """One run folder through several lives of its syncer."""

    def __init__(
        self, folder: Path, *, record: bool = True, seed: int = 0, ways: Sequence[float] = (0.0, 0.0), **changes: Any
    ) -> None:
        self.folder, self.record, self.changes = folder, record, {"learners_expected": len(ways), **changes}
        self.down = ""
        """What updates are encoded in, as if that had been decided before."""
        self.puppets = [Puppet(number, seed, way) for number, way in enumerate(ways)]

    def live(self, merges: int, *, crash: bool = False, record: bool | None = None, **changes: Any) -> list[int]:
        """A syncer's life of so many merges; returns the versions that it came to."""
        self.changes |= changes
        return asyncio.run(self._live(merges, crash, self.record if record is None else record))

    async def _live(self, merges: int, crash: bool, record: bool) -> list[int]:
        store = open_store(self.folder / "state", tape_files_kept=TAPE_FILES_ALL)
        writer = EventWriter(self.folder / "events" / f"syncer-{store.epoch}.jsonl")
        found = recover(store, None, "commit")
        keeper = StateWriter(store, "commit", 30.0, writer, record=record)
        run = found[0].rows["run"]["run"] if found is not None else secrets.token_hex(8)
        shell = SyncerShell(settings(**self.changes), run, writer, epoch=store.epoch, keeper=keeper)
        shell.platform.close_link = lambda session, reason: None
        if found is not None:
            shell.restore(found[0], found[1], {}, 0)
        shell.start()
        shell.machine.book.adaptive.restore({"codec_down": self.down}, 0)
        for puppet in self.puppets:
            puppet.join(shell)
        await self._until(shell, lambda: shell.machine.committed and all(p.ready for p in self.puppets))
        target = shell.machine.book.commits + merges
        await self._until(shell, lambda: shell.machine.book.commits >= target)
        if crash:
            for task in list(shell.platform.tasks):
                task.cancel()
            store._tenure.release()
        else:
            shell.apply(fx.StopRequested("the test is over"))
            await shell.close()
            assert shell.failure is None and not keeper.degraded, (shell.failure, keeper.degraded)
            assert shell.state is not None
            shell.state.save(self.folder / "model.safetensors")
        writer.close()
        return [track.version for track in shell.machine.book.tracks]

    async def _until(self, shell: SyncerShell, condition: Any) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                for puppet in self.puppets:
                    await puppet.pump(shell)
                    if puppet.ready and shell.machine.committed and not shell.machine.book.in_flight:
                        puppet.take_step(shell)
                await asyncio.sleep(0.001)
                assert shell.failure is None, shell.failure
