"""The port for payloads past gRPC of a real syncer, with and without the token."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import certificate
from cluster import WAIT_S, check_books
from guarded import TOKEN, GuardedSyncer
from ports import quiet_port
from raw_direct import Peer, contribution, theta_of
from raw_learner import RawLearner
from test_port_descriptors import OWN, open_silently

from atoll.core import TensorSpec
from atoll.core import messages as m
from atoll.wire import direct, parts
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.limits import (
    DESCRIPTORS_RESERVED,
    DIRECT_ENDING_S,
    DIRECT_STRANGERS_MAX,
    FETCHES_PER_LEARNER_MAX,
    PART_BYTES_MIN,
    STRIPES_MAX,
)
from atoll.wire.seal import seal

LARGE = (TensorSpec("w0", (4096, 1024), "float32"), TensorSpec("w1", (4096, 1024), "float32"))
"""Two fragments of 16 MiB: more than the kernel takes of a fetch that nobody reads."""


class Syncer(GuardedSyncer):
    def __init__(
        self, folder: Path, *options: str, descriptors: tuple[int, int] | None = None, tls_ca: str = ""
    ) -> None:
        self.port, self._names = quiet_port(), itertools.count()
        super().__init__(folder, "--bulk-port", str(self.port), *options, descriptors=descriptors, tls_ca=tls_ca)

    def peer(self, token: str = TOKEN) -> Peer:
        peer = Peer(self.port)
        assert peer.greet(token) == direct.WELCOME
        return peer

    def raw(self, **options: object) -> RawLearner:
        """A newcomer, of whom nobody has heard."""
        name = f"raw-{next(self._names)}"
        return RawLearner(self.address, name, token=TOKEN, **options).join()  # type: ignore[arg-type]

    def said_nothing_wrong(self) -> None:
        assert "Traceback" not in self.output() and "inside the syncer" not in self.output(), self.output()


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[Syncer]:
    made = Syncer(tmp_path)
    yield made
    made.said_nothing_wrong()
    made.kill()


# ---------------------------------------------------------------- without the token


def test_silent_strangers_are_few_and_learners_are_let_in_past_them(tmp_path: Path) -> None:
    syncer = Syncer(tmp_path)
    honest = syncer.train()
    syncer.wait_commits(2)
    before = syncer.descriptors
    place = f"127.0.0.1:{syncer.port}"
    silent = open_silently(place, 300)
    for one in silent[::2]:
        with contextlib.suppress(OSError):
            one.sendall(direct.MAGIC + b"T")
    syncer.wait_descriptors(before + DIRECT_STRANGERS_MAX + 8)
    assert syncer.peer().open(b"") == m.Refusal.BAD_REQUEST  # let in, and heard
    syncer.wait_commits(4)
    honest.stop()
    assert honest.error is None
    syncer.said_nothing_wrong()
    for one in silent:
        one.close()
    syncer.stop()


def test_half_handshakes_cost_no_more_than_silence_and_nothing_is_read_in_clear(tmp_path: Path) -> None:
    pem, key = certificate(tmp_path, "localhost", "127.0.0.1")
    syncer = Syncer(tmp_path, "--tls-certificate", pem, "--tls-key", key, tls_ca=pem)
    honest = syncer.train()
    syncer.wait_commits(2)
    before = syncer.descriptors
    half = open_silently(f"127.0.0.1:{syncer.port}", 200)
    for one in half:
        with contextlib.suppress(OSError):
            one.sendall(b"\x16\x03\x01\x02\x00\x01")
    syncer.wait_descriptors(before + DIRECT_STRANGERS_MAX + 8)
    plain = Peer(syncer.port)
    with pytest.raises(OSError):
        plain.greet(TOKEN)
    context = ssl.create_default_context(cafile=pem)
    secured = Peer(syncer.port, context)
    assert secured.greet(TOKEN) == direct.WELCOME
    other = certificate(tmp_path, "127.0.0.1", stem="other")[0]
    with pytest.raises(ssl.SSLCertVerificationError):
        Peer(syncer.port, ssl.create_default_context(cafile=other))
    syncer.wait_commits(2)
    honest.stop()
    assert honest.error is None
    syncer.said_nothing_wrong()
    syncer.stop()


def test_a_wrong_token_opens_nothing_and_a_claim_of_size_costs_nothing(syncer: Syncer) -> None:
    for token in ("", "x" * 16000, b"\xff\x00\xfe" * 30, "token of mine", TOKEN + "\n", "\U0001f600"):
        peer = Peer(syncer.port)
        assert peer.greet(token) == direct.REFUSED
        assert peer.is_cut()
    before = syncer.memory_peak
    for size in (16 * 1024 + 1, 2**31, 2**32 - 1):
        peer = Peer(syncer.port)
        peer.wire.send(direct.MAGIC + struct.pack("<cI", b"T", size))
        assert peer.is_cut()
    for first in (b"P", b"F", b"\x00"):
        peer = Peer(syncer.port)
        peer.wire.send(direct.MAGIC + struct.pack("<cI", first, 4) + b"abcd")
        assert peer.is_cut()
    assert syncer.memory_peak - before < 16 << 20


# ---------------------------------------------------------------- with the token


def test_whoever_has_the_token_leaves_descriptors_for_commits(tmp_path: Path) -> None:
    syncer = Syncer(tmp_path, descriptors=(512, 512))
    honest = syncer.train()
    syncer.wait_commits(2)
    held = []
    for _ in range(500):
        peer = Peer(syncer.port)
        try:
            assert peer.greet(TOKEN) == direct.WELCOME
        except OSError:
            break  # no room
        held.append(peer)
    assert len(held) > 64
    assert syncer.descriptors <= 512 - DESCRIPTORS_RESERVED + OWN
    syncer.wait_commits(4)
    late = syncer.train("late")  # through gRPC
    late.wait_steps(20)
    for thread in (honest, late):
        thread.stop()
        assert thread.error is None
    assert "Too many open files" not in syncer.output()
    syncer.said_nothing_wrong()
    for peer in held:
        peer.close()
    syncer.stop()


def test_nobody_pushes_or_fetches_in_anothers_name(syncer: Syncer) -> None:
    victim, liar = syncer.raw(), syncer.raw()
    assert victim.welcome is not None and liar.welcome is not None
    peer = syncer.peer()
    header, payload = contribution(victim)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"secret": ""}, m.Refusal.SECRET),
        ({"secret": liar.welcome.secret}, m.Refusal.SECRET),
        ({"generation": 0}, m.Refusal.STALE_GENERATION),
        ({"generation": 2}, m.Refusal.STALE_GENERATION),
        ({"learner": "nobody"}, m.Refusal.UNKNOWN_LEARNER),
        ({"learner": "l\u0435"}, m.Refusal.BAD_REQUEST),
        ({"learner": ""}, m.Refusal.BAD_REQUEST),
    ]
    for lies, code in refused:
        assert peer.open(dataclasses.replace(header, **lies)) == code, lies
        assert peer.fetch(theta_of(victim, **lies)) == code, lies
    assert peer.open(header) == ""  # a refusal ends nothing
    peer.part(payload)
    assert peer.end().accepted


def test_the_secret_of_an_earlier_session_is_worth_nothing(syncer: Syncer) -> None:
    learner = syncer.raw()
    peer = syncer.peer()
    header, payload = contribution(learner)
    assert peer.open(header) == ""  # under way when the session ends
    learner.drop()
    again = RawLearner(syncer.address, learner.name, token=TOKEN)
    again.instance = learner.instance
    again.join()
    other = syncer.peer()
    assert other.open(header) == m.Refusal.SECRET
    assert other.fetch(theta_of(learner)) == m.Refusal.SECRET
    peer.part(payload)
    peer.end()  # whatever becomes of it, it is the same process's own work
    check_books(syncer.status())


def test_sizes_that_are_claimed_are_held_against_the_layout(syncer: Syncer) -> None:
    liar = syncer.raw()
    peer = syncer.peer()
    header, payload = contribution(liar)
    before = syncer.memory_peak
    for size in (1 << 30, 64 << 30):
        assert peer.open(dataclasses.replace(header, size=size)) == m.Refusal.SIZE
    for size in ((64 << 30) + 1, 2**63 - 1):
        assert peer.open(dataclasses.replace(header, size=size)) == m.Refusal.BAD_REQUEST
    for changes in ({"stripes": STRIPES_MAX + 1}, {"stripes": 0}, {"part_bytes": PART_BYTES_MIN - 1}):
        assert peer.open(header, **changes) == m.Refusal.BAD_REQUEST
    assert peer.open(pb.PushOpen(attempt_id=1).SerializeToString()) == m.Refusal.BAD_REQUEST
    assert peer.open(b"\xff" * 100) == m.Refusal.BAD_REQUEST
    assert peer.fetch(b"\xff" * 100) == m.Refusal.BAD_REQUEST
    assert peer.fetch(theta_of(liar, offset=2**61)) == m.Refusal.SIZE
    assert peer.fetch(theta_of(liar, fragment=999)) != ""
    assert peer.fetch(theta_of(liar, version=17)) == m.Refusal.UNKNOWN_VERSION
    assert syncer.memory_peak - before < 64 << 20
    short = dataclasses.replace(header, size=len(payload) - 1)
    assert peer.open(short) == ""  # a size that the layout allows, and that the codec does not
    peer.part(payload[:-1])
    assert not peer.end().accepted


def test_an_empty_payload_is_refused_and_ends_nothing_inside(syncer: Syncer) -> None:
    liar = syncer.raw()
    for attempt in range(20):
        peer = syncer.peer()
        header, _ = contribution(liar, size=0)
        if (code := peer.open(header, attempt=attempt)) == "":
            assert not peer.end().accepted
        else:
            assert code
        peer.close()
    syncer.said_nothing_wrong()


def test_a_stripe_that_has_nothing_to_bring_and_comes_last_hears_the_answer(syncer: Syncer) -> None:
    """As of a rank whose blocks are not in this payload."""
    learner = syncer.raw()
    for _ in range(3):
        header, payload = contribution(learner)
        first, second = syncer.peer(), syncer.peer()
        assert first.open(header, stripes=2) == ""
        first.part(payload)
        code = second.open(header, stripes=2)
        assert code in ("", m.Refusal.DUPLICATE)  # it may come after the answer
        assert first.end().accepted and (code or second.end().accepted)


def test_a_connection_serves_one_push_after_the_other(syncer: Syncer) -> None:
    """What ends who sends on after the decision must not end his next push."""
    learner = syncer.raw()
    peer = syncer.peer()
    header, payload = contribution(learner)
    assert peer.open(header) == ""
    peer.part(payload)
    assert peer.end().accepted
    header, payload = contribution(learner)
    assert peer.open(header) == ""
    time.sleep(2 * DIRECT_ENDING_S)  # a thin link
    peer.part(payload)
    assert peer.end().accepted


def test_parts_that_lie_are_refused_by_name_and_nothing_of_them_counts(syncer: Syncer) -> None:
    liar = syncer.raw()
    _, payload = contribution(liar)
    lies = [
        {"checksum": 1},
        {"offset": 1},
        {"offset": 2**63},
        {"length": len(payload) - 1},
        {"length": 2**32 - 1},
    ]
    for lie in lies:
        header, payload = contribution(liar)
        peer = syncer.peer()
        assert peer.open(header) == ""
        peer.part(payload, **lie)
        assert not peer.answer().accepted, lie
    header, payload = contribution(liar, checksum=12345)
    peer = syncer.peer()
    assert peer.open(header) == ""
    peer.part(payload)
    assert peer.end().code == m.Refusal.CHECKSUM
    before = sum(syncer.status()[name] for name in ("tokens_pending", "tokens_merged"))
    header, payload = contribution(liar)
    assert peer.open(header) == ""
    peer.part(payload)
    peer.wire.send(direct.PART.pack(0, len(payload), 0) + payload)  # twice
    peer.part(b"")
    assert peer.answer().accepted in (True, False)
    status = syncer.status()
    assert status["tokens_pending"] + status["tokens_merged"] - before <= 32
    check_books(status)


def test_a_replay_of_all_that_was_sent_counts_once(syncer: Syncer) -> None:
    learner = syncer.raw()
    header, payload = contribution(learner)
    before = sum(syncer.status()[name] for name in ("tokens_pending", "tokens_merged"))
    for number in range(5):
        peer = syncer.peer()
        code = peer.open(header)
        if number == 0:
            assert code == ""
            peer.part(payload)
            assert peer.end().accepted
        else:
            assert code == m.Refusal.DUPLICATE
    status = syncer.status()
    assert status["tokens_pending"] + status["tokens_merged"] - before <= 32
    check_books(status)


def test_peers_that_stop_in_the_middle_hold_no_more_than_their_share(syncer: Syncer) -> None:
    liar, honest = syncer.raw(tensors=LARGE), syncer.raw(tensors=LARGE)
    assert liar.welcome is not None
    for number in range(100):
        header, payload = contribution(liar)
        peer = syncer.peer()
        if (code := peer.open(header, part_bytes=PART_BYTES_MIN)) != "":
            assert code == m.Refusal.BUSY
        else:
            peer.part(payload[:PART_BYTES_MIN])
            peer.wire.send(direct.PART.pack(PART_BYTES_MIN, PART_BYTES_MIN, 0) + b"x" * 1000)
        if number % 2:
            peer.abort()
    syncer.wait_for(lambda status: True, "the syncer answers")
    assert honest.contribute(0).accepted


def test_fetches_that_nobody_reads_hold_one_copy_and_their_number_has_a_bound(syncer: Syncer) -> None:
    liar, honest = syncer.raw(tensors=LARGE), syncer.raw(tensors=LARGE)
    before = syncer.memory_peak
    peers, refused = [], 0
    for _ in range(FETCHES_PER_LEARNER_MAX + 8):
        peers.append(peer := syncer.peer())
        refused += peer.fetch(theta_of(liar)) == m.Refusal.BUSY
    assert refused == 8
    assert syncer.memory_peak - before < 100 << 20
    peer = syncer.peer()
    assert peer.fetch(theta_of(honest)) == ""
    assert honest.contribute(0).accepted
    for one in peers:
        one.abort()
    deadline_s = time.monotonic() + WAIT_S
    while syncer.peer().fetch(theta_of(liar, offset=16 << 20)) == m.Refusal.BUSY:
        assert time.monotonic() < deadline_s, "the fetches of connections that are gone count for ever"


def test_garbage_after_the_token_ends_its_connection_only(syncer: Syncer) -> None:
    learner = syncer.raw()
    frames = [
        struct.pack("<cI", b"T", 4) + b"abcd",
        struct.pack("<cI", b"P", 2**32 - 1),
        b"\xff" * 4096,
    ]
    for frame in frames:
        peer = syncer.peer()
        peer.wire.send(frame)
        assert peer.is_cut(), frame
    message = seal(parts.encode_fetch_request(theta_of(learner)))
    peer = syncer.peer()
    for _ in range(3):  # requests without waiting for what they bring
        peer.wire.send_frame(direct.FETCH, message)
    for _ in range(3):
        assert peer.wire.receive_message(direct.HEADER)[0] == direct.HEADER
        offset, length, checksum = peer.wire.receive_head()
        peer.wire.receive_data(memoryview(bytearray(length)), offset, checksum)
