"""Who may ask the page for what: hosts, tokens, origins, and the headers that keep a browser from doing more.

Every request passes here first. A page on loopback is open to whoever uses this machine, unless it has a token. Its
Host must be one that it listens on: else any web page could read it by a name that leads to 127.0.0.1.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlencode

from atoll.page.options import LOOPBACK, PageOptions

COOKIE = "atoll_page"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Stands in front of the application."""

    def __init__(self, app: App, options: PageOptions) -> None:
        self._app = app
        self._options = options
        self._mark = hashlib.sha256(b"atoll page " + options.token.encode()).hexdigest()
        """What a browser keeps instead of the token."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        shown = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if not self._host_is_ours(headers.get("host", "")):
            await _answer(
                send, 421, "this page is not served under that name; use the address that it was started with"
            )
        elif shown and self._is_token(shown):
            await _answer(send, 303, "", [("Location", self._without_token(scope)), ("Set-Cookie", self._cookie())])
        elif self._options.token and not self._knows_token(headers):
            await _answer(send, 401, "this page needs its token: open the address with ?token=..., as it was printed")
        elif scope["method"] not in ("GET", "HEAD") and not self._same_origin(headers):
            await _answer(send, 403, "only the page itself may ask for this")
        else:
            await self._app(scope, receive, _with_headers(send))

    def _host_is_ours(self, host: str) -> bool:
        if not self._options.is_local:
            return bool(host)  # certificate and token say who this is
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return name.strip("[]") in LOOPBACK

    def _is_token(self, token: str) -> bool:
        return bool(self._options.token) and hmac.compare_digest(token.encode(), self._options.token.encode())

    def _knows_token(self, headers: dict[str, str]) -> bool:
        """A program says it (Authorization: Bearer); a browser has shown it before."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._is_token(token.strip())
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return morsel is not None and hmac.compare_digest(morsel.value.encode(), self._mark.encode())

    def _same_origin(self, headers: dict[str, str]) -> bool:
        """A browser says where a request that changes something comes from."""
        scheme = "https" if self._options.tls_certificate else "http"
        return headers.get("origin", "") == f"{scheme}://{headers.get('host', '')}"

    def _cookie(self) -> str:
        secure = "; Secure" if self._options.tls_certificate else ""
        return f"{COOKIE}={self._mark}; HttpOnly; SameSite=Strict; Path=/{secure}"

    def _without_token(self, scope: Scope) -> str:
        left = {
            name: values
            for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()
            if name != "token"
        }
        path = "/" + str(scope["path"]).lstrip("/")  # "//host" would lead elsewhere
        return path + (f"?{urlencode(left, doseq=True)}" if left else "")


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message.get("headers", ())}
            more = [(n.lower().encode(), v.encode()) for n, v in HEADERS.items() if n.lower().encode() not in given]
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return sending


async def _answer(send: Send, status: int, text: str, more: list[tuple[str, str]] | None = None) -> None:
    body = f"{text}\n".encode()
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body))), *HEADERS.items()]
    raw = [(name.lower().encode(), value.encode()) for name, value in [*headers, *(more or [])]]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
