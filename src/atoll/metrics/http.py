"""The HTTP server of a metrics port: few connections, and none that says nothing for long.

The port has no token, and it is in the process that trains or merges. The library's own server takes any number of
connections, a thread and a descriptor each, for as long as they like: a thousand silent ones would leave the store of a
syncer without descriptors.
"""

from __future__ import annotations

import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

CONNECTIONS_MAX = 16
"""At a time. A Prometheus has one or two; what is beyond is closed at once, and asks again."""
SILENT_S = 5.0
"""A scrape is one request of some hundred bytes."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(*arguments, **named)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Somebody went away, or said nothing: that is no news."""


class QuietHandler(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Who asks is nobody's business."""


def serve_metrics(host: str, port: int, registry: Any) -> MetricsServer:
    """Answer on a thread of its own until `shutdown`. Raises OSError if the port cannot be had."""
    from prometheus_client import make_wsgi_app

    family = {"server_class": _V6} if ":" in host else {"server_class": MetricsServer}
    server: Any = make_server(host, port, make_wsgi_app(registry), handler_class=QuietHandler, **family)
    threading.Thread(target=server.serve_forever, name="atoll-metrics", daemon=True).start()
    assert isinstance(server, MetricsServer)
    return server


class _V6(MetricsServer):
    from socket import AF_INET6 as address_family
