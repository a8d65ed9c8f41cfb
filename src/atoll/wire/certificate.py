"""What a syncer's own certificate says: looked at when the syncer starts, before a learner on another machine does.

Python's ssl shows a certificate only to the other side of a handshake. So one is made, in memory and with ourselves."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from typing import Any

from atoll.errors import ConfigError
from atoll.wire.cause import trusting

EXPIRES_SOON_S = 14 * 86_400.0
"""A warning this long before the end: time to make a new certificate between two looks at a long run."""
NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python has no name for: the dates are ours to judge, and to tell."""
HANDSHAKE_TURNS_MAX = 10
"""TLS 1.2 and 1.3 need three; the bound only ends a handshake that goes nowhere."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The dates and names of a certificate. Names are DNS names and IP addresses that it may be reached under."""

    path: str
    names: tuple[str, ...]
    from_s: float
    until_s: float

    def check(self, now_s: float) -> list[str]:
        """What somebody should know, in sentences. Raises ConfigError if nobody could trust it now."""
        if now_s >= self.until_s:
            raise ConfigError(
                f"the certificate {self.path} has expired on {_day(self.until_s)}, so no learner would trust this "
                f"syncer; make a new one, or correct this machine's clock"
            )
        if now_s < self.from_s:
            raise ConfigError(
                f"the certificate {self.path} is not valid before {_day(self.from_s)}; correct this machine's clock"
            )
        warnings = []
        if self.until_s - now_s < EXPIRES_SOON_S:
            warnings.append(
                f"the certificate {self.path} expires on {_day(self.until_s)}; make a new one before that, and start "
                f"the syncer again with it: learners that are in the run wait for it"
            )
        if not self.names:
            warnings.append(
                f"the certificate {self.path} holds no names, so learners cannot check whom they reach; make one with "
                f"subjectAltName=DNS:name or IP:address of this machine"
            )
        return warnings


def read_certificate(path: str, key: str) -> Certificate:
    """Load certificate and key, and read the first certificate. Raises ConfigError if they cannot be used."""
    try:
        server = serving_with(path, key)
        found = _seen_by_a_client(server, path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use certificate {path} with key {key}: {_why(error)}") from None
    names = tuple(value for kind, value in found.get("subjectAltName", ()) if kind in ("DNS", "IP Address"))
    common = [value for part in found["subject"] for kind, value in part if kind == "commonName"]
    until_s, from_s = (ssl.cert_time_to_seconds(found[name]) for name in ("notAfter", "notBefore"))
    return Certificate(path, names or tuple(common), from_s, until_s)


def serving_with(path: str, key: str) -> ssl.SSLContext:
    """A server's context. It gives out no tickets: connections are few and long, and a ticket is a word out of turn."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key)
    context.num_tickets = 0
    return context


def _why(error: OSError) -> str:
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return "the key belongs to another certificate; give PEM files that belong together"
    return f"{error}; give PEM files that belong together"


def _seen_by_a_client(server: ssl.SSLContext, path: str) -> dict[str, Any]:
    """The certificate as `getpeercert` of the other side gives it, which trusts it because it is told to."""
    client = trusting(path)
    client.check_hostname = False
    client.verify_flags = ssl.VerifyFlags(client.verify_flags | NO_CHECK_TIME)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [server.wrap_bio(up, down, server_side=True), client.wrap_bio(down, up)]
    for _ in range(HANDSHAKE_TURNS_MAX):
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)
            if not side.server_side:
                return dict(side.getpeercert() or {})
    raise ssl.SSLError("it takes part in no handshake")


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
