"""The page's addresses: what a browser may ask for. Everything is read-only but `control`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from atoll.dash import static
from atoll.errors import AtollError
from atoll.page.control import ACTIONS, HERE_ONLY, Control
from atoll.page.guard import Guard
from atoll.page.options import PageOptions
from atoll.page.runs import Runs, log_tail
from atoll.page.watching import WatchedRun

LOOK_S = 0.25
"""How often a viewer's stream looks whether there is a new tick."""
BEAT_S = 15.0
"""A comment so often keeps proxies from closing a quiet stream, and finds viewers that are gone."""
VIEWERS_MAX = 64
BODY_BYTES_MAX = 4096
COMPARED_MAX = 8
"""Runs side by side: as many as there are colours."""
FILES = {
    "page.js": "text/javascript",
    "pieces.js": "text/javascript",
    "uPlot.iife.min.js": "text/javascript",
    "style.css": "text/css",
    "page.css": "text/css",
    "uPlot.min.css": "text/css",
}
REPORT_POLICY = "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The report is a page of its own: it gets no access to this one."""

Handler = Callable[[Request, WatchedRun], Response]


class Pages:
    """What the addresses do, over one set of runs."""

    def __init__(self, runs: Runs, options: PageOptions) -> None:
        self._runs = runs
        self._options = options
        self._viewers = 0
        self._control = Control(options.syncer) if options.control else None

    def application(self) -> Any:
        routes = [
            Route("/", self._page),
            Route("/static/{name}", self._static),
            Route("/api/runs", self._list),
            Route("/api/compare", self._compare),
            Route("/api/run/{run}/whole", self._of_run(lambda request, run: _json_text(run.whole()))),
            Route("/api/run/{run}/lanes", self._of_run(self._lanes)),
            Route("/api/run/{run}/stream", self._stream),
            Route("/api/run/{run}/log/{learner:path}", self._of_run(self._log)),
            Route("/api/run/{run}/report", self._of_run(self._report)),
            Route("/api/run/{run}/control", self._act, methods=["POST"]),
        ]
        app = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=1000)])
        return Guard(app, self._options)

    # ------------------------------------------------------------ files

    def _page(self, request: Request) -> Response:
        return Response(static("page.html"), media_type="text/html")

    def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FILES:
            return PlainTextResponse("no such file", 404)
        return Response(files("atoll.dash").joinpath("static", name).read_bytes(), media_type=FILES[name])

    # ------------------------------------------------------------ runs

    def _list(self, request: Request) -> Response:
        known = self._runs.names()
        here = any(self._runs.folder(name) is not None for name in known[:1])
        actions = [name for name in ACTIONS if here or name not in HERE_ONLY] if self._control is not None else []
        return JSONResponse({"runs": self._runs.names(), "control": actions})

    def _compare(self, request: Request) -> Response:
        names = request.query_params.getlist("run")[:COMPARED_MAX]
        runs = [run for name in names if (run := self._runs.get(name)) is not None]
        return JSONResponse([run.summary() for run in runs])

    def _of_run(self, answer: Handler) -> Callable[[Request], Response]:
        def handle(request: Request) -> Response:
            run = self._runs.get(request.path_params["run"])
            return answer(request, run) if run is not None else PlainTextResponse("no such run", 404)

        return handle

    def _lanes(self, request: Request, run: WatchedRun) -> Response:
        return _json_text(run.lanes(request.query_params.getlist("learner")))

    def _log(self, request: Request, run: WatchedRun) -> Response:
        folder, learner = self._runs.folder(run.name), request.path_params["learner"]
        text = log_tail(folder, learner) if folder is not None else None
        if text is None:
            return PlainTextResponse("this run folder holds no such log; it is on the machine of that learner", 404)
        return Response(text, media_type="text/plain; charset=utf-8")

    def _report(self, request: Request, run: WatchedRun) -> Response:
        folder = self._runs.folder(run.name)
        path = folder.path / "report.html" if folder is not None else None
        if path is None or not path.is_file() or path.is_symlink():
            return PlainTextResponse("there is no report yet: `atoll report RUN_FOLDER` makes it", 404)
        return Response(path.read_bytes(), media_type="text/html", headers={"Content-Security-Policy": REPORT_POLICY})

    # ------------------------------------------------------------ as it happens

    async def _stream(self, request: Request) -> Response:
        run = self._runs.get(request.path_params["run"])
        if run is None:
            return PlainTextResponse("no such run", 404)
        if self._viewers >= VIEWERS_MAX:
            return PlainTextResponse(f"{VIEWERS_MAX} viewers look already; close one of them", 503)
        return StreamingResponse(self._ticks(run), media_type="text/event-stream")

    async def _ticks(self, run: WatchedRun) -> AsyncIterator[str]:
        self._viewers += 1
        try:
            sent, quiet_s = -1, 0.0
            while True:
                await asyncio.to_thread(run.look)
                if run.tick_number != sent:
                    sent, quiet_s = run.tick_number, 0.0
                    yield f"event: tick\ndata: {run.tick}\n\n"
                elif quiet_s >= BEAT_S:
                    quiet_s = 0.0
                    yield ": still here\n\n"
                await asyncio.sleep(LOOK_S)
                quiet_s += LOOK_S
        finally:
            self._viewers -= 1

    # ------------------------------------------------------------ control

    async def _act(self, request: Request) -> Response:
        run = self._runs.get(request.path_params["run"])
        if self._control is None or run is None:
            return PlainTextResponse("this page only shows; start it with --control", 403)
        if request.headers.get("content-type") != "application/json":
            return PlainTextResponse("send JSON", 415)
        if int(request.headers.get("content-length") or BODY_BYTES_MAX + 1) > BODY_BYTES_MAX:
            return PlainTextResponse("too long", 413)
        try:
            asked = json.loads(await request.body())
            action, learner = str(asked["action"]), str(asked.get("learner", ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return PlainTextResponse('send {"action": ..., "learner": ...}', 400)
        folder = self._runs.folder(run.name)
        try:
            said = await asyncio.to_thread(self._control.act, action, learner, folder, run)
        except AtollError as error:
            return JSONResponse({"error": str(error)}, 409)
        return JSONResponse({"said": said})


def _json_text(text: str) -> Response:
    return Response(text, media_type="application/json")
