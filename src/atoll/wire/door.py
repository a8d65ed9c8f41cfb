"""Who stands at the door: connections that have not shown the run's token yet.

gRPC accepts connections by itself and tells of them only when they make a call. A stranger that makes none, or calls
without the token again and again, would hold a descriptor and a place for as long as it likes. So the process looks at
its own descriptors once a second, and shuts the connections of strangers that are there for too long, are refused too
often, or are too many: the oldest first, because an honest learner shows its token with its first words.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

from atoll.wire.limits import (
    LOOK_S,
    LOOK_SHARE,
    PLACES_KEPT,
    REFUSALS_MAX,
    STRANGER_S,
    STRANGERS_MAX,
    STRANGERS_PER_NETWORK_MAX,
    TOLD_EVERY_S,
)

log = logging.getLogger(__name__)

Place = tuple[str, int]
"""Address and port of the other end of a connection."""
OPEN_FILES = next((folder for folder in (Path("/proc/self/fd"), Path("/dev/fd")) if folder.is_dir()), None)
"""Where the system lists this process's descriptors: Linux, and the others."""


class Door:
    """One per server. Everything but looking at descriptors runs on the event loop."""

    def __init__(self) -> None:
        self._known: set[Place] = set()
        self._strangers: dict[Place, float] = {}
        """When each was seen first, the oldest in front."""
        self._refusals: Counter[Place] = Counter()
        self._shut: Counter[str] = Counter()
        """Connections that were shut and not told of yet, by address."""
        self._told_s = -TOLD_EVERY_S

    def welcome(self, peer: str) -> None:
        """A call on this connection had the token."""
        if (place := place_of(peer)) is not None:
            self._known.add(place)

    def refuse(self, peer: str) -> None:
        """A call on this connection had none, or a wrong one."""
        if (place := place_of(peer)) is not None and place not in self._known:
            self._refusals[place] += 1

    async def watch(self, port: int) -> None:
        """Look after the connections to this port, until cancelled."""
        while OPEN_FILES is not None:
            began_s = time.monotonic()
            known_before = set(self._known)
            try:
                seen = await asyncio.to_thread(lambda: [place for place, _ in _connections(port)])
            except OSError as error:  # no descriptor is left
                self._tell_blind(error, began_s)
                await asyncio.sleep(LOOK_S)
                continue
            self._known -= known_before.difference(seen)
            self._strangers = self._strangers_among(seen, began_s)
            self._refusals = Counter({place: self._refusals[place] for place in seen if self._refusals[place]})
            if leaving := outstaying(self._strangers, self._refusals, began_s):
                await asyncio.to_thread(_shut, port, leaving)
                self._shut.update(address for address, _ in leaving)
            self._tell(began_s)
            await asyncio.sleep(max(LOOK_S, (time.monotonic() - began_s) / LOOK_SHARE))

    def _strangers_among(self, seen: list[Place], now_s: float) -> dict[Place, float]:
        here = {place for place in seen if place not in self._known}
        strangers = {place: since_s for place, since_s in self._strangers.items() if place in here}
        return strangers | {place: now_s for place in seen if place in here and place not in strangers}

    def _tell_blind(self, error: OSError, now_s: float) -> None:
        if now_s - self._told_s >= TOLD_EVERY_S:
            log.error("cannot look who is connected (%s); raise `ulimit -n` for the syncer", error)
            self._told_s = now_s

    def _tell(self, now_s: float) -> None:
        if self._shut and now_s - self._told_s >= TOLD_EVERY_S:
            address, count = self._shut.most_common(1)[0]
            log.warning(
                "closed %d connections that did not show the run token in time, %d of them from %s; if those are your "
                "learners look at their token and their link, else keep that address out with a firewall",
                *(self._shut.total(), count, address),
            )
            self._shut.clear()
            self._told_s = now_s


def outstaying(strangers: Mapping[Place, float], refusals: Mapping[Place, int], now_s: float) -> set[Place]:
    """Those of the strangers (the oldest in front) that have to go."""
    leaving = {place for place, since_s in strangers.items() if now_s - since_s > STRANGER_S}
    leaving |= {place for place in strangers if refusals.get(place, 0) > REFUSALS_MAX}
    staying: Counter[str] = Counter()
    for place in reversed([place for place in strangers if place not in leaving]):
        network = _network(place[0])
        if staying[network] == STRANGERS_PER_NETWORK_MAX or staying.total() == STRANGERS_MAX:
            leaving.add(place)
        else:
            staying[network] += 1
    return leaving


def place_of(peer: str) -> Place | None:
    """gRPC's ipv4:10.0.0.3:45678 or ipv6:%5B::1%5D:45678 as the system says it; None for what is neither."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


@lru_cache(PLACES_KEPT)
def _plain(host: str) -> str:
    """One text for one address: without a zone, and IPv4 as such where it came in through IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


def _network(address: str) -> str:
    """What one customer has: an address of IPv4, 64 bits of IPv6."""
    return address if "." in address else ipaddress.ip_address(address).exploded[:19]


def _connections(port: int) -> Iterator[tuple[Place, socket.socket]]:
    """This process's accepted connections on a port. A copy of the descriptor keeps what it stands for: gRPC may close
    its own meanwhile, and the number may be given to something else."""
    assert OPEN_FILES is not None
    for entry in OPEN_FILES.iterdir():
        try:
            number = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port:
                    host, there = copy.getpeername()[:2]
                    yield (_plain(host), there), copy
        except OSError:
            continue  # closed meanwhile, or it listens


def _shut(port: int, leaving: set[Place]) -> None:
    """gRPC sees the end of these connections, and closes them."""
    for place, connection in _connections(port):
        if place in leaving:
            connection.shutdown(socket.SHUT_RDWR)
