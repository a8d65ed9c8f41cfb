"""Several hosts in network namespaces of their own, on one switch, each behind a link with a rate. Needs root on Linux.

    with HostNet() as net:
        net.add("alice")                                               # "198.18.3.2"
        net.set("alice", Weather(up=Way(bits_per_s=50e3), down=Way(bits_per_s=50e3)))
        process = subprocess.Popen(net.wrap("alice", command))         # its pid is the command's

Every host knows the others by name, as from a DNS of their own; `point` moves a name. Nothing outside the namespaces is
reached, and nobody outside reaches them. `NamespaceNet` is for a storm, whose learners only have to reach this machine.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from atoll.errors import ConfigError
from atoll.instruments.chaos.namespaces import ADDRESSES, _check_machine, _numbers, _queue, _run, _try, clean_leftovers
from atoll.instruments.chaos.weather import Weather

HOSTS_MAX = 200
"""Hosts on the one switch: addresses of a /24, with room to spare."""
_WITH_NAMES = 'mount --bind "$0" /etc/hosts && exec "$@"'
"""ip netns exec gives each command a view of the mounts of its own, so that this one is seen by nobody else."""


class _Host(NamedTuple):
    namespace: str
    port: str
    """The switch's side of its link."""
    address: str


class HostNet:
    """A switch and the hosts on it. Close it: they would outlive the process."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._names: dict[str, str] = {}
        self._switch = ""
        handle, path = tempfile.mkstemp(prefix="atoll-hosts-")
        os.close(handle)
        self._file = Path(path)

    def add(self, host: str) -> str:
        """Make the host; returns its address."""
        if host in self._hosts:
            return self._hosts[host].address
        if len(self._hosts) >= HOSTS_MAX:
            raise ConfigError(f"{HOSTS_MAX} hosts are on the switch already; remove some")
        if not self._switch:
            self._make_switch()
        number = len(self._hosts) + 2
        made = _Host(_name(), f"p{number}", str(ADDRESSES.network_address + number))
        self._hosts[host] = made  # from here on close() removes what there is of it
        inside, switch = _in(made.namespace), _in(self._switch)
        _run("ip", "netns", "add", made.namespace)
        _run(*inside, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", made.port, "netns", self._switch)
        _run(*switch, "ip", "link", "set", made.port, "master", "switch", "up")
        _run(*inside, "ip", "address", "add", f"{made.address}/24", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "link", "set", "eth0", "up")
        self.point(host, host)
        return made.address

    def point(self, name: str, host: str) -> None:
        """Let a name mean this host from now on, also for processes that run already."""
        self._names[name] = self._host(host).address
        lines = ["127.0.0.1 localhost", *(f"{address} {known}" for known, address in self._names.items())]
        self._file.write_text("\n".join(lines) + "\n")  # in place: the running ones see this very file

    def wrap(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs this command on the host."""
        return [*_in(self._host(host).namespace), "sh", "-c", _WITH_NAMES, str(self._file), *command]

    def set(self, host: str, weather: Weather) -> None:
        """Make the host's link like that: its rates, and what is blocked."""
        made = self._host(host)
        # Each side shapes what it sends: the host's side is up, the switch's side is down.
        for side, device, way in ((made.namespace, "eth0", weather.up), (self._switch, made.port, weather.down)):
            _run(*_in(side), "tc", "qdisc", "replace", "dev", device, "root", *_queue(way))

    def close(self) -> None:
        """Remove everything. May be called again. A process that still runs inside is cut off, not ended."""
        for namespace in (made.namespace for made in self._hosts.values()):
            _try("ip", "-n", namespace, "link", "del", "eth0")
            _try("ip", "netns", "del", namespace)
        if self._switch:
            _try("ip", "netns", "del", self._switch)
        self._hosts, self._switch = {}, ""
        self._file.unlink(missing_ok=True)

    def __enter__(self) -> HostNet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _make_switch(self) -> None:
        _check_machine()
        clean_leftovers()
        self._switch = _name()
        _run("ip", "netns", "add", self._switch)
        _run(*_in(self._switch), "ip", "link", "add", "switch", "type", "bridge")
        _run(*_in(self._switch), "ip", "link", "set", "switch", "up")

    def _host(self, host: str) -> _Host:
        try:
            return self._hosts[host]
        except KeyError:
            raise ConfigError(f"there is no host {host}; add it first") from None


def _name() -> str:
    return f"atoll-{os.getpid()}-{next(_numbers)}"


def _in(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)
