"""The syncer's port: binding it safely, checking the token, and handing calls to sessions, transfers and fetches."""

from __future__ import annotations

import asyncio
import errno
import functools
import hmac
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from atoll.core import FetchHeader, FetchRequest, Refusal
from atoll.errors import ConfigError, LaunchError, PayloadError, RefusedError, RemoteProtocolError
from atoll.wire import parts
from atoll.wire.address import is_loopback, join_address, split_address
from atoll.wire.certificate import Certificate, read_certificate
from atoll.wire.channel import check_token
from atoll.wire.checks import cut, identifier
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.limits import FLUSH_S, JSON_CHARS_MAX, PART_BYTES, PART_S, RPCS_MAX
from atoll.wire.records import parse_bytes
from atoll.wire.seal import seal, unseal
from atoll.wire.service import ServerOptions, SyncerService
from atoll.wire.sessions import Sessions
from atoll.wire.transfers import Transfers
from atoll.wire.transport import EOF, TOKEN_KEY, grpc, keep_heap, server_arguments

log = logging.getLogger(__name__)

Handler = Callable[[Any, Any], Awaitable[Any]]
"""Of one call: its first message, or all of them, and the call itself."""


async def serve(service: SyncerService, options: ServerOptions) -> RunningServer:
    """Open the port and start answering. Raises ConfigError or LaunchError before anything is served."""
    host, port = split_address(options.listen)
    check_token(options.token)
    # gRPC looks at certificates only when a connection comes; here what is wrong is said now, with what to do.
    certificate = read_certificate(options.tls_certificate, options.tls_key) if options.tls_certificate else None
    warnings = certificate.check(time.time()) if certificate is not None else []
    credentials = _credentials(certificate, options.tls_key)
    if not is_loopback(host) and not (options.token and credentials):
        raise ConfigError(
            f"listening on {options.listen} would let the network reach this syncer; give --token, --tls-certificate "
            f"and --tls-key as well, or listen on 127.0.0.1"
        )
    keep_heap()
    server = RunningServer(service, options)
    server.certificate, server.warnings = certificate, warnings
    await server._start(host, port, credentials)
    return server


def _credentials(certificate: Certificate | None, key: str) -> Any:
    if certificate is None:
        return None
    return grpc.ssl_server_credentials([(Path(key).read_bytes(), Path(certificate.path).read_bytes())])


