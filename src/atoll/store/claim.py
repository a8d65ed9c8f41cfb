"""Which syncer may use a snapshot location: the one whose claim has the highest number.

    URL/claim-000000001007.json    who claims it, of which run, and a beat that grows every CLAIM_BEAT_S while it lives

A lock on RUN/state keeps two syncers of one folder apart; two that were started from one snapshot location, on two
machines, meet only here. A claim is taken by creating the next number, which one of several at once can do: the store
refuses to create what exists (S3: If-None-Match), or, where it cannot, what was written is read back after a pause.
Nobody but its maker writes a claim again. Whoever sees a higher number than its own has been overtaken and ends. The
last CLAIMS_KEPT stay: a listing that is under way while files come and go may miss the newest of them, and a number
that were free again could be taken twice.

Whether a claim is alive is seen without comparing clocks: its beat is watched for CLAIM_WATCH_S. On the machine where
its maker ran, the process itself is looked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from atoll.errors import FencedSyncerError, StoreError
from atoll.store.epoch import EPOCH_MAX, SMALL_FILE_BYTES_MAX
from atoll.store.remote_folder import RemoteFolder

CLAIM_BEAT_S = 5.0
"""How often a claim is renewed and others are looked for: an overtaken syncer ends within so much and one request. Two
small requests each time, a few dollars a month at S3's prices."""
CLAIM_WATCH_S = 3 * CLAIM_BEAT_S
"""How long a claim must stand still to be taken for dead: three beats."""
CLAIM_LOOK_S = 1.0
"""Between two looks at a claim that is watched."""
CLAIM_PAUSE_S = 2.0
"""Before what was written is read back, where the store cannot refuse a second writer: longer than a write takes."""
CLAIMS_KEPT = 16
"""So many would have to be made during one listing for it to miss them all. A few hundred bytes each."""
_NAME = re.compile(r"claim-(\d{12})\.json")


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim as it stands at the location. What an unreadable one says is unknown; its number is its name."""

    number: int
    epoch: int = 0
    """The epoch of the syncer that made it, once that is known: never below the number."""
    run: str = ""
    instance: str = ""
    host: str = "an unknown host"
    pid: int = 0
    machine: str = ""
    """Names a boot of a machine and its process table; empty where that cannot be known."""
    started: str = ""
    """When the process began, as that machine counts."""
    beat: int = 0
    begun: bool = False
    """Whether the run had versions."""
    ended: bool = False
    """Whether its syncer ended in order."""
    when: str = ""
    """For people only."""

    @property
    def holder(self) -> str:
        return f"epoch {max(self.epoch, self.number)}, process {self.pid or 'unknown'} on {self.host}"

    @property
    def dead(self) -> bool:
        """True if its process is known to be gone, because it ran on this very machine or ended in order."""
        here = bool(self.machine) and self.machine == _this_machine()
        return self.ended or (here and _started_at(self.pid) != self.started)


@dataclass(slots=True)
class Hold:
    """This process's claim to a location. Every method blocks on the location and belongs on a worker thread."""

    place: RemoteFolder
    claim: Claim
    taken: bool = False
    before: Claim | None = None
    """The newest one that was there."""

    def check(self) -> None:
        """Raise FencedSyncerError if another syncer has claimed this location since. OSError: it cannot be seen."""
        newest = newest_claim(self.place)
        if newest is not None and newest.number >= self.claim.number and newest.instance != self.claim.instance:
            raise FencedSyncerError(
                f"a newer syncer ({newest.holder}) has taken over the snapshots at {self.place.url}; this one (epoch "
                f"{self.claim.epoch}) publishes nothing more. Let it end; the run goes on without it"
            )

    def renew(self, run: str, epoch: int, *, begun: bool, ended: bool = False) -> None:
        """Say that this syncer lives, unless it was overtaken. One that could not claim the location when it started
        does so now, if nobody with as high an epoch has."""
        self.claim = replace(self.claim, run=run, epoch=epoch, begun=begun, ended=ended, beat=self.claim.beat + 1)
        if not self.taken:
            self.claim = replace(self.claim, number=max(epoch, self.claim.number))
        self.check()
        if self.taken:
            self._write()
        else:
            self._create()

    def _write(self) -> None:
        self.claim = replace(self.claim, when=datetime.now(UTC).isoformat(timespec="seconds"))
        self.place.put_small(_name(self.claim.number), _encode(self.claim))

    def _create(self) -> None:
        sure = self.place.create_small(_name(self.claim.number), _encode(self.claim))
        if sure is None:
            time.sleep(CLAIM_PAUSE_S)
        self.check()
        self.taken = True
        with contextlib.suppress(OSError):  # what stays of older ones does no harm
            self.place.delete_files(name for name, _ in _newest_first(self.place)[CLAIMS_KEPT:])


