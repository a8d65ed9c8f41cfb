"""Connections that have not shown the token: which of them must go."""

from __future__ import annotations

import asyncio
import socket

import pytest
from wire_fakes import FakeSyncer, hello, run, serving, until

from atoll.wire import ClientOptions, ControlClient, fetch_status, split_address
from atoll.wire.door import Place, outstaying, place_of
from atoll.wire.limits import REFUSALS_MAX, STRANGER_S, STRANGERS_MAX, STRANGERS_PER_NETWORK_MAX


def strangers(count: int, address: str = "192.0.2.1", since_s: float = 0.0) -> dict[Place, float]:
    return {(address, 1 + number): since_s for number in range(count)}


def test_the_other_end_is_named_as_the_system_names_it() -> None:
    assert place_of("ipv4:10.0.0.3:45678") == ("10.0.0.3", 45678)
    assert place_of("ipv6:%5B::1%5D:7") == ("::1", 7)
    assert place_of("ipv6:%5Bfe80::1%25eth0%5D:7") == ("fe80::1", 7)
    assert place_of("ipv6:%5B::ffff:10.0.0.3%5D:7") == ("10.0.0.3", 7)
    assert place_of("unix:/tmp/socket") is None and place_of("") is None


def test_a_stranger_may_stay_for_a_while() -> None:
    here = strangers(3)
    assert outstaying(here, {}, STRANGER_S) == set()
    assert outstaying(here, {}, STRANGER_S + 1) == set(here)


def test_a_stranger_that_is_refused_too_often_goes_at_once() -> None:
    here = strangers(2)
    bold = next(iter(here))
    assert outstaying(here, {bold: REFUSALS_MAX}, 1.0) == set()
    assert outstaying(here, {bold: REFUSALS_MAX + 1}, 1.0) == {bold}


def test_of_too_many_from_one_network_the_oldest_go_and_others_stay() -> None:
    crowd = strangers(STRANGERS_PER_NETWORK_MAX + 5)
    others = strangers(3, "192.0.2.2")
    assert outstaying(crowd | others, {}, 1.0) == set(list(crowd)[:5])
    wide = {(f"2001:db8::{number:x}", 1): 0.0 for number in range(1, STRANGERS_PER_NETWORK_MAX + 4)}
    assert outstaying(wide | strangers(1, "2001:db8:0:1::1"), {}, 1.0) == set(list(wide)[:3])


def test_of_too_many_in_all_the_oldest_go() -> None:
    crowd: dict[Place, float] = {}
    for network in range(STRANGERS_MAX // STRANGERS_PER_NETWORK_MAX + 1):
        crowd |= strangers(STRANGERS_PER_NETWORK_MAX, f"192.0.2.{network}")
    assert outstaying(crowd, {}, 1.0) == set(list(crowd)[:STRANGERS_PER_NETWORK_MAX])


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_who_has_shown_the_token_stays_and_who_has_not_goes(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr("atoll.wire.door.LOOK_S", 0.05)
    monkeypatch.setattr("atoll.wire.door.STRANGER_S", 0.5)

    async def main() -> None:
        async with serving(FakeSyncer(), listen=f"{host}:0", token="secret") as server:
            options = ClientOptions(server.address, token="secret")
            async with ControlClient(options) as client:
                await client.open(hello())
                await asyncio.to_thread(wait_for_the_end, server.address)
                assert (await fetch_status(options))["learners"] == 1 and server.sessions_count == 1
                await until(lambda: len(server._door._known) == 1)  # what is gone is forgotten

    run(main())


def wait_for_the_end(address: str) -> None:
    """Connect and say nothing. The syncer greets, and then there is an end."""
    with socket.create_connection(split_address(address), timeout=15.0) as connection:
        while connection.recv(4096):
            pass