class RunningServer:
    """A syncer's open port. Made by `serve`."""

    def __init__(self, service: SyncerService, options: ServerOptions) -> None:
        self._service = service
        self._token = options.token.encode()
        self._sessions = Sessions(service, options)
        self._transfers = Transfers(service, options)
        self._server = grpc.aio.server(options=server_arguments(), maximum_concurrent_rpcs=RPCS_MAX)
        self.address = options.listen
        """host:port that learners can be given, with the real port."""
        self.certificate: Certificate | None = None
        self.warnings: list[str] = []
        """What somebody should know about the certificate."""
        self.bytes_down = 0
        """Payload bytes handed out by fetches."""

    @property
    def bytes_up(self) -> int:
        """Payload bytes taken in by pushes."""
        return self._transfers.bytes_up

    @property
    def sessions_count(self) -> int:
        return len(self._sessions)

    @property
    def transfers_count(self) -> int:
        return len(self._transfers)

    def close_session(self, session: int, reason: str) -> None:
        """End one session after what was sent to it has gone out. The service's `close_session` follows."""
        self._sessions.close(session, reason)

    def peer_of(self, session: int) -> str:
        """The address that a session comes from; empty if it is over."""
        return self._sessions.peer(session)

    async def stop(self, grace_s: float = FLUSH_S) -> None:
        """Refuse new calls, let sessions flush and transfers end within `grace_s`, then cut what is left."""
        self._sessions.close_all("the syncer stops")
        await self._server.stop(grace_s)
        self._transfers.fail_all("the syncer stops; it may come back")

    # ------------------------------------------------------------ binding

    async def _start(self, host: str, port: int, credentials: Any) -> None:
        # (De)serialisers are left out: handlers get and give bytes, so that bad ones get a proper answer.
        control = {
            "Session": grpc.stream_stream_rpc_method_handler(_quiet(self._session)),
            "Status": grpc.unary_unary_rpc_method_handler(self._status),
            "AskToLeave": grpc.unary_unary_rpc_method_handler(self._ask_to_leave),
        }
        bulk = {
            "Push": grpc.stream_unary_rpc_method_handler(_quiet(self._push)),
            "Fetch": grpc.unary_stream_rpc_method_handler(_quiet(self._fetch)),
        }
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler("atoll.v1.Control", control),
                grpc.method_handlers_generic_handler("atoll.v1.Bulk", bulk),
            )
        )
        address = join_address(host, port)
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            bound = 0  # Newer versions of gRPC raise, older ones return 0.
        if not bound:
            raise LaunchError(_bind_problem(host, port))
        self.address = join_address(host, bound)
        await self._server.start()

    # ------------------------------------------------------------ calls

    async def _authorise(self, context: Any) -> None:
        """The token comes first: nothing is read, parsed or allocated for a caller that does not have it."""
        if self._token:
            given = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
            if not hmac.compare_digest(str(given).encode(), self._token):
                detail = "wrong or missing run token; use the one that the syncer was started with (ATOLL_TOKEN)"
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, detail)

    async def _session(self, _requests: Any, context: Any) -> None:
        await self._authorise(context)
        await self._sessions.serve(context)

    async def _status(self, _request: bytes, context: Any) -> bytes:
        await self._authorise(context)
        document = json.dumps(self._service.status())
        if len(document) > JSON_CHARS_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the status has {len(document)} characters")
        return bytes(pb.StatusReply(json=document).SerializeToString())

    async def _ask_to_leave(self, request: bytes, context: Any) -> bytes:
        await self._authorise(context)
        try:
            learner = parse_bytes(pb.AskToLeaveRequest, request).learner
            reply = pb.AskToLeaveReply(state=self._service.ask_to_leave(identifier("AskToLeave.learner", learner)))
        except RemoteProtocolError as error:
            reply = pb.AskToLeaveReply(refused=pb.Refused(code=Refusal.BAD_REQUEST, detail=str(error)))
        except RefusedError as error:
            reply = pb.AskToLeaveReply(refused=pb.Refused(code=error.code, detail=cut(error.detail)))
        return bytes(reply.SerializeToString())

    async def _push(self, _requests: Any, context: Any) -> bytes:
        await self._authorise(context)

        async def read() -> bytes | None:
            message = await context.read()
            return None if message is EOF else message

        return seal(parts.encode_push_reply(await self._transfers.receive(read)))

    async def _fetch(self, request_bytes: bytes, context: Any) -> None:
        await self._authorise(context)
        try:
            request = parts.parse_fetch_request(unseal(request_bytes))
            header, content = await self._service.fetch_open(request)
            content = content.cast("B")
            start, stop = _range(request, header, content)
        except PayloadError as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))  # the learner asks again
            return
        except RemoteProtocolError as error:
            await context.write(parts.encode_refused_part(Refusal.BAD_REQUEST, str(error)))
            return
        except RefusedError as error:
            await context.write(parts.encode_refused_part(error.code, error.detail))
            return
        opening = parts.encode_fetch_header(header)
        position = start
        while position < stop or opening:
            # Parts end at multiples of PART_BYTES wherever the range starts: see FetchPart in atoll.proto.
            end = min(stop, (position // PART_BYTES + 1) * PART_BYTES)
            part = parts.encode_part(position, content[position:end], opening)
            await self._write_part(part, request, context)
            self.bytes_down += end - position
            position, opening = end, b""

    async def _write_part(self, part: bytes, request: FetchRequest, context: Any) -> None:
        """Wait for a thin link as long as the caller does: its deadline, or the end of its connection, cancels this
        call. Giving up first would help nobody. No status can follow a part that is stuck: gRPC would fail to send one,
        with a traceback, and the learner would hear nothing."""
        told = "learner %s has taken nothing of fragment %d for %g s; its link is very thin, or it stands still"
        slow = asyncio.get_running_loop().call_later(
            PART_S, log.warning, told, request.learner, request.fragment, PART_S
        )
        try:
            await context.write(part)
        finally:
            slow.cancel()


def _quiet(handler: Handler) -> Handler:
    """A call whose connection breaks, or whose caller has given up, is over. gRPC mostly cancels its handler; but one
    that was just sending something fails, and gRPC would print where."""

    @functools.wraps(handler)
    async def handle(first: Any, context: Any) -> Any:
        peer = context.peer().partition(":")[2]  # once the connection is gone it cannot be asked for
        try:
            return await handler(first, context)
        except grpc.aio.InternalError:
            log.warning("a %s from %s broke in the middle", handler.__name__.strip("_"), peer)
            raise asyncio.CancelledError from None

    return handle


def _range(request: FetchRequest, header: FetchHeader, content: memoryview) -> tuple[int, int]:
    if header.size != content.nbytes:
        raise RefusedError(Refusal.SIZE, f"the syncer holds {content.nbytes} bytes but announces {header.size}: a bug")
    if request.offset > header.size:
        raise RefusedError(Refusal.SIZE, f"offset {request.offset} is past the end at {header.size}")
    length = request.length or header.size - request.offset
    return request.offset, min(header.size, request.offset + length)


def _bind_problem(host: str, port: int) -> str:
    """gRPC does not say why a port could not be had, so ask the system directly."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                f"port {port} on {host} is in use by another process; choose another with --listen {host}:PORT (0: any)"
            )
        return f"cannot listen on {host}:{port}: {error}; choose another address with --listen"
    return f"cannot listen on {host}:{port}; choose another address with --listen"
