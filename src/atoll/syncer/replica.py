"""The standby's side of `--replicate`: it listens while it waits, keeps what the primary sends, and says so when it is
on disk. It takes over when it has heard nothing for `--standby-after`.

It is *ready* when it has everything that was ever published. Only then it takes over. It is not ready before it was
filled for the first time, and after either side has ended in order.

There is no shared place, so that its own answers are the fence. A primary publishes what this standby has answered for,
and a standby that has decided to take over answers nobody any more. That it has is on its tape before it serves: it
never follows an older primary again, also not after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import xxhash

from atoll.core import (
    EPOCH_KEY,
    FetchHeader,
    FetchRequest,
    Hello,
    Identity,
    LearnerMessage,
    PushHeader,
    PushReply,
    Refusal,
    SyncerMessage,
)
from atoll.errors import ConfigError, RefusedError, UnreachableError
from atoll.private import private_umask
from atoll.store import RunStore, open_store
from atoll.syncer import replica_calls as calls
from atoll.syncer.begin import EPOCHS_ROW
from atoll.syncer.options import SyncerOptions
from atoll.syncer.recover import is_seeded
from atoll.wire import Bytes, ServerOptions, ShardPeer, attach_handler, serve

T = TypeVar("T")
LOOK_S = 0.5
"""Between two looks at the time since the primary was heard."""
LEAVE_S = 5.0
"""For the primary to hear that this standby ends."""
STANDS_BY = "this syncer stands by for another one, and does not serve yet; ask that one, or again soon"
_HANDED_NAME = re.compile(r"[0-9a-f-]{1,64}")
Reply = tuple[Mapping[str, Any], memoryview | bytes]


def check_replica(options: SyncerOptions) -> None:
    """Raises ConfigError for a standby or a primary that could not keep its word."""
    if not (options.replica or options.replicate):
        return
    which = "--replica" if options.replica else "--replicate"
    if options.run_folder is None or options.durability != "commit":
        raise ConfigError(f"{which} keeps every commit on disk; give --run-folder, and --durability commit")
    if options.shards:
        raise ConfigError(
            f"{which} copies what is in this process, and with --shards fragments are elsewhere; leave one of them away"
        )
    if options.replica and options.replicate:
        raise ConfigError("a standby that waits has nothing to send; give --replica there and --replicate here")


class StandbyReplica:
    """Implements `atoll.wire.SyncerService`, for learners that ask too early, and answers the primary."""

    def __init__(
        self,
        store: RunStore,
        after_s: float,
        say: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now_s = now_s
        self.ended = ""
        """Why nobody is needed in the primary's place."""
        self._store, self._after_s, self._say = store, after_s, say
        self._handover = store.handover()
        loaded = store.load()
        rows = loaded.rows if loaded is not None else {}
        self.row: dict[str, Any] = {"ready": False, "led": False, "epoch": 0, "instance": "", **_row_in(rows)}
        self._held = (
            {f: [one.version, int(one.meta["checksum"])] for f, one in loaded.fragments.items()} if loaded else {}
        )
        self._peer: ShardPeer | None = None
        self._heard_s = self._now_s()
        self._looked_s = self._now_s()
        self._closing = self._leaving = False
        self._following = asyncio.Lock()
        """Held while another primary comes, and while this standby takes over."""
        self._writes: set[asyncio.Future[Any]] = set()

    # ------------------------------------------------------------ is the primary there?

    def gone(self) -> str:
        """Why it is taken for gone; empty while it is not."""
        now_s, before_s = self._now_s(), self._looked_s
        self._looked_s = now_s
        if now_s - before_s > self._after_s / 2 or self._following.locked():
            self._heard_s = now_s  # this process was frozen, or a primary comes: nobody is told gone for that
        silent_s = now_s - self._heard_s
        return f"it has not been heard for {silent_s:.0f} s" if silent_s >= self._after_s and self.row["ready"] else ""

    async def take_over(self) -> str:
        """Nobody gets an answer any more. What was answered is on disk, and that this standby leads; or else why that
        could not be written, and it is to be tried again."""
        async with self._following:
            self._closing = True
            if self._peer is not None:
                self._peer.close("this standby takes over")
            await self._rest()
            try:
                await self._keep_row(ready=False, led=True)
            except OSError as error:
                self.row |= {"ready": True, "led": False}
                return f"it cannot write that it takes over ({error}); it tries again: look at its disk"
        return ""

    async def leave(self) -> None:
        """End in order: the primary may go on without this standby, which will not take over."""
        self._leaving = True
        await self._keep_row(ready=False)
        if self._peer is not None and not self._peer.closed:
            with contextlib.suppress(UnreachableError, RefusedError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._peer.call(calls.LEAVE, {})

    def close(self) -> None:
        self._store.close()

    def check_epoch(self) -> None:
        """Raise FencedSyncerError if another process has taken this folder over."""
        if not self._following.locked():
            self._store.check_epoch()

    async def _keep_row(self, **changed: Any) -> None:
        self.row |= changed
        self._store.remember({calls.REPLICA_ROW: self.row, EPOCH_KEY: self._epoch_in(self._store.rows())})
        await self._write(self._store.sync)

    def _epoch_in(self, rows: Mapping[str, Any]) -> int:
        """Whoever goes on from here has a higher one than the primary."""
        return max(int(rows.get(EPOCH_KEY, 0)), int(self.row["epoch"]))

    async def _write(self, write: Callable[[], T]) -> T:
        """On a thread, to its end: also if the link breaks meanwhile."""
        writing = asyncio.ensure_future(asyncio.to_thread(write))
        self._writes.add(writing)
        writing.add_done_callback(self._writes.discard)
        return await asyncio.shield(writing)

    async def _rest(self) -> None:
        while self._writes:
            await asyncio.wait(self._writes)

    # ------------------------------------------------------------ the primary

    def answering(self, peer: ShardPeer) -> Callable[[str, dict[str, Any], Bytes], Any]:
        """Answers what comes through this link; the first call on it must be `replicate`."""

        async def answer(method: str, values: dict[str, Any], data: Bytes) -> Reply:
            if method == calls.REPLICATE:
                async with self._following:
                    return await self._follow(peer, values), b""
            if peer is not self._peer or self._closing:
                raise RefusedError(Refusal.STALE_EPOCH, "it follows a newer syncer of this run; let this one end")
            self._heard_s = self._now_s()
            return await self._do(method, values, data), b""

        return answer

    async def _follow(self, peer: ShardPeer, values: dict[str, Any]) -> dict[str, Any]:
        if self._closing:
            raise RefusedError(Refusal.STALE_EPOCH, "it takes over this run; let this one end")
        self._check_primary(values)
        before, self._peer = self._peer, None
        if before is not None:
            before.close("the primary has another link now")
        await self._rest()
        again = values["instance"] == self.row["instance"]
        if not again and self.row["instance"]:
            await asyncio.to_thread(self._reopen)  # a primary that came back may go on from an older version
        ready = bool(self.row["ready"]) and not values["alone"]
        await self._keep_row(epoch=int(values["epoch"]), instance=str(values["instance"]), ready=ready)
        self._peer, self._heard_s = peer, self._now_s()
        self._say(f"follows the primary of run {values['run']} (epoch {values['epoch']})")
        return {"ready": ready, "held": {str(f): one for f, one in self._held.items()} if again else {}}

    def _reopen(self) -> None:
        self._store = self._store.reopen()
        self._store.load()

    def _check_primary(self, values: Mapping[str, Any]) -> None:
        if values.get("link") != calls.LINK_VERSION:
            raise RefusedError(Refusal.PROTOCOL, "it is of another version; install the same one on both sides")
        rows, epoch = self._store.rows(), int(values["epoch"])
        held = str(rows["run"]["run"]) if is_seeded(rows) else ""
        if held and held != values["run"]:
            raise RefusedError(
                Refusal.NOT_ALLOWED,
                f"it holds run {held}, and this is run {values['run']}; start the standby on an empty --run-folder, or "
                "this syncer on the state of that run",
            )
        known = int(self.row["epoch"]) if held else 0
        if epoch < known or (epoch == known and values["instance"] != self.row["instance"]):
            raise RefusedError(
                Refusal.STALE_EPOCH, f"it follows a newer syncer of this run (epoch {known}, not {epoch}); let this end"
            )

    async def _do(self, method: str, values: dict[str, Any], data: Bytes) -> dict[str, Any]:
        match method:
            case calls.BEAT:
                pass
            case calls.ROWS:
                await self._take_rows(values["rows"], whole=bool(values["all"]))
            case calls.COMMIT:
                return await self._take_commit(values, data)
            case calls.HANDED | calls.DROPPED:
                await self._take_handed(str(values["name"]), values.get("about"), data)
            case calls.FILLED:
                await self._keep_row(ready=not self._leaving)
                self._say("has everything, and takes over when the primary is gone")
            case calls.ENDED:
                await self._keep_row(ready=False)
                self.ended = "the primary has ended in order, so nobody is needed in its place; start a syncer to go on"
            case _:
                raise RefusedError(Refusal.BAD_REQUEST, f"it knows no {method!r}; update the older side")
        return {}

    async def _take_rows(self, rows: dict[str, Any], *, whole: bool) -> None:
        rows.pop(calls.REPLICA_ROW, None)
        if whole:
            rows = {**{key: None for key in self._store.rows() if key != calls.REPLICA_ROW}, **rows}
        if whole or EPOCH_KEY in rows:
            rows[EPOCH_KEY] = self._epoch_in({key: value for key, value in rows.items() if value is not None})
        self._store.remember(rows)
        await self._write(self._store.sync)

    async def _take_commit(self, values: dict[str, Any], data: Bytes) -> dict[str, Any]:
        fragment, version, names = int(values["fragment"]), int(values["version"]), list(values["names"])

        def commit() -> int:
            parts = [part.copy().view(np.float32) for part in np.split(data, len(names))]
            arrays = dict(zip(names, parts, strict=True))
            checksum = xxhash.xxh3_64_intdigest(arrays["theta"].data)
            if checksum != int(values["checksum"]):
                text = (
                    f"version {version} of fragment {fragment} has checksum {checksum} here, not {values['checksum']}"
                )
                raise RefusedError(Refusal.CHECKSUM, f"{text}; look at the memory of both machines")
            self._store.commit(fragment, version, arrays, values["record"])
            return checksum

        self._held[fragment] = [version, await self._write(commit)]
        return {"checksum": self._held[fragment][1]}

    async def _take_handed(self, name: str, about: Mapping[str, Any] | None, payload: Bytes) -> None:
        if not _HANDED_NAME.fullmatch(name):
            raise RefusedError(Refusal.BAD_REQUEST, f"{name!r} is no name of a contribution")
        if about is None:
            await self._write(lambda: self._handover.drop(name))
        else:
            await self._write(lambda: self._handover.put(name, about, payload))

    # ------------------------------------------------------------ SyncerService: learners go to the primary

    def open_session(
        self,
        session: int,
        hello: Hello,
        send: Callable[[SyncerMessage], None],
        identity: Identity | None = None,
    ) -> None:
        raise RefusedError(Refusal.BUSY, STANDS_BY)

    def receive(self, session: int, message: LearnerMessage) -> None:
        """Nobody has a session."""

    def close_session(self, session: int, reason: str) -> None:
        """Nobody has a session."""

    def ask_to_leave(self, learner: str) -> str:
        raise RefusedError(Refusal.UNKNOWN_LEARNER, STANDS_BY)

    async def take_snapshot(self) -> str:
        raise RefusedError(Refusal.NOT_ALLOWED, STANDS_BY)

    def check_sender(self, header: PushHeader) -> None:
        raise RefusedError(Refusal.BUSY, STANDS_BY)

    async def push_begin(self, header: PushHeader) -> int:
        raise RefusedError(Refusal.BUSY, STANDS_BY)

    async def push_complete(self, header: PushHeader, payload: Bytes) -> PushReply:
        raise RefusedError(Refusal.BUSY, STANDS_BY)

    async def fetch_open(self, request: FetchRequest) -> tuple[FetchHeader, memoryview]:
        raise RefusedError(Refusal.BUSY, STANDS_BY)

    def status(self) -> dict[str, object]:
        rows = self._store.rows()
        return {
            "stands_by": True,
            "run": str(rows["run"]["run"]) if is_seeded(rows) else "",
            "epoch": self.row["epoch"],
            "ready": self.row["ready"],
            "heard_s": round(self._now_s() - self._heard_s, 1),
            "versions": [version for _, (version, _) in sorted(self._held.items())],
        }


def wait_as_replica(options: SyncerOptions, wanted: ServerOptions, say: Callable[[str], None]) -> bool:
    """Keep a copy of the primary until it is gone. False if there is nothing to take over: it ended in order, or we
    were told to."""
    with private_umask():
        return asyncio.run(_wait(options, wanted, say))


async def _wait(options: SyncerOptions, wanted: ServerOptions, say: Callable[[str], None]) -> bool:
    assert options.run_folder is not None
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    store = open_store(options.run_folder / "state")
    replica = StandbyReplica(store, options.standby_after_s, say)
    try:
        if replica.row["led"]:
            say("has taken over before, and goes on; for a standby give an empty --run-folder")
            return True
        server = await serve(replica, wanted, attach=attach_handler(replica.answering))
        say(f"stands by at {server.address} for a primary with --replicate")
        try:
            return await watch_primary(replica, stop, say)
        finally:
            await server.cut()
    finally:
        replica.close()


async def watch_primary(replica: StandbyReplica, stop: asyncio.Event, say: Callable[[str], None]) -> bool:
    """True when it is this standby's turn."""
    trouble = ""
    while not stop.is_set():
        replica.check_epoch()
        if replica.ended:
            say(replica.ended)
            return False
        if gone := replica.gone():
            if not trouble:
                say(f"the primary is gone: {gone}; takes over")
            if not (now := await replica.take_over()):
                return True
            if now != trouble:
                trouble = now
                say(now)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_S)
    await replica.leave()
    return False


