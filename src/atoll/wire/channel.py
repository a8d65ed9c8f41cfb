"""The learner's end of connections: where to, with which token, under which certificate."""

from __future__ import annotations

import random
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.core import Refusal
from atoll.errors import AtollError, ConfigError, FencedError, RefusedError, UnreachableError
from atoll.wire.address import TEST_NETWORK, is_in_test_network, is_loopback, split_address, split_addresses
from atoll.wire.limits import (
    BACKOFF_FACTOR,
    BACKOFF_JITTER,
    BACKOFF_S_MAX,
    BACKOFF_S_MIN,
    BULK_DEADLINE_S_MIN,
    BULK_RATE_MIN,
    STRIPES_DEFAULT,
    STRIPES_MAX,
)
from atoll.wire.token import check_token
from atoll.wire.transport import TOKEN_KEY, Arguments, grpc

SYSTEM_ROOTS = "system"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a learner (or `atoll status`) reaches the syncer."""

    address: str
    """host:port of the syncer, or several with commas between: places where it may be, or may be moved to. @FILE: what
    that file says, which is read again whenever the syncer does not answer (`split_addresses`)."""
    token: str = field(default="", repr=False)
    """The run token, sent with every call."""
    tls_ca: str = ""
    """Path of a PEM file with the certificates to trust, or "system" for those of the machine. Empty: no TLS."""
    stripes: int = STRIPES_DEFAULT
    """Connections over which one large payload is spread."""
    tls_name: str = ""
    """The name that the syncer's certificate must hold; empty: the host of `address`. For a syncer that is reached
    under another name than its certificate knows, such as 127.0.0.1 on its own machine."""
    clear_host: str = ""
    """The one host besides loopback that may get the token without TLS: the launcher's end of a link between network
    namespaces of one machine (`atoll chaos storm --namespaces`). Only an address of the test network is taken."""

    def __post_init__(self) -> None:
        hosts = [split_address(place)[0] for place in split_addresses(self.address)]
        check_token(self.token)
        if not 1 <= self.stripes <= STRIPES_MAX:
            raise ConfigError(f"stripes must be from 1 to {STRIPES_MAX}; not {self.stripes}")
        if self.clear_host and not is_in_test_network(self.clear_host):
            raise ConfigError(
                f"{self.clear_host!r} cannot get the run token in clear: only addresses in {TEST_NETWORK} can, which "
                f"`atoll chaos storm --namespaces` gives to links inside one machine; unset ATOLL_CLEAR_HOST"
            )
        if self.token and not self.tls_ca and not all(is_loopback(h) or h == self.clear_host for h in hosts):
            raise ConfigError(
                f"the run token would be sent in clear to {self.address}; set ATOLL_TLS_CA (or --tls-ca) to the "
                f"syncer's certificate, or to the one that signed it, or reach it through a tunnel on 127.0.0.1"
            )
        if self.tls_ca and self.tls_ca != SYSTEM_ROOTS:
            _check_roots(self.tls_ca)

    def places(self) -> list[ClientOptions]:
        """The same for each address alone, in order."""
        return [replace(self, address=place) for place in split_addresses(self.address)]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TOKEN_KEY, self.token),) if self.token else ()


def _check_roots(path: str) -> None:
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot read certificates from {path}: {error}; set ATOLL_TLS_CA (or --tls-ca) to a PEM file"
        ) from None


def open_channel(options: ClientOptions, arguments: Arguments) -> Any:
    """A new connection (made on first use) that shares nothing with other channels."""
    if not options.tls_ca:
        return grpc.aio.insecure_channel(options.address, options=arguments)
    roots = None if options.tls_ca == SYSTEM_ROOTS else Path(options.tls_ca).read_bytes()
    if options.tls_name:
        arguments = [*arguments, ("grpc.ssl_target_name_override", options.tls_name)]
    return grpc.aio.secure_channel(options.address, grpc.ssl_channel_credentials(roots), options=arguments)


def refused_error(code: str, detail: str) -> RefusedError:
    return FencedError(code, detail) if code == Refusal.FENCED else RefusedError(code, detail)


def call_error(options: ClientOptions, error: Any) -> AtollError:
    """What a failed call means to us. Only a wrong token is final; everything else may be better next time."""
    if error.code() == grpc.StatusCode.UNAUTHENTICATED:
        return RefusedError(Refusal.TOKEN, error.details() or "the syncer wants another run token")
    return UnreachableError(
        f"no answer from the syncer at {options.address}: {error.code().name.lower()}: {error.details()}; check "
        f"that it runs there and that the address is right"
    )


def deadline_s(size: int, wait_s: float = 0.0, rate: int = BULK_RATE_MIN) -> float:
    """Never infinite: a transfer that is slower than the minimum rate on average is given up. `wait_s` is how long the
    service may hold it up."""
    return BULK_DEADLINE_S_MIN + wait_s + size / rate


class Backoff:
    """Waits that double up to a bound, with jitter so that many learners do not come back at once."""

    def __init__(self) -> None:
        self._wait_s = BACKOFF_S_MIN

    def reset(self) -> None:
        self._wait_s = BACKOFF_S_MIN

    def next_s(self) -> float:
        wait_s = self._wait_s * random.uniform(1.0 - BACKOFF_JITTER, 1.0)
        self._wait_s = min(self._wait_s * BACKOFF_FACTOR, BACKOFF_S_MAX)
        return wait_s
