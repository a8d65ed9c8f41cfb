"""Opening the port: what is refused, with which remedy, and TLS."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from wire_fakes import FakeSyncer, bulk_client, fetch_request, hello, payload_of, push_header, run, serving

import atoll.wire
from atoll.errors import ConfigError, LaunchError, RefusedError, RemoteProtocolError, UnreachableError
from atoll.wire import ClientOptions, ControlClient, ServerOptions, ask_to_leave, fetch_status, serve
from atoll.wire.address import is_loopback, split_address
from atoll.wire.transport import grpc


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    key, pem = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(pem), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return str(pem), str(key)


def test_everything_works_under_tls(certificate: tuple[str, str]) -> None:
    async def main() -> None:
        payload = payload_of(5_000_000)
        service = FakeSyncer(content=payload)
        pem, key = certificate
        secrets = {"token": "secret", "tls_certificate": pem, "tls_key": key}
        async with serving(service, listen="0.0.0.0:0", **secrets) as server:
            address = server.address.replace("0.0.0.0", "127.0.0.1")
            options = ClientOptions(address, token="secret", tls_ca=pem)
            async with ControlClient(options) as client:
                assert (await client.open(hello())).run == "run"
            async with bulk_client(address, token="secret", tls_ca=pem) as client:
                assert (await client.push(push_header(payload), payload)).accepted
                assert (await client.fetch(fetch_request()))[1].nbytes == payload.nbytes
            with pytest.raises(UnreachableError):
                await fetch_status(ClientOptions(address, token="secret"))

    run(main())


def test_a_certificate_from_elsewhere_is_not_trusted(certificate: tuple[str, str]) -> None:
    async def main() -> None:
        pem, key = certificate
        async with serving(FakeSyncer(), tls_certificate=pem, tls_key=key) as server:
            with pytest.raises(UnreachableError):
                await fetch_status(ClientOptions(server.address, tls_ca="system"))

    run(main())


def test_one_learner_is_asked_to_leave_through_the_syncer() -> None:
    async def main() -> None:
        async with serving(FakeSyncer()) as server, ControlClient(ClientOptions(server.address)) as client:
            await client.open(hello("a"))
            options = ClientOptions(server.address)
            assert await ask_to_leave(options, "a") == "active"
            for name, words in (("b", "no learner 'b'"), ("", "1 to 200 printable"), ("x" * 300, "1 to 200 printable")):
                with pytest.raises(RefusedError, match=words):
                    await ask_to_leave(options, name)
            assert server.peer_of(1) == "127.0.0.1" and server.peer_of(2) == ""

    run(main())


def test_a_syncer_that_is_too_old_for_a_question_says_so() -> None:
    async def main() -> None:
        old = grpc.aio.server()
        old.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("atoll.v1.Control", {}),))
        port = old.add_insecure_port("127.0.0.1:0")
        await old.start()
        with pytest.raises(RemoteProtocolError, match="older than this command; update it"):
            await ask_to_leave(ClientOptions(f"127.0.0.1:{port}"), "a")
        await old.stop(0)

    run(main())


@pytest.mark.parametrize("with_tls, token", [(False, ""), (False, "secret"), (True, "")])
def test_listening_to_the_network_needs_tls_and_a_token(
    certificate: tuple[str, str], with_tls: bool, token: str
) -> None:
    pem, key = certificate if with_tls else ("", "")
    options = ServerOptions(listen="0.0.0.0:0", token=token, tls_certificate=pem, tls_key=key)
    with pytest.raises(ConfigError, match="--tls-certificate"):
        run(serve(FakeSyncer(), options))


def test_a_port_in_use_is_named_with_the_remedy() -> None:
    async def main() -> None:
        async with serving(FakeSyncer()) as server:
            port = split_address(server.address)[1]
            with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is in use.*--listen"):
                await serve(FakeSyncer(), ServerOptions(listen=server.address))

    run(main())


def test_a_port_held_by_something_else_is_named_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(LaunchError, match="is in use"):
            run(serve(FakeSyncer(), ServerOptions(listen=address)))


def test_unusable_certificates_are_refused(tmp_path: Path, certificate: tuple[str, str]) -> None:
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("not a certificate")
    for pem in (str(tmp_path / "missing.pem"), str(rubbish)):
        with pytest.raises(ConfigError, match="PEM"):
            run(serve(FakeSyncer(), ServerOptions(tls_certificate=pem, tls_key=certificate[1])))
        with pytest.raises(ConfigError, match="PEM"):
            ClientOptions("127.0.0.1:1", tls_ca=pem)
    with pytest.raises(ConfigError, match="both"):
        ServerOptions(tls_certificate=certificate[0])


def test_a_token_is_never_sent_in_clear_to_another_machine() -> None:
    with pytest.raises(ConfigError, match="in clear"):
        ClientOptions("192.0.2.1:7077", token="secret")
    with pytest.raises(ConfigError, match="in clear"):
        ClientOptions("syncer.example.org:7077", token="secret")
    ClientOptions("192.0.2.1:7077")
    ClientOptions("localhost:7077", token="secret")


@pytest.mark.parametrize(
    "address", ["", "7077", "host", "host:", ":7077", "host:port", "host:70777", "host:-1", "h:1:2"]
)
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:7077|65535"):
        split_address(address)


def test_addresses_and_what_is_loopback() -> None:
    assert split_address("[::1]:7077") == ("::1", 7077)
    assert split_address("a.b:1") == ("a.b", 1)
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "192.168.0.1", "localhost.example.org"]))


@pytest.mark.parametrize("token", ["with\nnewline", "käse", " padded ", "x" * 300])
def test_tokens_that_cannot_travel_are_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="token_urlsafe"):
        ClientOptions("127.0.0.1:1", token=token)


def test_the_front_door_has_what_it_says_and_does_not_load_grpc() -> None:
    for name in atoll.wire.__all__:
        assert getattr(atoll.wire, name) is not None
    with pytest.raises(AttributeError):
        _ = atoll.wire.nothing
    code = "import sys, atoll.wire; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
