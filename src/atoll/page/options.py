"""What a live page is told: where it listens, who may look, and who may act."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

from atoll.errors import ConfigError
from atoll.wire import ClientOptions, split_address

NEEDED = ("starlette", "uvicorn")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
TOKEN_BYTES = 16
TOKEN_CHARS_MIN = 16
"""A shorter one could be guessed over a network."""


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Port 0 takes any that is free."""

    listen: str = "127.0.0.1:0"
    token: str = field(default="", repr=False)
    """Whoever opens the page must show it, once: needed beyond this machine, and to control a run."""
    control: bool = False
    """Whether the page lets its viewer drain, add and kill learners, take a snapshot, and stop the run."""
    tls_certificate: str = ""
    tls_key: str = ""
    syncer: ClientOptions | None = None
    """How the syncer is reached, where that is not what the run folder says."""

    @property
    def host(self) -> str:
        return split_address(self.listen)[0]

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK


def can_serve() -> bool:
    """Whether what the page needs is installed."""
    return all(find_spec(name) is not None for name in NEEDED)


def checked(options: PageOptions) -> PageOptions:
    """The same, complete. Raises ConfigError for a page that would be open to anybody."""
    if not can_serve():
        raise ConfigError("the live page needs Starlette and uvicorn; install them: pip install 'atoll[dash]'")
    if bool(options.tls_certificate) != bool(options.tls_key):
        raise ConfigError("TLS needs both files; give --tls-certificate and --tls-key together")
    if not options.is_local:
        if not options.token:
            raise ConfigError(
                f"a page on {options.host} can be seen from other machines; give it a token (--page-token-file), or "
                f"listen on 127.0.0.1 and reach it through a tunnel: ssh -L 8080:127.0.0.1:8080 HOST"
            )
        if not options.tls_certificate:
            raise ConfigError(
                f"a page on {options.host} would send its token in clear; give --tls-certificate and --tls-key (`atoll "
                f"keys` makes both), or listen on 127.0.0.1 and reach it through a tunnel"
            )
    if options.token and len(options.token) < TOKEN_CHARS_MIN:
        raise ConfigError(f"a page's token has at least {TOKEN_CHARS_MIN} characters; make a longer one")
    if options.control and not options.token:
        return replace(options, token=secrets.token_urlsafe(TOKEN_BYTES))
    return options
