"""Ports for servers that come back at the same address."""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _COUNT = 20_000, 12_000
"""Below the range (32768 and up) that the system chooses from, so that no other test is given one in between."""
_next = itertools.count(os.getpid() * 211)


def quiet_port() -> int:
    """A port on loopback that is free and that nobody gets by accident, also while its server is down."""
    for number in itertools.islice(_next, 200):
        port = _FIRST + number % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port")
