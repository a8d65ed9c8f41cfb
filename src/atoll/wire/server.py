"""The syncer's port: binding it safely, checking the token, and handing calls to sessions, transfers and fetches."""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from atoll.core import (
    FRAGMENTS_MAX,
    FetchHeader,
    FetchRequest,
    Identity,
    Refusal,
    Role,
    check_coordinator,
    check_learner,
    check_leave,
    check_operator,
)
from atoll.errors import ConfigError, LaunchError, PayloadError, RefusedError, RemoteProtocolError
from atoll.wire import parts
from atoll.wire.address import is_loopback, join_address, split_address
from atoll.wire.budget import Budget, ContentBudget
from atoll.wire.certificate import Certificate, read_certificate, serving_with
from atoll.wire.checks import cut, fragment, identifier, raise_refusal
from atoll.wire.direct import offer
from atoll.wire.direct_server import Decisions, DirectPort, Given, listening
from atoll.wire.door import Door
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.limits import (
    CALLS_MAX,
    DIRECT_CONNECTIONS_MAX,
    FETCHES_MAX,
    FETCHES_PER_LEARNER_MAX,
    FLUSH_S,
    JSON_CHARS_MAX,
    LINK_PROBE_BYTES,
    PART_BYTES,
    PART_S,
    REQUEST_S,
    TRANSFER_LEARNER_SHARE,
    TRANSFER_MEMORY_SHARE,
)
from atoll.wire.records import many, parse_bytes
from atoll.wire.resources import memory_bytes, room_for_connections
from atoll.wire.seal import seal, unseal
from atoll.wire.service import ServerOptions, SyncerService
from atoll.wire.sessions import Sessions
from atoll.wire.token import check_token
from atoll.wire.transfers import Transfers
from atoll.wire.transport import (
    ATTACH_METHOD,
    EOF,
    FETCH_METHOD,
    LEAVE_METHOD,
    PUSH_METHOD,
    REPLY_BYTES_KEY,
    SESSION_METHOD,
    SHARDS_METHOD,
    SNAPSHOT_METHOD,
    STATUS_METHOD,
    TOKEN_KEY,
    grpc,
    keep_heap,
    server_arguments,
)

log = logging.getLogger(__name__)

LINK_OWNER = Identity("link", Role.OPERATOR)
"""Whoever has shown the token of the link."""
LINK_ONLY = (
    "this process is led by whoever has its own token for that, which learners do not have; start the syncer with the "
    "same ATOLL_LINK_TOKEN"
)
AttachHandler = Callable[[Any, str], Awaitable[None]]
"""Told of a stream, and why whoever opened it may not lead."""
"""Of a coordinator's stream, as long as it lasts."""
ChangeHandler = Callable[[str, str, tuple[int, ...]], Awaitable[tuple[str, int]]]
"""Of a change of shards: action, shard and fragments to what has begun, and its number. May raise RefusedError."""
Handler = Callable[[Any, Identity | None], Awaitable[None]]
"""Of one call, from its headers on, and whose token it has: it reads requests and writes replies."""


async def serve(
    service: SyncerService,
    options: ServerOptions,
    *,
    attach: AttachHandler | None = None,
    change_shards: ChangeHandler | None = None,
) -> RunningServer:
    """Open the port and start answering. `attach` serves a shard's coordinator or a syncer's relays. Raises
    ConfigError or LaunchError before anything is served."""
    host, port = split_address(options.listen)
    certificate, warnings = check_options(options)
    credentials = _credentials(certificate, options.tls_key)
    keep_heap()
    server = RunningServer(service, options)
    server.certificate, server.warnings = certificate, warnings
    server._attach, server._change = attach, change_shards
    await server._start(host, port, credentials)
    return server


def check_options(options: ServerOptions) -> tuple[Certificate | None, list[str]]:
    """The certificate, and what somebody should know of it. Raises ConfigError if `serve` would refuse to serve so:
    whoever ends another syncer in order to serve looks first."""
    host, _ = split_address(options.listen)
    check_token(options.token)
    check_token(options.link_token)
    # gRPC looks at certificates only when a connection comes; here what is wrong is said now, with what to do.
    certificate = read_certificate(options.tls_certificate, options.tls_key) if options.tls_certificate else None
    warnings = certificate.check(time.time()) if certificate is not None else []
    if not is_loopback(host) and not ((options.token or options.keys is not None) and certificate is not None):
        raise ConfigError(
            f"listening on {options.listen} would let the network reach this syncer; make keys with `atoll keys init` "
            f"and give --keys (or --token-file, --tls-certificate and --tls-key), or listen on 127.0.0.1"
        )
    return certificate, warnings