def take_claim(
    place: RemoteFolder, *, epoch: int, take_over: bool, say: Callable[[str], None], watch_s: float = CLAIM_WATCH_S
) -> Hold:
    """Claim a location for a syncer whose epoch is at least `epoch`. Raises StoreError while another one uses it
    (unless `take_over`), and OSError if it cannot be reached."""
    found = newest_claim(place)
    if found is not None and not found.dead and not take_over:
        found = _watch(place, found, say, watch_s)
    number = max(epoch, 1 + max(found.number, found.epoch) if found is not None else 0)
    claim = _new_claim(number)
    if found is not None:  # until this one has something of its own to say
        claim = replace(claim, run=found.run, begun=found.begun)
    hold = Hold(place, claim, before=found)
    try:
        hold._create()
    except FencedSyncerError as error:
        raise StoreError(
            f"another syncer has claimed {place.url} at the same moment; let that one serve, or start this one again "
            "with --take-over"
        ) from error
    return hold


def later_claim(place: RemoteFolder, epoch: int) -> Hold:
    """For a location that cannot be reached yet: it is claimed with the first renewal that reaches it."""
    return Hold(place, _new_claim(epoch))


def _watch(place: RemoteFolder, found: Claim, say: Callable[[str], None], watch_s: float) -> Claim:
    """Return once nothing has moved for so long; StoreError as soon as something does."""
    say(f"{place.url} is claimed by another syncer ({found.holder}); watching for {watch_s:g} s whether it lives")
    deadline_s = time.monotonic() + watch_s
    while time.monotonic() < deadline_s:
        time.sleep(min(CLAIM_LOOK_S, watch_s))
        now = newest_claim(place)
        if now is None:
            continue
        if now.dead:
            return now
        if (now.number, now.instance, now.beat) != (found.number, found.instance, found.beat):
            raise StoreError(
                f"another syncer ({now.holder}) is using the snapshots at {place.url}; stop it, give this one another "
                "--snapshots, or start it with --take-over, which ends the other one"
            )
    return found


def newest_claim(place: RemoteFolder) -> Claim | None:
    """The claim with the highest number, if there is one. OSError: the location cannot be seen."""
    for name, number in _newest_first(place):
        data = place.read_small(name, SMALL_FILE_BYTES_MAX)
        if data is not None:  # else it was deleted since, by a newer one
            return _decode(number, data)
    return None


def _newest_first(place: RemoteFolder) -> list[tuple[str, int]]:
    found = [(name, int(match[1])) for name in place.sizes("") if (match := _NAME.fullmatch(name))]
    return sorted(found, key=lambda entry: entry[1], reverse=True)


def _name(number: int) -> str:
    return f"claim-{number:012}.json"


def _new_claim(number: int) -> Claim:
    pid = os.getpid()
    process = {"pid": pid, "host": socket.gethostname(), "machine": _this_machine(), "started": _started_at(pid)}
    return Claim(number, epoch=number, instance=secrets.token_hex(8), **process)  # type: ignore[arg-type]


def _encode(claim: Claim) -> bytes:
    return json.dumps({name: value for name, value in asdict(claim).items() if name != "number"}).encode()


def _decode(number: int, data: bytes) -> Claim:
    try:
        values: Any = json.loads(data)
    except (ValueError, RecursionError):
        return Claim(number)
    kinds = {entry.name: type(entry.default) for entry in fields(Claim) if entry.name != "number"}
    known: dict[str, Any] = {}
    if isinstance(values, dict):
        known = {name: value for name, value in values.items() if kinds.get(name) is type(value)}
    claim = Claim(number, **known)
    return replace(claim, epoch=max(number, claim.epoch if claim.epoch <= EPOCH_MAX else 0))


def _this_machine() -> str:
    """A name for this boot of this machine and this process table: there a process can be looked for by its id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started_at(pid: int) -> str:
    """When a process of this machine began, in clock ticks since the boot; empty if there is none."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else rest[18]
