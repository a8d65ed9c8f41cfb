"""host:port strings: what they mean, and which of them stay on this machine."""

from __future__ import annotations

import ipaddress

from atoll.errors import ConfigError
from atoll.wire.limits import ADDRESSES_MAX

TEST_NETWORK = ipaddress.ip_network("198.18.0.0/15")
"""Set aside for tests of networks (RFC 2544): no route of the internet leads there."""


def split_address(address: str) -> tuple[str, int]:
    """ "127.0.0.1:7077" -> ("127.0.0.1", 7077); "[::1]:7077" -> ("::1", 7077)."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or ("::" not in host and ":" in host) or not port.isascii() or not port.isdigit():
        raise ConfigError(f"address {address!r} is not host:port; write it like 127.0.0.1:7077 or [::1]:7077")
    if int(port) > 65535:
        raise ConfigError(f"port {port} of address {address!r} is above 65535; choose one from 1 to 65535")
    return host, int(port)


def split_addresses(addresses: str) -> tuple[str, ...]:
    """ "a:7077,b:7077" -> ("a:7077", "b:7077"): where a syncer may be, in the order in which they are tried."""
    places = tuple(place.strip() for place in addresses.split(","))
    if len(places) > ADDRESSES_MAX:
        raise ConfigError(f"{len(places)} addresses of one syncer; give at most {ADDRESSES_MAX}")
    for place in places:
        if split_address(place)[1] == 0:
            raise ConfigError(f"address {place!r} has port 0; give the port that the syncer printed")
    return places


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True when bytes sent to `host` cannot leave this machine. Other names are not looked up: an answer from the
    network must not decide whether a token may be sent in clear."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_in_test_network(host: str) -> bool:
    """True for addresses that only a test of networks uses, such as a storm's links between namespaces of a machine."""
    try:
        return ipaddress.ip_address(host) in TEST_NETWORK
    except ValueError:
        return False