def check_ports(listen: str, bulk_port: int | None) -> None:
    """Raise LaunchError if this address, or the port for payloads beside it, cannot be had now."""
    host, port = split_address(listen)
    if problem := _bind_error(host, port):
        raise LaunchError(problem)
    if bulk_port and bulk_port == port:
        raise LaunchError(f"port {port} is for gRPC already; give --bulk-port another one, 0 for any, or off")
    if bulk_port:
        listening(host, bulk_port).close()


def _credentials(certificate: Certificate | None, key: str) -> Any:
    if certificate is None:
        return None
    return grpc.ssl_server_credentials([(Path(key).read_bytes(), Path(certificate.path).read_bytes())])


class RunningServer:
    """A syncer's open port. Made by `serve`."""

    def __init__(self, service: SyncerService, options: ServerOptions) -> None:
        self._service = service
        self._options = options
        self._token = options.token.encode()
        self._link_token = options.link_token.encode()
        self._keys = options.keys
        self._fetching: set[tuple[str, asyncio.Task[Any]]] = set()
        """Fetches under way, with the names of their keys."""
        self._sessions = Sessions(service, options)
        self._transfers = Transfers(service, options)
        self._fetches = Budget("fetches", FETCHES_PER_LEARNER_MAX, FETCHES_MAX)
        bytes_max = options.transfer_bytes_max or int(memory_bytes() * TRANSFER_MEMORY_SHARE)
        self._contents = ContentBudget(int(bytes_max * TRANSFER_LEARNER_SHARE), bytes_max)
        self._door = Door()
        self._watch: asyncio.Task[None] | None = None
        self._attach: AttachHandler | None = None
        self._change: ChangeHandler | None = None
        self._calls = 0
        room = room_for_connections()
        self._direct_max = min(DIRECT_CONNECTIONS_MAX, room // 2)
        self._server = grpc.aio.server(options=server_arguments(room - self._direct_max))
        self._direct: DirectPort | None = None
        self._offer: tuple[tuple[str, str], ...] = ()
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

    def revoke(self, name: str, detail: str) -> None:
        """Give up every transfer of this key's owner. Its session is the service's to end."""
        self._transfers.fail_learner(name, Refusal.KEY_REVOKED, detail)
        if self._direct is not None:
            self._direct.cut_owner(name)
        for running in [one for one in self._fetching if one[0] == name]:
            self._fetching.discard(running)
            running[1].cancel()

    async def stop(self, grace_s: float = FLUSH_S) -> None:
        """Refuse new calls, let sessions flush and transfers end within `grace_s`, then cut what is left."""
        if self._watch is not None:
            self._watch.cancel()
        self._sessions.close_all("the syncer stops")
        await self._server.stop(grace_s)
        self._transfers.fail_all("the syncer stops; it may come back")
        if self._direct is not None:
            self._direct.close()

    async def cut(self) -> None:
        """Break every call at once, as the end of the process would."""
        if self._watch is not None:
            self._watch.cancel()
        if self._direct is not None:
            self._direct.close()
        await self._server.stop(None)

    # ------------------------------------------------------------ binding

    async def _start(self, host: str, port: int, credentials: Any) -> None:
        self._server.add_generic_rpc_handlers(
            (
                _Streams(
                    {
                        SESSION_METHOD: self._stream(self._sessions.serve, "session"),
                        STATUS_METHOD: self._stream(self._status, "status"),
                        LEAVE_METHOD: self._stream(self._ask_to_leave, "request to leave"),
                        SNAPSHOT_METHOD: self._stream(self._take_snapshot, "request for a snapshot"),
                        SHARDS_METHOD: self._stream(self._change_shards, "change of shards"),
                        PUSH_METHOD: self._stream(self._push, "push"),
                        FETCH_METHOD: self._stream(self._fetch, "fetch"),
                        ATTACH_METHOD: self._stream(self._attached, "coordinator's call"),
                    },
                    self._stream(_unknown, "call"),
                ),
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
        self._open_direct(host, bound)
        await self._server.start()
        self._watch = asyncio.create_task(self._door.watch(bound))

    def _open_direct(self, host: str, control_port: int) -> None:
        """The port for payloads past gRPC, which every push and fetch tells of."""
        port = self._options.bulk_port
        if port is None:
            return
        tls = serving_with(self.certificate.path, self._options.tls_key) if self.certificate is not None else None
        decisions = Decisions(self._identify, self._transfers, self._open_fetch)
        self._direct = DirectPort(decisions, tls, self._options.transfer_idle_s, self._direct_max)
        self._offer = offer(self._direct.open(host, port), control_port)

    # ------------------------------------------------------------ calls

    def _stream(self, handler: Handler, name: str) -> Any:
        """Every method is a stream to gRPC, also those with one request: it would read that first, and whoever has no
        token could make it wait, or hold what came. (De)serialisers are left out: handlers get and give bytes, so that
        bad ones get a proper answer."""

        async def serve(_requests: Any, context: Any) -> None:
            peer = context.peer().partition(":")[2]  # once the connection is gone it cannot be asked for
            identity = await self._authorise(context)
            if self._calls >= CALLS_MAX:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the syncer has too many calls; ask again soon")
            self._calls += 1
            try:
                await handler(context, identity)
            except grpc.aio.InternalError:
                # A call whose connection breaks, or whose caller has given up, is over. gRPC mostly cancels its
                # handler; but one that was just sending something fails, and gRPC would print where.
                log.warning("a %s from %s broke in the middle", name, peer)
                raise asyncio.CancelledError from None
            finally:
                self._calls -= 1

        return grpc.stream_stream_rpc_method_handler(serve)

    async def _authorise(self, context: Any) -> Identity | None:
        """The token comes first: nothing is read, parsed or allocated for a caller that does not have it. Returns whose
        it is, where each has its own."""
        peer = context.peer()
        found = self._identify(str(dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")))
        if not isinstance(found, str):
            self._door.welcome(peer)
            return found
        self._door.refuse(peer)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, found)
        raise AssertionError("abort has raised")

    def _identify(self, token: str) -> Identity | str | None:
        """Whose token this is (None: everybody's), or why it is nobody's."""
        if self._link_token and hmac.compare_digest(token.encode(), self._link_token):
            return LINK_OWNER
        if self._keys is not None:
            return self._keys.find(token)
        if self._token and not hmac.compare_digest(token.encode(), self._token):
            return "wrong or missing run token; use the one that the syncer was started with (ATOLL_TOKEN)"
        return None

    async def _status(self, context: Any, identity: Identity | None) -> None:
        await _request(context)
        caller = {"caller": {"name": identity.name, "role": str(identity.role)}} if identity is not None else {}
        document = json.dumps({**self._service.status(), **caller})
        if len(document) > JSON_CHARS_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the status has {len(document)} characters")
        await context.write(pb.StatusReply(json=document.ljust(_wanted_bytes(context))).SerializeToString())

    async def _ask_to_leave(self, context: Any, identity: Identity | None) -> None:
        request = await _request(context)
        try:
            learner = parse_bytes(pb.AskToLeaveRequest, request).learner
            raise_refusal(check_leave(identity, learner))
            reply = pb.AskToLeaveReply(state=self._service.ask_to_leave(identifier("AskToLeave.learner", learner)))
        except RemoteProtocolError as error:
            reply = pb.AskToLeaveReply(refused=pb.Refused(code=Refusal.BAD_REQUEST, detail=str(error)))
        except RefusedError as error:
            reply = pb.AskToLeaveReply(refused=pb.Refused(code=error.code, detail=cut(error.detail)))
        await context.write(reply.SerializeToString())

    async def _take_snapshot(self, context: Any, identity: Identity | None) -> None:
        await _request(context)
        try:
            raise_refusal(check_operator(identity, "take a snapshot"))
            reply = pb.TakeSnapshotReply(said=cut(await self._service.take_snapshot()))
        except RefusedError as error:
            reply = pb.TakeSnapshotReply(refused=pb.Refused(code=error.code, detail=cut(error.detail)))
        await context.write(reply.SerializeToString())

    async def _change_shards(self, context: Any, identity: Identity | None) -> None:
        data = await _request(context)
        try:
            raise_refusal(check_operator(identity, "move fragments between shards"))
            if self._change is None:
                raise RefusedError(Refusal.NOT_ALLOWED, "no shards are led from here; ask the syncer of a run with any")
            request = parse_bytes(pb.ChangeShardsRequest, data)
            fragments = many(fragment, FRAGMENTS_MAX)("ChangeShards.fragments", request.fragments)
            where = identifier("ChangeShards.shard", request.shard)
            said, number = await self._change(identifier("ChangeShards.action", request.action), where, fragments)
            reply = pb.ChangeShardsReply(said=cut(said), number=number)
        except RemoteProtocolError as error:
            reply = pb.ChangeShardsReply(refused=pb.Refused(code=Refusal.BAD_REQUEST, detail=str(error)))
        except RefusedError as error:
            reply = pb.ChangeShardsReply(refused=pb.Refused(code=error.code, detail=cut(error.detail)))
        await context.write(reply.SerializeToString())

    async def _attached(self, context: Any, identity: Identity | None) -> None:
        if self._attach is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this is a syncer, not a shard; give a shard's address")
            return
        if (refused := check_coordinator(identity)) is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, refused.detail)
        await self._attach(context, LINK_ONLY if self._link_token and identity is None else "")

    async def _push(self, context: Any, identity: Identity | None) -> None:
        async def read() -> bytes | None:
            message = await context.read()
            return None if message is EOF else message

        context.set_trailing_metadata(self._offer)
        await context.write(seal(parts.encode_push_reply(await self._transfers.receive(read, identity))))

    async def _fetch(self, context: Any, identity: Identity | None) -> None:
        context.set_trailing_metadata(self._offer)
        try:
            request = parts.parse_fetch_request(unseal(await _request(context)))
            raise_refusal(check_learner(identity, request.learner))
            with self._fetches.held(request.learner):
                await self._while_valid(identity, context, self._give(request, context))
        except PayloadError as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))  # the learner asks again
        except RemoteProtocolError as error:
            await context.write(parts.encode_refused_part(Refusal.BAD_REQUEST, str(error)))
        except RefusedError as error:
            await context.write(parts.encode_refused_part(error.code, error.detail))

    async def _while_valid(self, identity: Identity | None, context: Any, work: Coroutine[Any, Any, None]) -> None:
        """Do this for a caller until its key is revoked."""
        if identity is None:
            await work
            return
        task = asyncio.create_task(work)
        running = (identity.name, task)
        self._fetching.add(running)
        try:
            await task
        except asyncio.CancelledError:
            if running in self._fetching:  # it was the caller who went away
                raise
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this key was revoked; ask for a new one")
        finally:
            self._fetching.discard(running)

    async def _give(self, request: FetchRequest, context: Any) -> None:
        header, content = await self._service.fetch_open(request)
        with self._contents.held(request.learner, content):
            await self._give_content(request, context, header, content.cast("B"))

    async def _give_content(
        self, request: FetchRequest, context: Any, header: FetchHeader, content: memoryview
    ) -> None:
        start, stop = _range(request, header, content)
        opening = parts.encode_fetch_header(header)
        position = start
        while position < stop or opening:
            # Parts end at multiples of PART_BYTES wherever the range starts: see FetchPart in atoll.proto.
            end = min(stop, (position // PART_BYTES + 1) * PART_BYTES)
            part = parts.encode_part(position, content[position:end], opening)
            await self._write_part(part, request, context)
            self.bytes_down += end - position
            position, opening = end, b""

    async def _open_fetch(self, request: FetchRequest, identity: Identity | None) -> Given:
        """For whoever fetches past gRPC, under the same bounds."""
        raise_refusal(check_learner(identity, request.learner))
        with ExitStack() as taken:
            taken.enter_context(self._fetches.held(request.learner))
            header, content = await self._service.fetch_open(request)
            taken.enter_context(self._contents.held(request.learner, content))
            start, stop = _range(request, header, content := content.cast("B"))
            give_back = taken.pop_all().close

        def close(bytes_count: int) -> None:
            self.bytes_down += bytes_count
            give_back()

        return Given(header, content, start, stop, close)

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


class _Streams(grpc.GenericRpcHandler):  # type: ignore[misc]  # gRPC has no types
    """Finds the handler of a method. There is one for those that do not exist, too: asking for them needs the token."""

    def __init__(self, handlers: dict[str, Any], unknown: Any) -> None:
        self._handlers, self._unknown = handlers, unknown

    def service(self, details: Any) -> Any:
        return self._handlers.get(details.method, self._unknown)


async def _unknown(context: Any, _identity: Identity | None) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this syncer knows no such method; update it there")


def _wanted_bytes(context: Any) -> int:
    """How long a status shall be, for somebody who measures the link (`probe`)."""
    wanted = str(dict(context.invocation_metadata() or ()).get(REPLY_BYTES_KEY, ""))
    return min(int(wanted), LINK_PROBE_BYTES) if wanted.isascii() and wanted.isdigit() and len(wanted) < 10 else 0


async def _request(context: Any) -> bytes:
    """The one request of a call."""
    try:
        async with asyncio.timeout(REQUEST_S):
            message = await context.read()
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not come; check the link")
    if message is EOF:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without a request; send one")
    return bytes(message)


def _range(request: FetchRequest, header: FetchHeader, content: memoryview) -> tuple[int, int]:
    if header.size != content.nbytes:
        raise RefusedError(Refusal.SIZE, f"the syncer holds {content.nbytes} bytes but announces {header.size}: a bug")
    if request.offset > header.size:
        raise RefusedError(Refusal.SIZE, f"offset {request.offset} is past the end at {header.size}")
    length = request.length or header.size - request.offset
    return request.offset, min(header.size, request.offset + length)


def _bind_problem(host: str, port: int) -> str:
    """gRPC does not say why a port could not be had, so ask the system directly."""
    return _bind_error(host, port) or f"cannot listen on {host}:{port}; choose another address with --listen"


def _bind_error(host: str, port: int) -> str:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does: connections of a predecessor that are still closing keep nobody out.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                f"port {port} on {host} is in use by another process; choose another with --listen {host}:PORT (0: any)"
            )
        return f"cannot listen on {host}:{port}: {error}; choose another address with --listen"
    return ""
