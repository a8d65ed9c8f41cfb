"""Serves the page: for `atoll dash` in the foreground, for `--dash` on a thread beside the run."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.errors import LaunchError
from atoll.launch import View
from atoll.page.options import PageOptions, checked
from atoll.page.runs import Runs
from atoll.wire import join_address, split_address

BACKLOG = 128
START_S = 10.0
END_S = 3.0
"""Streams of viewers that are still open are cut after this."""


class RunningPage:
    """A page that is being served. `address` is what to open."""

    def __init__(self, target: str, options: PageOptions) -> None:
        self.options = checked(options)  # first: it says what is not installed

        import uvicorn

        from atoll.page.application import Pages

        self._runs = Runs(target, self.options)
        self._socket = _bound(self.options.listen)
        config = uvicorn.Config(
            Pages(self._runs, self.options).application(),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            ssl_certfile=self.options.tls_certificate or None,
            ssl_keyfile=self.options.tls_key or None,
            limit_concurrency=256,
            server_header=False,
        )
        self._server: Any = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        scheme = "https" if self.options.tls_certificate else "http"
        shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
        return f"{scheme}://{join_address(shown, port)}/"

    @property
    def address_with_token(self) -> str:
        """What the operator opens; whoever sees it can do what the page can."""
        return self.address + (f"?token={self.options.token}" if self.options.token else "")

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM."""
        quiet = logging.getLogger("uvicorn.error")
        quiet.addFilter(self._is_news)
        self._server.run(sockets=[self._socket])
        quiet.removeFilter(self._is_news)
        self._runs.close()

    def _is_news(self, record: logging.LogRecord) -> bool:
        """Requests that are cut off by the end of the page are no errors that anybody must read of."""
        return not self._server.should_exit

    def start(self) -> None:
        """Serve on a thread, until `stop`."""
        self._thread = threading.Thread(target=self.run, name="atoll-page", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(END_S)


def serve_page(target: str, options: PageOptions) -> RunningPage:
    """A page for a run folder, a folder of runs, or HOST:PORT; it listens, and serves after `run` or `start`."""
    return RunningPage(target, options)


def _bound(listen: str) -> socket.socket:
    host, port = split_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise LaunchError(f"the page cannot listen on {listen} ({error.strerror}); give another --listen") from error
    return bound


class PageView:
    """A View of the launcher (start, refresh, stop) that serves the page, with another view before it."""

    def __init__(
        self, folder: Path, options: PageOptions, *, say: Callable[[str], None], inner: View | None = None
    ) -> None:
        self._page = serve_page(str(folder), options)
        self._page.start()  # before the run's processes are: there is something to see while they start
        say(f"live page: {self._page.address_with_token}")
        self._inner = inner

    def start(self) -> None:
        if self._inner is not None:
            self._inner.start()

    def refresh(self) -> None:
        if self._inner is not None:
            self._inner.refresh()

    def stop(self) -> None:
        if self._inner is not None:
            self._inner.stop()
        self._page.stop()
