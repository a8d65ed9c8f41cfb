"""host:port strings: what they mean, and which of them stay on this machine."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

from atoll.errors import ConfigError, UnreachableError
from atoll.wire.limits import ADDRESSES_MAX

TEST_NETWORK = ipaddress.ip_network("198.18.0.0/15")
"""Set aside for tests of networks (RFC 2544): no route of the internet leads there."""

EVERYWHERE = ("0.0.0.0", "::")
"""What a syncer listens on that listens on all interfaces: it is reached by its host's name."""
TOLD_CHARS_MAX = 64 << 10
"""A file that tells where the syncer is has some hundred characters."""


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
    """ "a:7077,b:7077" -> ("a:7077", "b:7077"): where a syncer may be, in the order in which they are tried. "@FILE" is
    whatever the file says now: RUN/syncer.json, which a syncer writes, or a line of addresses. It may come last:
    "relay:7079,@FILE"."""
    fixed, _, file = f",{addresses}".partition(",@")
    named = [fixed.strip(","), _told(Path(file).expanduser())] if file else [addresses]
    places = tuple(place.strip() for text in named if text for place in text.split(","))
    if len(places) > ADDRESSES_MAX:
        raise ConfigError(f"{len(places)} addresses of one syncer; give at most {ADDRESSES_MAX}")
    for place in places:
        if split_address(place)[1] == 0:
            raise ConfigError(f"address {place!r} has port 0; give the port that the syncer printed")
    return places


def is_told_by_file(addresses: str) -> bool:
    """True for "@FILE": a syncer that an engine may start anywhere is not known in advance."""
    return ",@" in f",{addresses}"


def _told(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(TOLD_CHARS_MAX).strip()
        if not text.startswith("{"):
            return text
        told = json.loads(text)
        host, port = split_address(str(told["address"]))
        return join_address(str(told["host"]) if host in EVERYWHERE else host, port)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreachableError(
            f"{path} does not say where the syncer is ({error!r}); check that the syncer has started and that this "
            f"machine sees its run folder"
        ) from None


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
