"""Learners in network namespaces of their own, joined to the host by real links with rates. Needs root on Linux.

What the proxy cannot show happens here: the kernel's own retransmissions, and connections whose packets vanish. A
learner reaches the syncer at the host's end of its link: there a proxy listens in front of it, or the syncer itself.

    with NamespaceNet() as net:
        host = net.add("learner-0")                                    # "198.18.3.1"
        process = subprocess.Popen(net.wrap("learner-0", command))
        net.set("learner-0", Weather(up=Way(bits_per_s=10e6)))

Everything is named after the process that made it, so that what a killed one left behind can be told apart and removed.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from atoll.errors import ConfigError, LaunchError
from atoll.instruments.chaos.weather import PERFECT, Way, Weather

ADDRESSES = IPv4Network("198.18.0.0/15")
"""Set aside for tests of networks (RFC 2544), so that no real host is hidden. Each learner takes four of them."""
LINKS_MAX = ADDRESSES.num_addresses // 4
COMMAND_S_MAX = 20.0
"""One call of ip or tc takes milliseconds; on a machine under load a second."""
LIMIT_QUEUE_MS = 100
"""Traffic that waits in front of a limited link: what the proxy lets wait, too."""
BURST_S = 0.02
BURST_BYTES_MIN = 4096
"""tbf passes nothing larger than its bucket, and a packet has 1500 bytes; 20 ms keep the rate true at 250 Hz."""
RATE_BITS_MIN = 1000.0

_NAMESPACE = re.compile(r"atoll-([0-9]{1,10})-[0-9]{1,10}")
_HOST_SIDE = re.compile(r"ah([0-9]{1,10})-[0-9]{1,10}")
_numbers = itertools.count()


def namespaces_available() -> tuple[bool, str]:
    """Whether this machine and user can have such links, by making one; if not, why."""
    try:
        with NamespaceNet() as net:
            net.add("probe")
            net.set("probe", Weather(up=Way(bits_per_s=1e6), down=Way(blocked=True)))
    except LaunchError as error:
        return False, str(error)
    return True, ""


def clean_leftovers() -> list[str]:
    """Remove links and namespaces of processes that are gone; returns their names."""
    removed = []
    for name, pid in _made_by("link", _HOST_SIDE):
        if not _alive(pid):
            _try("ip", "link", "del", name)
            removed.append(name)
    for name, pid in _made_by("netns", _NAMESPACE):
        if not _alive(pid):
            _try("ip", "netns", "del", name)
            removed.append(name)
    return removed


@dataclass(frozen=True, slots=True)
class _HostLink:
    namespace: str
    host_side: str
    host: IPv4Address


class NamespaceNet:
    """The namespaces and links of one run. Close it: they would outlive the process."""

    def __init__(self) -> None:
        self._links: dict[str, _HostLink] = {}
        self._weather: dict[str, Weather] = {}

    def add(self, learner: str) -> str:
        """Make the learner's namespace and link; returns the address at which it reaches the host."""
        if learner in self._links:
            return str(self._links[learner].host)
        _check_machine()
        if not self._links:
            clean_leftovers()
        name = f"{os.getpid()}-{next(_numbers)}"
        link = _HostLink(f"atoll-{name}", f"ah{name}", _free_address())
        self._links[learner] = link  # from here on close() removes what there is of it
        try:
            self._make(link)
        except LaunchError:
            self.remove(learner)
            raise
        return str(link.host)

    def wrap(self, learner: str, command: Sequence[str]) -> list[str]:
        """The command that runs this command inside the learner's namespace."""
        return ["ip", "netns", "exec", self._link(learner).namespace, *command]

    def set(self, learner: str, weather: Weather) -> None:
        """Make the link like that: its rates, and what is blocked or stalled (packets are dropped, and TCP sends them
        again afterwards). Delays and flipped bits are the proxy's, which may stand on the host's side of the link."""
        link = self._link(learner)
        for way in (weather.up, weather.down):
            if way.delay_s or way.flips_per_mb:
                raise ConfigError("a namespace's link has no delay and flips no bits; use the proxy for those")
            if 0.0 < way.bits_per_s < RATE_BITS_MIN:
                raise ConfigError(
                    f"a namespace's link carries at least {RATE_BITS_MIN:g} bits/s; not {way.bits_per_s:g}"
                )
        # Each side shapes what it sends: the learner's side is up, the host's side is down.
        inside = ["ip", "netns", "exec", link.namespace]
        for command, device, way in ((inside, "eth0", weather.up), ([], link.host_side, weather.down)):
            _run(*command, "tc", "qdisc", "replace", "dev", device, "root", *_queue(way))
        self._weather[learner] = weather

    def weather(self, learner: str) -> Weather:
        """What was set last."""
        self._link(learner)
        return self._weather.get(learner, PERFECT)

    def remove(self, learner: str) -> None:
        """Take the link and the namespace away. A process that still runs inside is cut off, not ended."""
        link = self._link(learner)
        # The link first: a namespace with a process inside lives on without its name, and would keep the link.
        _try("ip", "link", "del", link.host_side)
        _try("ip", "netns", "del", link.namespace)
        del self._links[learner]
        self._weather.pop(learner, None)

    def close(self) -> None:
        """Remove everything. May be called again."""
        for learner in list(self._links):
            self.remove(learner)

    def __enter__(self) -> NamespaceNet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _make(self, link: _HostLink) -> None:
        inside = ("ip", "netns", "exec", link.namespace)
        _run("ip", "netns", "add", link.namespace)
        _run("ip", "link", "add", link.host_side, "type", "veth", "peer", "name", "eth0", "netns", link.namespace)
        _run("ip", "address", "add", f"{link.host}/30", "dev", link.host_side)
        _run("ip", "link", "set", link.host_side, "up")
        _run(*inside, "ip", "address", "add", f"{link.host + 1}/30", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "link", "set", "eth0", "up")
        _run(*inside, "ip", "route", "add", "default", "via", str(link.host))

    def _link(self, learner: str) -> _HostLink:
        try:
            return self._links[learner]
        except KeyError:
            raise ConfigError(f"there is no namespace for {learner}; add it first") from None


