"""Hosts of one benchmark: network namespaces on one switch, with rates, delays and cuts that every system feels alike.

    host 0 (coordinator) --veth, tbf--+
    host 1 (worker 0)    --veth, tbf--+-- bridge, in a namespace of its own
    host 2 (worker 1)    --veth, tbf--+

A delay is a pair of TAP devices and a process that carries each frame across after so long: there is no netem here.
Without root, or without namespaces, all hosts are loopback, and links cannot be limited. Several nets may be up at
once: each has a place of its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import heapq
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

RATE_QUEUE_MS = 200
BURST_BYTES = 16_384
TUNSETIFF, IFF_TAP_NO_PI = 0x400454CA, 0x1002
FRAME_BYTES_MAX = 65_536
PROBE = 999
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


TOOLS = Path(__file__).parent / ".unpacked" / "tools"
"""`ip` and `tc` that came along, for a machine without."""


@functools.cache
def lack_of_links() -> str:
    """Why links cannot be limited here; empty: they can."""
    if os.geteuid() != 0:
        return "links need root"
    if shutil.which("ip") is None and (TOOLS / "ip").exists():
        os.environ["PATH"] += f":{TOOLS}"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "there is no `ip` or no `tc` here; benchmarks/peers/wheels takes them along"
    try:
        with Net(2, [1e6, 1e6], place=PROBE):
            return ""
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` says: {error.stderr.decode().strip()}"


@functools.cache
def lack_of_delays() -> str:
    """Why nothing can be late here; empty: it can."""
    try:
        with Net(2, [0, 0], delay_ms=1.0, place=PROBE):
            return ""
    except (subprocess.CalledProcessError, RuntimeError) as error:
        return str(error)


class Loopback:
    """No hosts of their own."""

    limited = False

    def __init__(self, count: int, *, place: int = 0) -> None:
        """All of 127.0.0.0/8 is this machine: two nets at once do not meet at a port."""
        self.addresses = [f"127.{1 + place}.0.{1 + host}" for host in range(count)]

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wrap(self, host: int, command: list[str]) -> list[str]:
        return command

    def bytes_sent(self) -> list[int] | None:
        return None


class Net:
    """Namespaces; `rates` in bits per second by host, 0: no limit."""

    limited = True

    def __init__(self, count: int, rates: list[float], delay_ms: float = 0.0, *, place: int = 0) -> None:
        self._prefix = f"bake{os.getpid()}n{place}"
        self._switch = f"{self._prefix}sw"
        self._count = count
        self._rates = rates
        self._delay_ms = delay_ms
        self._carriers: list[subprocess.Popen[bytes]] = []
        # Shared address space. libp2p tells nobody of 198.18.0.0/15, as it was before: hivemind's peers never met.
        self.addresses = [f"100.64.7.{1 + host}" for host in range(count)]

    def __enter__(self) -> Net:
        try:
            _ip("netns", "add", self._switch)
            _inside(self._switch, "ip", "link", "set", "lo", "up")
            _inside(self._switch, "ip", "link", "add", "br0", "type", "bridge")
            _inside(self._switch, "ip", "link", "set", "br0", "up")
            for host in range(self._count):
                self._add(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, host: int) -> None:
        name = self._name(host)
        _ip("netns", "add", name)
        if self._delay_ms:
            command = [sys.executable, str(Path(__file__)), name, self._switch, f"p{host}", str(self._delay_ms / 2)]
            carrier = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert carrier.stdout is not None
            if carrier.stdout.readline() != b"ready\n":
                raise RuntimeError("no TAP device; run without --delay")
            self._carriers.append(carrier)
        else:
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"p{host}", "netns", self._switch)
        _inside(self._switch, "ip", "link", "set", f"p{host}", "master", "br0", "up")
        _inside(name, "ip", "link", "set", "lo", "up")
        _inside(name, "ip", "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        _inside(name, "ip", "link", "set", "eth0", "up")
        self.set_rate(host, self._rates[host])

    def set_rate(self, host: int, bits: float) -> None:
        if bits:
            limit = ["rate", f"{int(bits)}bit", "burst", str(BURST_BYTES), "latency", f"{RATE_QUEUE_MS}ms"]
            _inside(self._name(host), "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *limit)
            _inside(self._switch, "tc", "qdisc", "replace", "dev", f"p{host}", "root", "tbf", *limit)

    def cut(self, host: int) -> None:
        _inside(self._switch, "ip", "link", "set", f"p{host}", "down")

    def mend(self, host: int) -> None:
        _inside(self._switch, "ip", "link", "set", f"p{host}", "up")

    def bytes_sent(self) -> list[int] | None:
        """By each host, on its link."""
        said = subprocess.run(
            ["ip", "netns", "exec", self._switch, "ip", "-s", "-j", "link"], capture_output=True, check=True
        )
        received = {link["ifname"]: link["stats64"]["rx"]["bytes"] for link in json.loads(said.stdout)}
        return [int(received[f"p{host}"]) for host in range(self._count)]

    def wrap(self, host: int, command: list[str]) -> list[str]:
        named = [sys.executable, str(Path(__file__)), "as", self.addresses[host], *command]
        return ["ip", "netns", "exec", self._name(host), *named]

    def __exit__(self, *_: object) -> None:
        for carrier in self._carriers:
            carrier.kill()
            carrier.wait()
        for name in [*(self._name(host) for host in range(self._count)), self._switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _name(self, host: int) -> str:
        return f"{self._prefix}h{host}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _inside(namespace: str, *words: str) -> None:
    _ip("netns", "exec", namespace, *words)


def _tap(namespace: str, name: str) -> int:
    """A TAP device in this namespace; its file descriptor works from anywhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/var/run/netns/{namespace}").open() as place:
        if libc.setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP_NO_PI))
    return device


def carry(host: str, switch: str, port: str, delay_ms: float) -> None:
    """Frames cross in order, each after `delay_ms`."""
    ends = [_tap(host, "eth0"), _tap(switch, port)]
    print("ready", flush=True)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        for readable in select.select(ends, [], [], pause)[0]:
            frame = os.read(readable, FRAME_BYTES_MAX)
            count += 1
            other = ends[0] if readable == ends[1] else ends[1]
            heapq.heappush(waiting, (time.monotonic() + delay_ms / 1e3, count, other, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, other, frame = heapq.heappop(waiting)
            try:
                os.write(other, frame)
            except OSError:
                continue  # the link is down: frames are lost, as on any wire


def run_as(address: str, command: list[str]) -> None:
    """Under a host name of its own, the address: systems that tell others their host's name (torchft) are reachable."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(address)
    os.execvp(command[0], command)


if __name__ == "__main__":
    if sys.argv[1] == "as":
        run_as(sys.argv[2], sys.argv[3:])
    carry(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
