"""The proxy with real sockets on both sides. Nothing is asserted about how long things take."""

from __future__ import annotations

import gc
import hashlib
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.errors import ConfigError, LaunchError
from atoll.instruments.chaos import PERFECT, ChaosProxy, Fault, Way, Weather
from atoll.instruments.chaos.proxy import CONNECTIONS_MAX

WAIT_S = 30.0
"""No wait is longer; nothing is asserted about how long things take."""
HOUR_S = 3600.0


class Upstream:
    """A listening socket in the syncer's place; the test gets each accepted connection."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.accepted: queue.Queue[socket.socket] = queue.Queue()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(WAIT_S)
            self.accepted.put(connection)

    def next(self) -> socket.socket:
        return self.accepted.get(timeout=WAIT_S)

    def close(self) -> None:
        # A listener is only gone when the thread that waits in accept is out of it.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    yield server
    server.close()


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[ChaosProxy]:
    with ChaosProxy(seed=7) as proxy:
        proxy.start(lambda: upstream.address)
        proxy.add("a")
        proxy.add("b")
        yield proxy


def dial(proxy: ChaosProxy, learner: str = "a") -> socket.socket:
    return socket.create_connection(proxy.add(learner), timeout=WAIT_S)


def pair(proxy: ChaosProxy, upstream: Upstream, learner: str = "a") -> tuple[socket.socket, socket.socket]:
    near = dial(proxy, learner)
    return near, upstream.next()


def receive(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = source.recv(min(1 << 20, size - len(data)))
        assert piece, f"the stream ended after {len(data)} of {size} bytes"
        data += piece
    return bytes(data)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def is_reset(connection: socket.socket) -> bool:
    """Whether the connection ends in a reset, after whatever arrived before it."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return False


def closed_at_once(proxy: ChaosProxy) -> bool:
    """Whether a new connection is reset; that may be so quick that it never seems to have been made."""
    try:
        with dial(proxy) as connection:
            return is_reset(connection)
    except ConnectionResetError:
        return True


def first_byte(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)


def flow_on_another_link(proxy: ChaosProxy, upstream: Upstream) -> None:
    """Traffic there and back: whatever could pass elsewhere before it has had every chance to."""
    near, far = pair(proxy, upstream, "b")
    for _ in range(20):
        near.sendall(b"there")
        assert receive(far, 5) == b"there"
        far.sendall(b"back")
        assert receive(near, 4) == b"back"
    near.close()
    far.close()