def _queue(way: Way) -> list[str]:
    """The queueing discipline that makes a direction like that."""
    if way.blocked or way.stalled:
        return ["pfifo", "limit", "0"]  # drops every packet, without a word to either side
    if not way.bits_per_s:
        return ["noqueue"]
    burst = max(BURST_BYTES_MIN, int(way.bits_per_s / 8.0 * BURST_S))
    return ["tbf", "rate", f"{int(way.bits_per_s)}bit", "burst", str(burst), "latency", f"{LIMIT_QUEUE_MS}ms"]


def _check_machine() -> None:
    if not sys.platform.startswith("linux"):
        raise LaunchError("network namespaces need Linux; use the proxy instead")
    if os.geteuid() != 0:
        raise LaunchError("network namespaces need root; use the proxy instead, or run as root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LaunchError(f"network namespaces need the command {tool}; install iproute2, or use the proxy instead")


def _free_address() -> IPv4Address:
    """The host's end of a link that nobody on this machine has. Processes begin their search at different places."""
    taken = set(re.findall(r"inet ([0-9.]+)/", _run("ip", "-4", "-o", "address", "show")))
    first = os.getpid() * 61
    for offset in range(LINKS_MAX):
        address = ADDRESSES.network_address + 4 * ((first + offset) % LINKS_MAX) + 1
        if str(address) not in taken:
            return address
    raise LaunchError(f"all {LINKS_MAX} links of {ADDRESSES} are taken; remove some namespaces with ip netns del")


def _made_by(what: str, pattern: re.Pattern[str]) -> list[tuple[str, int]]:
    """Names that follow our pattern, with the process that made each."""
    text = _run("ip", "-o", what, "show") if what == "link" else _run("ip", what, "list")
    words = re.findall(r"[A-Za-z0-9-]+", text)
    return [(word, int(match[1])) for word in dict.fromkeys(words) if (match := pattern.fullmatch(word))]


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _run(*command: str) -> str:
    try:
        # In a session of its own: a Ctrl-C is for the run, which then takes its links down with commands such as this.
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False, start_new_session=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{' '.join(command)} failed: {error}; use the proxy instead of namespaces") from None
    if done.returncode != 0:
        why = done.stderr.strip() or f"status {done.returncode}"
        raise LaunchError(f"{' '.join(command)} failed: {why}; use the proxy instead of namespaces")
    return done.stdout


def _try(*command: str) -> None:
    """For removing: what is gone already needs no removing."""
    try:
        _run(*command)
    except LaunchError:
        pass
