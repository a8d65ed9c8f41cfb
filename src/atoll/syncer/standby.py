"""A syncer that waits beside another one and takes its place when that one is gone.

What both share says whether the primary lives:

    --snapshots    the claim on that location. It beats every 5 s; one that stands still for `standby_after_s` is dead
    --run-folder   the address in RUN/syncer.json, which must answer, and the lock on RUN/state, which dies with its
                   process. A primary that is silent while it holds the lock may be frozen: that takes
                   `standby_after_s`, too; without the lock a moment is enough

It then starts as any syncer does that continues a run: a higher epoch, the state in the shared place, and what is newer
from the learners. A primary that wakes up sees that epoch, publishes nothing more and ends. One that has ended in order
needs nobody in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.errors import AtollError, CertificateError, ConfigError, UnreachableError
from atoll.store import SnapshotTarget, is_held
from atoll.syncer.options import SyncerOptions
from atoll.wire import ClientOptions, fetch_status, split_addresses

LOOK_S = 0.5
"""Between two looks at the primary."""
SILENT_S = 2.0
"""How long a primary that does not hold its lock any more must be silent: its machine says that it is dead, and two
failed calls that it is so."""


class FolderWatch:
    """Looks at a primary through the run folder that both share."""

    def __init__(
        self, folder: Path, after_s: float, tls_ca: str = "", now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._now_s = now_s
        self._folder = folder
        self._after_s = after_s
        self._tls_ca = tls_ca
        """Whom the primary's certificate is held against; empty: the file that it names, if this machine has that."""
        self.doubt = ""
        """Why the primary cannot be asked."""
        self._heard_s = self._now_s()

    async def look(self) -> str:
        """ENDED, why the primary is gone, or nothing while it lives or was never there."""
        told = self._told()
        if told is None or await self._answers(told):
            self._heard_s = self._now_s()
            return ""
        if told.get("ended"):
            return ENDED
        held = self._held()
        if held and self.doubt:
            self._heard_s = self._now_s()
        silent_s = self._now_s() - self._heard_s
        if silent_s < (self._after_s if held else SILENT_S):
            return ""
        still = "and still holds its lock: it is frozen, or out of reach" if held else "and its process is gone"
        return f"{told['address']} has not answered for {silent_s:.0f} s, {still}"

    def _held(self) -> bool:
        """Whether a living process has the primary's lock."""
        return is_held(self._folder / "state")

    def _told(self) -> dict[str, Any] | None:
        try:
            told = json.loads((self._folder / "syncer.json").read_text())
            return told if isinstance(told, dict) and told.get("address") else None
        except (OSError, ValueError):
            return None

    async def _answers(self, told: dict[str, Any]) -> bool:
        """Whatever it says, a refusal too, it lives. With a certificate that cannot be checked it has answered, too.
        What keeps this machine from asking at all says nothing of the primary: then the lock alone does."""
        names = [str(name) for name in told.get("names", [])]
        certificate = str(told.get("certificate", ""))
        try:
            place = ClientOptions(
                address=split_addresses(f"@{self._folder / 'syncer.json'}")[0],
                tls_ca=(self._tls_ca or certificate) if certificate else "",
                tls_name=names[0] if names else "",
            )
            async with asyncio.timeout(SILENT_S):
                await fetch_status(place)
        except CertificateError:
            return True
        except ConfigError as error:
            self.doubt = f"cannot ask the primary ({error}), so that one that is frozen looks alive; give --tls-ca"
            return False
        except (UnreachableError, TimeoutError):
            return False
        except AtollError:
            return True
        return True


class ClaimWatch:
    """Looks at a primary through the snapshot location that it has claimed."""

    def __init__(self, target: SnapshotTarget, after_s: float) -> None:
        self._target = target
        self._after_s = after_s
        self.doubt = ""
        self._seen: tuple[int, str, int] | None = None
        self._moved_s = time.monotonic()

    async def look(self) -> str:
        try:
            claim = await asyncio.to_thread(self._target.claimed)
        except OSError:  # nobody can be told dead from here
            self._moved_s = time.monotonic()
            return ""
        seen = (claim.number, claim.instance, claim.beat) if claim is not None else None
        if claim is None or seen != self._seen:
            self._seen, self._moved_s = seen, time.monotonic()
        if claim is None:
            return ""
        if claim.ended:
            return ENDED
        still_s = time.monotonic() - self._moved_s
        if claim.dead:
            return f"its process ({claim.holder}) is gone"
        return f"its claim ({claim.holder}) has not moved for {still_s:.0f} s" if still_s >= self._after_s else ""


ENDED = "ended in order"


def check_standby(options: SyncerOptions) -> None:
    """Raises ConfigError for a standby that shares nothing with its primary."""
    if options.run_folder is None and not options.snapshots:
        raise ConfigError(
            "a standby needs a place that it shares with the primary, where the run's state and its epoch are; give "
            "--snapshots, or --run-folder on a file system that both have"
        )
    if not options.snapshots and options.durability == "none":
        raise ConfigError("with --durability none nothing is in the run folder to go on from; give --snapshots")


def wait_for_turn(options: SyncerOptions, target: SnapshotTarget | None, say: Callable[[str], None]) -> bool:
    """Wait until the primary is gone. False if there is nothing to take over: it ended in order, or we were told to."""
    return asyncio.run(_wait_for_turn(options, target, say))


async def _wait_for_turn(options: SyncerOptions, target: SnapshotTarget | None, say: Callable[[str], None]) -> bool:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    watch: FolderWatch | ClaimWatch
    if target is not None:
        watch = ClaimWatch(target, options.standby_after_s)
    else:
        assert options.run_folder is not None
        watch = FolderWatch(options.run_folder, options.standby_after_s, options.shard_tls_ca)
    where = target.url if target is not None else options.run_folder
    say(f"stands by for the syncer of {where}; takes over when it is gone")
    doubt = ""
    while not stop.is_set():
        gone = await watch.look()
        if watch.doubt != doubt:
            doubt = watch.doubt
            say(doubt)
        if gone == ENDED:
            say("the primary has ended in order, so nobody is needed in its place; start a syncer to go on")
            return False
        if gone:
            say(f"the primary is gone: {gone}; takes over")
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_S)
    return False
