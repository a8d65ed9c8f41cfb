"""Why a syncer cannot be reached. gRPC calls nearly everything "unavailable", so the system and TLS are asked directly:
one lookup, one connection, one handshake, all within PROBE_S."""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from dataclasses import dataclass

from atoll.errors import UnreachableError
from atoll.wire.address import split_address
from atoll.wire.channel import SYSTEM_ROOTS, ClientOptions
from atoll.wire.limits import PROBE_ADDRESSES_MAX, PROBE_S

EXPIRED, NOT_YET_VALID = 10, 9
NAME_MISMATCH = frozenset({62, 64})
"""OpenSSL's verify codes (X509_V_ERR_...): for host names and for IP addresses."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How HTTP/2, and so gRPC, begins in clear (RFC 9113, 3.4): a fixed text and an empty SETTINGS frame."""
SETTINGS_FRAME = 4
FRAME_HEADER_BYTES = 9

Places = list[tuple[socket.AddressFamily, tuple[object, ...]]]


@dataclass(frozen=True, slots=True)
class Cause:
    """What is wrong and what to do, in one sentence."""

    text: str
    final: bool = False
    """Trying again does not help: the certificate cannot be trusted."""


class _Found(Exception):
    def __init__(self, text: str, *, final: bool = False) -> None:
        self.cause = Cause(text, final)


def find_cause(options: ClientOptions, timeout_s: float = PROBE_S) -> Cause | None:
    """What keeps us from the syncer, or None if the connection itself is fine. Blocks for at most `timeout_s`. Of
    several addresses each has its own cause, and one that is fine is enough."""
    try:
        several = options.places()
    except UnreachableError as error:  # the file that tells where it is
        return Cause(str(error), final=False)
    if len(several) > 1:
        causes = [find_cause(place, timeout_s / len(several)) for place in several]
        told = [cause for cause in causes if cause is not None]
        if len(told) < len(causes):
            return None
        return Cause("; ".join(cause.text for cause in told), all(cause.final for cause in told))
    options, deadline_s = several[0], time.monotonic() + timeout_s
    host, port = split_address(options.address)
    try:
        places = _resolve(host, port, deadline_s)
        if options.tls_ca:
            _shake_hands(options, places, deadline_s)
        elif _speaks_tls(options.address, places, deadline_s):
            raise _Found(
                f"the syncer at {options.address} speaks TLS and this side does not; set ATOLL_TLS_CA (or --tls-ca) to "
                f"its certificate, or to the one that signed it"
            )
    except _Found as found:
        return found.cause
    return None


def _resolve(host: str, port: int, deadline_s: float) -> Places:
    """Addresses of a name. The system's own lookup cannot be given up, so it has a thread of its own."""
    answer: list[Places | OSError] = []

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.append([(family, place) for family, _, _, _, place in found])
        except OSError as error:
            answer.append(error)

    thread = threading.Thread(target=look_up, name="atoll-lookup", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline_s - time.monotonic()))
    if not answer:
        raise _Found(f"looking up the name {host!r} takes too long; check this machine's DNS, or give an IP address")
    if isinstance(answer[0], OSError):
        reason = answer[0].strerror or str(answer[0])
        raise _Found(f"the name {host!r} does not resolve ({reason}); correct it, or give an IP address")
    return answer[0][:PROBE_ADDRESSES_MAX]


def _connect(address: str, places: Places, deadline_s: float) -> socket.socket:
    """The first of these addresses that takes a connection; each gets its share of the time that is left."""
    error: OSError = TimeoutError()
    for number, (family, place) in enumerate(places):
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(max(0.1, (deadline_s - time.monotonic()) / (len(places) - number)))
        try:
            connection.connect(place)
            return connection
        except OSError as failed:
            connection.close()
            error = failed
    raise _Found(_connect_problem(address, error))