def _row_in(rows: Mapping[str, Any]) -> dict[str, Any]:
    row = rows.get(calls.REPLICA_ROW)
    return dict(row) if isinstance(row, Mapping) else {}


def mark_led(store: RunStore | None) -> None:
    """The folder of a standby is served from: it never follows a primary again."""
    row = _row_in(store.rows()) if store is not None else {}
    if store is not None and row and not row.get("led"):
        store.remember({calls.REPLICA_ROW: {**row, "ready": False, "led": True}})
        store.sync()


def forget_unbegun(store: RunStore) -> None:
    """What a run that never began may have left; but not that this folder is served from, nor the epochs that learners
    have seen. Without the first it followed the older primary after its next restart, and both served the run (draw 7,
    seed 455); without the others its epoch was below that of the primary whose place it took (seed 865)."""
    kept = {calls.REPLICA_ROW, EPOCH_KEY, EPOCHS_ROW}
    store.remember({key: None for key in store.rows() if key not in kept})


def refused_primary(run: str, epoch: int, method: str, values: Mapping[str, Any]) -> RefusedError:
    """What a syncer's port answers to whoever takes it for a shard or a standby: it is neither (any more)."""
    if method == calls.REPLICATE and values.get("run") == run:
        return RefusedError(
            Refusal.STALE_EPOCH,
            f"it has taken over this run (epoch {epoch}); let this one end, and start it anew on an empty "
            "--run-folder, as a standby",
        )
    return RefusedError(
        Refusal.NOT_ALLOWED,
        f"this is a syncer of run {run}, not a shard and not a standby; give the address of one (a standby that took "
        "over before this run had a version begins another one: start this syncer anew as its standby)",
    )