def test_large_streams_pass_unchanged_both_ways_at_once(proxy: ChaosProxy, upstream: Upstream) -> None:
    size, streams = 24 << 20, 3
    pairs = [pair(proxy, upstream) for _ in range(streams)]
    sent: dict[int, str] = {}
    got: dict[int, str] = {}

    def send(number: int, sink: socket.socket) -> None:
        dice, left, digest = random.Random(number), size, hashlib.sha256()
        while left:
            data = dice.randbytes(min(left, dice.randrange(1, 1 << 20)))
            digest.update(data)
            sink.sendall(data)
            left -= len(data)
        sink.shutdown(socket.SHUT_WR)
        sent[number] = digest.hexdigest()

    def collect(number: int, source: socket.socket) -> None:
        digest = hashlib.sha256()
        while data := source.recv(1 << 20):
            digest.update(data)
        got[number] = digest.hexdigest()

    threads = []
    for index, (near, far) in enumerate(pairs):
        for number, source, sink in ((2 * index, near, far), (2 * index + 1, far, near)):
            threads.append(threading.Thread(target=send, args=(number, source)))
            threads.append(threading.Thread(target=collect, args=(number, sink)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(sent) == 2 * streams and got == sent
    stats = proxy.stats("a")
    assert (stats.bytes_up, stats.bytes_down) == (streams * size, streams * size)
    assert (stats.flips_up, stats.flips_down, stats.cuts, stats.connections) == (0, 0, 0, streams)
    wait_until(lambda: proxy.stats("a").connections_open == 0, "the connections end with their streams")


def test_one_half_may_end_before_the_other(proxy: ChaosProxy, upstream: Upstream) -> None:
    near, far = pair(proxy, upstream)
    near.sendall(b"question")
    near.shutdown(socket.SHUT_WR)
    assert receive(far, 8) == b"question" and far.recv(1) == b""
    far.sendall(b"answer")
    far.close()
    assert receive(near, 6) == b"answer" and near.recv(1) == b""


def test_a_delay_keeps_the_order_also_when_it_shrinks(proxy: ChaosProxy, upstream: Upstream) -> None:
    near, far = pair(proxy, upstream)
    expected = b""
    for number in range(400):
        # Later bytes have a shorter delay: they must not overtake.
        if number % 50 == 0:
            proxy.set("a", Weather(up=Way(delay_s=0.08 - number / 10_000)))
        message = struct.pack("!I", number) * (1 + number % 7)
        near.sendall(message)
        expected += message
    assert receive(far, len(expected)) == expected


def test_what_waits_for_a_delay_or_a_limit_flows_when_it_is_lifted(proxy: ChaosProxy, upstream: Upstream) -> None:
    near, far = pair(proxy, upstream)
    data = random.Random(1).randbytes(100_000)
    for way in (Way(delay_s=HOUR_S), Way(bits_per_s=1.0)):
        before = proxy.stats("a").bytes_up
        proxy.set("a", Weather(up=way))
        near.sendall(data)
        # The other direction is free, and after it has answered nothing has passed in this one.
        far.sendall(b"ping")
        assert receive(near, 4) == b"ping"
        flow_on_another_link(proxy, upstream)
        assert proxy.stats("a").bytes_up == before
        proxy.set("a", PERFECT)
        assert receive(far, len(data)) == data


def test_a_limit_keeps_the_bytes_of_all_connections(proxy: ChaosProxy, upstream: Upstream) -> None:
    proxy.set("a", Weather(up=Way(bits_per_s=12e6, delay_s=0.01), down=Way(bits_per_s=24e6)))
    pairs = [pair(proxy, upstream) for _ in range(3)]
    data = [random.Random(index).randbytes(150_000) for index in range(3)]
    threads = [threading.Thread(target=near.sendall, args=(d,)) for (near, _), d in zip(pairs, data, strict=True)]
    threads += [threading.Thread(target=far.sendall, args=(d,)) for (_, far), d in zip(pairs, data, strict=True)]
    for thread in threads:
        thread.start()
    for (near, far), expected in zip(pairs, data, strict=True):
        assert receive(far, len(expected)) == expected
        assert receive(near, len(expected)) == expected
    for thread in threads:
        thread.join(WAIT_S)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_partition_blocks_its_direction_alone(proxy: ChaosProxy, upstream: Upstream, direction: str) -> None:
    near, far = pair(proxy, upstream)
    source, sink, other = (near, far, "down") if direction == "up" else (far, near, "up")
    proxy.set("a", Weather(**{direction: Way(blocked=True)}))
    source.sendall(b"held back")
    sink.sendall(b"passes")
    assert receive(source, 6) == b"passes"
    flow_on_another_link(proxy, upstream)
    stats = proxy.stats("a")
    assert getattr(stats, f"bytes_{direction}") == 0 and getattr(stats, f"bytes_{other}") == 6
    proxy.set("a", PERFECT)
    assert receive(sink, 9) == b"held back"


def test_a_new_connection_hangs_in_a_partition_and_is_made_after_it(proxy: ChaosProxy, upstream: Upstream) -> None:
    proxy.set("a", Weather(down=Way(blocked=True)))
    near = dial(proxy)
    near.sendall(b"hello")
    flow_on_another_link(proxy, upstream)
    assert upstream.accepted.empty()
    proxy.set("a", PERFECT)
    assert receive(upstream.next(), 5) == b"hello"


def test_the_end_of_a_learner_does_not_pass_a_partition(proxy: ChaosProxy, upstream: Upstream) -> None:
    for end in (reset, socket.socket.close):
        near, far = pair(proxy, upstream)
        near.sendall(b"x")
        assert receive(far, 1) == b"x"
        proxy.set("a", Weather(up=Way(blocked=True), down=Way(blocked=True)))
        end(near)
        flow_on_another_link(proxy, upstream)
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
        far.settimeout(WAIT_S)
        proxy.set("a", PERFECT)
        assert is_reset(far) is (end is reset)


def test_a_stall_keeps_bytes_and_they_flow_on(proxy: ChaosProxy, upstream: Upstream) -> None:
    near, far = pair(proxy, upstream)
    stalled = Way(stalled=True)
    proxy.set("a", Weather(up=stalled, down=stalled))
    near.sendall(b"up" * 1000)
    far.sendall(b"down" * 1000)
    # Unlike in a partition, a connection can be made.
    later, later_far = pair(proxy, upstream)
    later.sendall(b"later")
    flow_on_another_link(proxy, upstream)
    stats = proxy.stats("a")
    assert (stats.bytes_up, stats.bytes_down) == (0, 0)
    proxy.set("a", PERFECT)
    assert receive(far, 2000) == b"up" * 1000
    assert receive(near, 4000) == b"down" * 1000
    assert receive(later_far, 5) == b"later"


def test_a_cut_resets_every_connection_of_the_learner_and_no_other(proxy: ChaosProxy, upstream: Upstream) -> None:
    pairs = [pair(proxy, upstream) for _ in range(3)]
    other_near, other_far = pair(proxy, upstream, "b")
    for near, far in pairs:
        near.sendall(b"half a mess")
        assert receive(far, 4) == b"half"
    assert proxy.cut("a") == 3
    assert all(is_reset(near) and is_reset(far) for near, far in pairs)
    assert proxy.stats("a").cuts == 3 and proxy.stats("a").connections_open == 0
    other_near.sendall(b"untouched")
    assert receive(other_far, 9) == b"untouched"
    near, far = pair(proxy, upstream)
    near.sendall(b"again")
    assert receive(far, 5) == b"again"
    assert proxy.cut("b") == 1 and proxy.cut("b") == 0


@pytest.mark.parametrize("direction", ["up", "down"])
def test_corruption_flips_bits_in_its_direction_alone(proxy: ChaosProxy, upstream: Upstream, direction: str) -> None:
    near, far = pair(proxy, upstream)
    data = random.Random(3).randbytes(2 << 20)
    proxy.set("a", Weather(**{direction: Way(flips_per_mb=20.0)}))

    def through(source: socket.socket, sink: socket.socket) -> bytes:
        thread = threading.Thread(target=source.sendall, args=(data,))
        thread.start()
        got = receive(sink, len(data))
        thread.join(WAIT_S)
        return got

    got = {"up": through(near, far), "down": through(far, near)}
    wrong = (int.from_bytes(got[direction], "big") ^ int.from_bytes(data, "big")).bit_count()
    stats = proxy.stats("a")
    flips = {"up": stats.flips_up, "down": stats.flips_down}
    assert wrong == flips[direction] > 1
    other = "down" if direction == "up" else "up"
    assert got[other] == data and flips[other] == 0
    proxy.set("a", PERFECT)
    assert through(near, far) == data and through(far, near) == data


def test_however_rare_the_flips_the_first_bytes_get_one(proxy: ChaosProxy, upstream: Upstream) -> None:
    near, far = pair(proxy, upstream)
    for window in range(1, 4):
        proxy.set("a", Weather(up=Way(flips_per_mb=1e-6)))
        for _ in range(5):
            near.sendall(b"\x00" * 50)
            receive(far, 50)
        assert proxy.stats("a").flips_up == window
        proxy.set("a", PERFECT)


def test_the_same_seed_flips_the_same_bits(upstream: Upstream) -> None:
    def flipped(seed: int) -> bytes:
        with ChaosProxy(seed=seed) as proxy:
            proxy.start(lambda: upstream.address)
            proxy.add("a")
            proxy.set("a", Weather(up=Way(flips_per_mb=1000.0)))
            near, far = pair(proxy, upstream)
            got = b""
            for _ in range(20):
                near.sendall(bytes(1000))
                got += receive(far, 1000)
            return got

    assert flipped(1) == flipped(1) != flipped(2)


def test_a_sender_feels_a_full_pipe(proxy: ChaosProxy, upstream: Upstream) -> None:
    for weather in (PERFECT, Weather(up=Way(stalled=True)), Weather(up=Way(blocked=True))):
        near, far = pair(proxy, upstream)
        proxy.set("a", weather)
        near.setblocking(False)
        taken, idle = 0, 0
        # Nobody reads at the far end. The stream is full when it has taken nothing in 20 looks.
        while idle < 20 and taken < 64 << 20:
            try:
                taken += near.send(bytes(1 << 20))
                idle = 0
            except BlockingIOError:
                idle += 1
                time.sleep(0.005)
        assert taken < 64 << 20
        proxy.set("a", PERFECT)
        near.settimeout(WAIT_S)
        assert receive(far, taken) == bytes(taken)


def test_an_upstream_that_is_down_closes_and_may_come_back_elsewhere() -> None:
    places = [Upstream()]
    with ChaosProxy() as proxy:
        proxy.start(lambda: places[-1].address)
        near, far = pair(proxy, places[0])
        port = proxy.add("a")[1]
        places[0].close()
        far.close()
        assert near.recv(1) == b""
        for _ in range(3):
            assert closed_at_once(proxy)
        places.append(Upstream())
        near, far = pair(proxy, places[1])
        far.sendall(b"back")
        assert receive(near, 4) == b"back"
        assert proxy.add("a")[1] == port
        places[1].close()


def test_nobody_knows_the_upstream_yet(upstream: Upstream) -> None:
    known: list[tuple[str, int]] = []

    def where() -> tuple[str, int]:
        if not known:
            raise ConnectionRefusedError("no syncer yet")
        return known[0]

    with ChaosProxy() as proxy:
        proxy.start(where)
        proxy.add("a")
        assert closed_at_once(proxy)
        known.append(upstream.address)
        near, far = pair(proxy, upstream)
        near.sendall(b"now")
        assert receive(far, 3) == b"now"


def test_it_survives_what_peers_do(proxy: ChaosProxy, upstream: Upstream) -> None:
    for index in range(40):
        near = dial(proxy)
        if index % 4 == 0:
            reset(near)
        elif index % 4 == 1:
            near.close()
        elif index % 4 == 2:
            near.sendall(bytes(100_000))
            reset(near)
        else:
            near.sendall(bytes([index]))
            while first_byte(far := upstream.next()) != bytes([index]):
                far.close()
            reset(far)
            assert is_reset(near)
    wait_until(lambda: proxy.stats("a").connections_open == 0, "the proxy forgets them")
    near, far = pair(proxy, upstream, "b")
    near.sendall(b"fine")
    while first_byte(far) != b"f":
        far = upstream.next()
    assert receive(far, 3) == b"ine"


def test_more_connections_than_allowed_are_closed_at_once(proxy: ChaosProxy, upstream: Upstream) -> None:
    kept = [pair(proxy, upstream) for _ in range(CONNECTIONS_MAX)]
    assert closed_at_once(proxy)
    near, far = kept[0]
    near.sendall(b"still here")
    assert receive(far, 10) == b"still here"
    for near, far in kept:
        near.close()
        far.close()
    wait_until(lambda: proxy.stats("a").connections_open == 0, "the connections end")
    pair(proxy, upstream)


def test_closing_leaves_no_task_thread_or_socket(upstream: Upstream) -> None:
    def open_files() -> int:
        folder = Path("/proc/self/fd")
        return len(list(folder.iterdir())) if folder.is_dir() else 0

    gc.collect()  # sockets of earlier tests
    files = open_files()
    ways = [Way(), Way(blocked=True), Way(stalled=True), Way(delay_s=HOUR_S), Way(bits_per_s=1.0)]
    proxy = ChaosProxy()
    proxy.start(lambda: upstream.address)
    sockets = []
    for index, way in enumerate(ways):
        near, far = pair(proxy, upstream, f"learner-{index}")
        proxy.set(f"learner-{index}", Weather(up=way))
        near.sendall(b"something under way")
        sockets += [near, far]
    hanging = dial(proxy, "learner-1")  # accepted, but not connected because of the partition
    proxy.close()
    assert all(is_reset(each) for each in [*sockets, hanging])
    for each in [*sockets, hanging]:
        each.close()
    assert open_files() <= files
    assert not [thread for thread in threading.enumerate() if thread.name == "chaos-proxy"]
    proxy.close()
    with pytest.raises(LaunchError, match="not running"):
        proxy.add("late")
    with pytest.raises(LaunchError, match="use a new one"):
        proxy.start(lambda: upstream.address)


def test_misuse_is_refused(proxy: ChaosProxy) -> None:
    with pytest.raises(ConfigError, match="no link for nobody; add it first"):
        proxy.set("nobody", PERFECT)
    with pytest.raises(ConfigError, match="delay_s of a link must be 0 or more"):
        Way(delay_s=-1.0)
    with pytest.raises(LaunchError, match="cannot listen"), ChaosProxy(host="192.0.2.1") as elsewhere:
        elsewhere.start(lambda: ("127.0.0.1", 1))
        elsewhere.add("a")
    with pytest.raises(LaunchError, match="not running"):
        ChaosProxy().add("a")


def test_weather_is_composed_of_the_active_faults() -> None:
    faults = [
        Fault("delay", "a", at_s=0, lasts_s=9, amount=30.0),
        Fault("delay", "a", at_s=1, lasts_s=9, amount=20.0, direction="up"),
        Fault("limit", "a", at_s=1, lasts_s=9, amount=500.0),
        Fault("limit", "a", at_s=2, lasts_s=9, amount=800.0, direction="down"),
        Fault("corrupt", "a", at_s=2, lasts_s=9, amount=2.0, direction="down"),
        Fault("partition", "a", at_s=3, lasts_s=9, direction="up"),
        Fault("kill", "a", at_s=4),
    ]
    assert Weather.of(faults) == Weather(
        up=Way(delay_s=0.05, bits_per_s=500_000.0, blocked=True),
        down=Way(delay_s=0.03, bits_per_s=500_000.0, flips_per_mb=2.0),
    )
    stall = Fault("stall", "a", at_s=0, lasts_s=1)
    assert Weather.of([stall]) == Weather(up=Way(stalled=True), down=Way(stalled=True))
    assert Weather.of([]) == PERFECT