def _connect_problem(address: str, error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return (
            f"connection refused at {address}: the machine is there, but no syncer listens on that port; start it with "
            f"`atoll syncer --listen`, or correct the port"
        )
    if isinstance(error, TimeoutError):
        return (
            f"no answer from {address}: the machine is down, or a firewall drops what is sent to that port; open it "
            f"there, or correct the address"
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"no route to {address} ({error.strerror}); check this machine's network, or correct the address"
    return f"no connection to {address} ({error.strerror or error}); check the address and the network"


# ---------------------------------------------------------------- TLS


def trusting(cafile: str) -> ssl.SSLContext:
    """A client's context that believes what gRPC's believes: a certificate in `cafile` is trusted whoever signed it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2"])
    if cafile == SYSTEM_ROOTS:
        context.load_default_certs()
    else:
        context.load_verify_locations(cafile)
    return context


def certificate_until(options: ClientOptions) -> float | None:
    """Until when the certificate over there is valid, in seconds since 1970; None if it cannot be told."""
    host, port = split_address(options.address)
    try:
        with (
            socket.create_connection((host, port), PROBE_S) as connection,
            trusting(options.tls_ca).wrap_socket(connection, server_hostname=options.tls_name or host) as shaken,
        ):
            found = shaken.getpeercert() or {}
        return float(ssl.cert_time_to_seconds(str(found["notAfter"])))
    except (OSError, ValueError, KeyError):
        return None


def _shake_hands(options: ClientOptions, places: Places, deadline_s: float) -> None:
    host = options.tls_name or split_address(options.address)[0]
    with _connect(options.address, places, deadline_s) as connection:
        connection.settimeout(max(0.1, deadline_s - time.monotonic()))
        try:
            trusting(options.tls_ca).wrap_socket(connection, server_hostname=host).close()
            return
        except ssl.SSLCertVerificationError as error:
            raise _Found(_certificate_problem(options, host, error), final=True) from None
        except TimeoutError:
            raise _Found(
                f"{options.address} takes connections but does not answer TLS; check that the address leads to the "
                f"syncer, and its log"
            ) from None
        except OSError as error:
            problem = error
    if _speaks_plain(options.address, places, deadline_s):
        raise _Found(
            f"the syncer at {options.address} speaks no TLS and this side does; start it with --tls-certificate and "
            f"--tls-key, or unset ATOLL_TLS_CA (without --tls-ca) and reach it through a tunnel on 127.0.0.1"
        )
    reason = getattr(problem, "reason", None) or problem
    raise _Found(f"the TLS handshake with {options.address} failed ({reason}); check that a syncer listens there")


def _certificate_problem(options: ClientOptions, host: str, error: ssl.SSLCertVerificationError) -> str:
    of_it = f"the certificate of the syncer at {options.address}"
    if error.verify_code == EXPIRED:
        return f"{of_it} has expired (or this machine's clock is wrong); give the syncer a new one and start it again"
    if error.verify_code == NOT_YET_VALID:
        return f"{of_it} is not valid yet; correct the clock of this machine, or of the one that made the certificate"
    if error.verify_code in NAME_MISMATCH:
        return (
            f"{of_it} is not for {host!r} (verify: {error.verify_message}); use a name that it holds, or make one with "
            f"subjectAltName={'IP' if _is_ip(host) else 'DNS'}:{host}"
        )
    return (
        f"{of_it} cannot be checked with {options.tls_ca!r} (verify: {error.verify_message}); set ATOLL_TLS_CA (or "
        f"--tls-ca) to the syncer's certificate, or to the one that signed it"
    )


def _is_ip(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
            return True
        except OSError:
            pass
    return False


def _speaks_tls(address: str, places: Places, deadline_s: float) -> bool:
    """Whether a handshake works when nothing is verified: all that is asked is which language is spoken."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with _connect(address, places, deadline_s) as connection:
        connection.settimeout(max(0.1, deadline_s - time.monotonic()))
        try:
            context.wrap_socket(connection).close()
        except OSError:
            return False
    return True


def _speaks_plain(address: str, places: Places, deadline_s: float) -> bool:
    """Whether gRPC in clear is answered: the other side begins with SETTINGS as well."""
    with _connect(address, places, deadline_s) as connection:
        connection.settimeout(max(0.1, deadline_s - time.monotonic()))
        try:
            connection.sendall(PREFACE)
            answer = connection.recv(FRAME_HEADER_BYTES, socket.MSG_WAITALL)
        except OSError:
            return False
    return len(answer) == FRAME_HEADER_BYTES and answer[3] == SETTINGS_FRAME
