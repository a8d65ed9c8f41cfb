"""Hosts of one benchmark: network namespaces on one switch, with rates, delays and cuts that every system feels alike.

    host 0 (coordinator) --veth, tbf--+
    host 1 (worker 0)    --veth, tbf--+-- bridge, in a namespace of its own
    host 2 (worker 1)    --veth, tbf--+

A delay is a pair of TAP devices and a process that carries each frame across after so long: there is no netem here.
Without root, or without namespaces, all hosts are loopback, and links cannot be limited.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

RATE_QUEUE_MS = 200
BURST_BYTES = 16_384
TUNSETIFF, IFF_TAP_NO_PI = 0x400454CA, 0x1002
FRAME_BYTES_MAX = 65_536


def namespaces_work() -> bool:
    if os.geteuid() != 0:
        return False
    name = f"bake{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.returncode == 0


class Loopback:
    """No hosts of their own."""

    limited = False

    def __init__(self, count: int) -> None:
        self.addresses = ["127.0.0.1"] * count

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wrap(self, host: int, command: list[str]) -> list[str]:
        return command

    def bytes_sent(self) -> list[int]:
        return []


class Net:
    """Namespaces; `rates` in bits per second by host, 0: no limit."""

    limited = True

    def __init__(self, count: int, rates: list[float], delay_ms: float = 0.0) -> None:
        self._prefix = f"bake{os.getpid()}"
        self._switch = f"{self._prefix}sw"
        self._count = count
        self._rates = rates
        self._delay_ms = delay_ms
        self._carriers: list[subprocess.Popen[bytes]] = []
        self.addresses = [f"198.19.7.{1 + host}" for host in range(count)]

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

    def bytes_sent(self) -> list[int]:
        """By each host, on its link."""
        said = subprocess.run(
            ["ip", "netns", "exec", self._switch, "ip", "-s", "-j", "link"], capture_output=True, check=True
        )
        received = {link["ifname"]: link["stats64"]["rx"]["bytes"] for link in json.loads(said.stdout)}
        return [int(received[f"p{host}"]) for host in range(self._count)]

    def wrap(self, host: int, command: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self._name(host), *command]

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
        if libc.setns(place.fileno(), 0x40000000):
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


if __name__ == "__main__":
    carry(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
