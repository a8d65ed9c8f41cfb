"""Why a syncer cannot be reached, told truly; and what a syncer says of its own certificate."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from pathlib import Path

import pytest
from certificates import authority, certificate
from wire_fakes import FakeSyncer, run, serving

from atoll.errors import CertificateError, ConfigError, UnreachableError
from atoll.wire import ClientOptions, ServerOptions, fetch_status, find_cause, serve
from atoll.wire.certificate import read_certificate

HERE = ("localhost", "127.0.0.1")


def test_nothing_listening_no_such_name_and_silence_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    refused = find_cause(ClientOptions(f"127.0.0.1:{port}"))
    assert refused is not None and f"connection refused at 127.0.0.1:{port}" in refused.text and not refused.final
    unknown = find_cause(ClientOptions("no-such-host.invalid:7077"))
    assert unknown is not None and "'no-such-host.invalid' does not resolve" in unknown.text and not unknown.final
    with contextlib.ExitStack() as stack:
        # A port whose queue of connections is full drops what comes, as a firewall does.
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        filtered = find_cause(ClientOptions(f"127.0.0.1:{full.getsockname()[1]}"), timeout_s=0.5)
    assert filtered is not None and "no answer from 127.0.0.1" in filtered.text and "firewall" in filtered.text


def test_of_several_addresses_one_that_is_fine_is_enough_and_else_each_is_named() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            nobody = f"127.0.0.1:{gone.getsockname()[1]}"
        async with serving(FakeSyncer()) as server:
            both = ClientOptions(f"{nobody},{server.address}")
            assert await asyncio.to_thread(find_cause, both) is None
        neither = await asyncio.to_thread(find_cause, both)
        assert neither is not None and nobody in neither.text and server.address in neither.text and not neither.final

    run(main())


def test_a_name_that_is_looked_up_for_ever_does_not_hold_us_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [over.wait(60)][1:])
    cause = find_cause(ClientOptions("slow.example:7077"), timeout_s=0.2)
    over.set()
    assert cause is not None and "DNS" in cause.text


@pytest.mark.parametrize(
    ("made", "trusted", "words", "final"),
    [
        ("good", "good", "", False),
        ("good", "other", "cannot be checked with.*ATOLL_TLS_CA", True),
        ("old", "old", "has expired.*new one", True),
        ("early", "early", "not valid yet.*clock", True),
        ("elsewhere", "elsewhere", r"is not for '127\.0\.0\.1'.*subjectAltName=IP:127\.0\.0\.1", True),
        ("good", "", "speaks TLS and this side does not.*ATOLL_TLS_CA", False),
        ("", "good", "speaks no TLS and this side does.*--tls-certificate", False),
        ("", "", "", False),
    ],
)
def test_each_trouble_with_tls_has_its_own_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str, trusted: str, words: str, final: bool
) -> None:
    pairs = {
        "good": certificate(tmp_path, *HERE, stem="good"),
        "other": certificate(tmp_path, *HERE, stem="other"),
        "old": certificate(tmp_path, *HERE, days=(-9, -2), stem="old"),
        "early": certificate(tmp_path, *HERE, days=(2, 9), stem="early"),
        "elsewhere": certificate(tmp_path, "elsewhere.example", stem="elsewhere"),
        "": ("", ""),
    }
    monkeypatch.setattr("atoll.wire.certificate.Certificate.check", lambda *_: [])  # one that expired while it ran

    async def main() -> None:
        pem, key = pairs[made]
        async with serving(FakeSyncer(), tls_certificate=pem, tls_key=key) as server:
            options = ClientOptions(server.address, tls_ca=pairs[trusted][0])
            cause = await asyncio.to_thread(find_cause, options)
            if not words:
                assert cause is None and await fetch_status(options) == {"learners": 0}
                return
            assert cause is not None and cause.final == final and re.search(words, cause.text), cause
            with pytest.raises(CertificateError if final else UnreachableError, match=words):
                await fetch_status(options)  # gRPC itself agrees that there is no way, and we say why

    run(main())


def test_a_certificate_for_another_name_is_reached_under_that_name(tmp_path: Path) -> None:
    ca, signer = authority(tmp_path)
    pem, key = certificate(tmp_path, "syncer.example", signer=signer)

    async def main() -> None:
        async with serving(FakeSyncer(), tls_certificate=pem, tls_key=key) as server:
            for trusted in (ca[0], pem):  # whoever signed it, or the certificate itself
                options = ClientOptions(server.address, tls_ca=trusted, tls_name="syncer.example")
                assert await fetch_status(options) == {"learners": 0}
                assert await asyncio.to_thread(find_cause, options) is None

    run(main())


def test_a_syncer_reads_its_own_certificate_whoever_signed_it(tmp_path: Path) -> None:
    _, signer = authority(tmp_path)
    pair = certificate(tmp_path, "a.example", "192.0.2.7", days=(-1, 20), signer=signer)
    read = read_certificate(*pair)
    assert read.names == ("a.example", "192.0.2.7") and read.check(time.time()) == []
    assert "expires on" in read.check(read.until_s - 10 * 86_400)[0]
    with pytest.raises(ConfigError, match=r"has expired on .*make a new one"):
        read.check(read.until_s + 1)
    with pytest.raises(ConfigError, match=r"not valid before .*clock"):
        read.check(read.from_s - 1)


def test_a_syncer_refuses_to_start_with_a_certificate_that_nobody_could_trust(tmp_path: Path) -> None:
    old = certificate(tmp_path, *HERE, days=(-9, -2), stem="old")
    good, other = certificate(tmp_path, *HERE, stem="good"), certificate(tmp_path, *HERE, stem="other")
    with pytest.raises(ConfigError, match=r"old\.pem has expired on"):
        run(serve(FakeSyncer(), ServerOptions(tls_certificate=old[0], tls_key=old[1])))
    with pytest.raises(ConfigError, match="the key belongs to another certificate"):
        run(serve(FakeSyncer(), ServerOptions(tls_certificate=good[0], tls_key=other[1])))


def test_a_certificate_that_ends_soon_or_has_no_names_is_a_warning(tmp_path: Path) -> None:
    pem, key = certificate(tmp_path, days=(-1, 3))

    async def main() -> None:
        async with serving(FakeSyncer(), tls_certificate=pem, tls_key=key) as server:
            soon, nameless = server.warnings
            assert "expires on" in soon and "holds no names" in nameless and "subjectAltName" in nameless

    run(main())
