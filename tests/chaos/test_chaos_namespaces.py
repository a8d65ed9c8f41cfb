"""Real links between namespaces, with real processes on both ends. They need root."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from atoll.errors import ConfigError, LaunchError
from atoll.instruments.chaos import PERFECT, HostNet, NamespaceNet, Way, Weather
from atoll.instruments.chaos.namespaces import _NAMESPACE, _made_by, clean_leftovers, namespaces_available

WAIT_S = 30.0

USABLE, WHY_NOT = (
    namespaces_available() if sys.platform.startswith("linux") and os.geteuid() == 0 else (False, "needs root")
)
needs_root = pytest.mark.skipif(not USABLE, reason=f"no network namespaces here: {WHY_NOT}")

SENDER = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30)
connection.sendall(b"ready")
while word := connection.recv(16):
    connection.sendall(word)
"""


@pytest.fixture
def net() -> Iterator[NamespaceNet]:
    with NamespaceNet() as net:
        yield net


def names(pid: int | None = None) -> list[str]:
    """The namespaces that a process has made; other tests make some at the same time."""
    return [name for name, maker in _made_by("netns", _NAMESPACE) if maker == (pid or os.getpid())]


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return data


@needs_root
def test_a_process_inside_reaches_the_host_and_a_partition_only_delays_it(net: NamespaceNet) -> None:
    host = net.add("learner-0")
    assert net.add("learner-0") == host != net.add("learner-1")
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(WAIT_S)
        port = str(listener.getsockname()[1])
        command = net.wrap("learner-0", [sys.executable, "-c", SENDER, host, port])
        with subprocess.Popen(command) as process:
            connection, (peer, _) = listener.accept()
            with connection:
                connection.settimeout(WAIT_S)
                assert peer != host and receive(connection, 5) == b"ready"
                for weather in (
                    PERFECT,
                    Weather(up=Way(bits_per_s=2e6), down=Way(bits_per_s=1e6)),
                    Weather(up=Way(blocked=True)),
                    Weather(down=Way(blocked=True)),
                ):
                    net.set("learner-0", weather)
                    assert net.weather("learner-0") == weather
                    connection.sendall(b"there and back")
                    if weather.up.blocked or weather.down.blocked:
                        connection.settimeout(0.3)
                        with pytest.raises(TimeoutError):
                            connection.recv(1)
                        connection.settimeout(WAIT_S)
                        net.set("learner-0", PERFECT)
                    assert receive(connection, 14) == b"there and back"
            assert process.wait(WAIT_S) == 0


@needs_root
def test_the_link_is_shaped_on_both_sides(net: NamespaceNet) -> None:
    net.add("a")
    net.set("a", Weather(up=Way(bits_per_s=3e6), down=Way(bits_per_s=5e6)))
    inside = subprocess.run(net.wrap("a", ["tc", "qdisc", "show"]), capture_output=True, text=True, check=True).stdout
    assert "tbf" in inside and "3Mbit" in inside
    outside = subprocess.run(["tc", "qdisc", "show"], capture_output=True, text=True, check=True).stdout
    assert "5Mbit" in outside
    with pytest.raises(ConfigError, match="no delay and flips no bits; use the proxy"):
        net.set("a", Weather(up=Way(delay_s=0.1)))
    with pytest.raises(ConfigError, match="at least 1000 bits/s"):
        net.set("a", Weather(up=Way(bits_per_s=1.0)))


@needs_root
def test_closing_removes_everything_also_under_a_running_process() -> None:
    net = NamespaceNet()
    net.add("a")
    net.add("b")
    assert len(names()) == 2
    sleeper = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with subprocess.Popen(net.wrap("a", sleeper), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        net.close()
        net.close()
        assert names() == []
        links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        assert f"ah{os.getpid()}-" not in links
        process.kill()
    with pytest.raises(ConfigError, match="no namespace for a; add it first"):
        net.wrap("a", ["true"])


@needs_root
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    script = (
        "from atoll.instruments.chaos import NamespaceNet; n = NamespaceNet(); n.add('a'); print('up', flush=True); "
        "input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        mine = names(process.pid)
        assert len(mine) == 1
        assert not set(mine) & set(clean_leftovers()), "it is still alive"
        process.send_signal(signal.SIGKILL)
    clean_leftovers()
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert names(process.pid) == [] and f"ah{process.pid}-" not in links
    assert not set(mine) & set(clean_leftovers())


ANSWERING = """
import socket
with socket.create_server(("0.0.0.0", 7077)) as listener:
    print("up", flush=True)
    while True:
        connection, _ = listener.accept()
        connection.sendall(socket.gethostbyname("me").encode())
        connection.close()
"""
ASKING = """
import socket
with socket.create_connection(("syncer.example", 7077), timeout=5) as connection:
    print(connection.recv(100).decode())
"""


@needs_root
def test_hosts_on_a_switch_find_each_other_by_name_and_a_name_can_move() -> None:
    with HostNet() as net:
        address = {host: net.add(host) for host in ("a", "b", "c")}
        assert net.add("a") == address["a"] and len(set(address.values())) == 3
        net.set("c", Weather(up=Way(bits_per_s=1e6), down=Way(bits_per_s=1e6)))
        servers = []
        try:
            for host in ("a", "b"):
                net.point("me", host)
                command = net.wrap(host, [sys.executable, "-c", ANSWERING])
                servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                assert servers[-1].stdout is not None and servers[-1].stdout.readline() == "up\n"
            ask = net.wrap("c", [sys.executable, "-c", ASKING])
            for host in ("a", "b"):
                net.point("syncer.example", host)
                net.point("me", host)
                assert subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip() == address[host]
            net.set("b", Weather(down=Way(blocked=True)))
            assert subprocess.run(ask, capture_output=True, check=False).returncode != 0
        finally:
            for server in servers:
                server.kill()
                server.communicate()
    net.close()
    assert names() == []
    with pytest.raises(ConfigError, match="no host a; add it first"):
        net.wrap("a", ["true"])


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    usable, why = namespaces_available()
    assert not usable and ("needs root" in why or "need root" in why or "Linux" in why)
    with pytest.raises(LaunchError, match="proxy instead"):
        NamespaceNet().add("a")
