"""What comes over the network: every message, and every stream of them, into the code that reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from fuzz_engine import SIZES, Make, Target, mutated, mutated_json, varint
from fuzz_streams import (
    check_push,
    check_session,
    fetch_stream,
    follow_session,
    on_loop,
    push_stream,
    receive_fetch,
    receive_push,
    serve_session,
    streams,
)
from google.protobuf.descriptor import FieldDescriptor

from atoll.core import messages as m
from atoll.core.config import SyncConfig
from atoll.errors import PayloadError, RefusedError, RemoteProtocolError, UnreachableError
from atoll.wire import convert, parts
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.seal import seal, unseal

CHECKSUM = 2**64 - 1
HEADER = m.PushHeader(m.PushKind.CONTRIBUTION, "a", 2, 3, 9, 1, 12, 41, 24, 98_304, "int4", 5, CHECKSUM)
INNER = m.PushHeader(m.PushKind.INNER, "a", 2, 3, 0, 0, 1, -1, 3, 2**24 + 9, "inner", 2**23, 7)
TENSORS = (m.TensorSpec("embed.weight", (256, 64), "bfloat16", "mean"), m.TensorSpec("scale", (), "float32"))
REFUSED = m.PushReply(False, m.Refusal.STALE_BASE, "5 versions old; adopt the published version first")
LEARNER: tuple[m.LearnerMessage, ...] = (
    m.Hello("island-7", "4f00c1", 2, TENSORS),
    m.Hello("u", "i", 2, TENSORS, 3, "run", (-1, 0, 5), (m.Outstanding(1, 9),), 4, (1, 2, CHECKSUM), True, CHECKSUM),
    m.Ready(96, (-1, 5)),
    m.Progress(120, 24, 98_304, 10**9, 3.25, (5, 6), (m.DiscardCount(1, m.Discard.LOST, 77),), (3, 4)),
    m.Nothing(9, 4),
    m.Leave("finished"),
    m.InlinePush(HEADER, b"\x00\x01\x02\xfe\xff"),
    m.DataReport("books", 7, 1000, 4, (1, 2), (3,), (m.Lease(4, 17),)),
)
SYNCER: tuple[m.SyncerMessage, ...] = (
    m.Welcome("run", 1, 2, SyncConfig(fragments=4), "ab" * 32, False, 2),
    m.Welcome("run", 1, 2, SyncConfig(fragments=4), "ab" * 32, False, 2, 7),
    m.Refused(m.Refusal.LAYOUT, "it lacks tensor 'w'; start every learner with the same model"),
    m.Start(96, (m.FragmentState(0, CHECKSUM), m.FragmentState(3, 0)), (97, 99)),
    m.Upcoming((0, 3)),
    m.Request(9, 1, 3),
    m.Published(3, 42, 9, CHECKSUM, 12, 4, 96, b"\xffupdate", 104),
    m.Fate(3, 12, 42, "merged"),
    m.Fate(3, 13, -1, "stale"),
    m.Reseed("not finite"),
    m.Stop("budget spent"),
    m.InlineReply(3, 12, m.PushReply(True, late=True)),
    m.InlineReply(3, 13, REFUSED),
    m.Heal((0, 3)),
    m.Donate(3, (5, 6)),
    m.InnerOffer(3, 2, 2**23 + 5, "peer"),
    m.DataLeases("books", 7, (m.Lease(4, 17),), (3,), True),
    m.Serving(("10.0.0.1:7078", "10.0.0.2:7078"), (0, 1, 1)),
)
PUSH_OPENS = (parts.PushOpen(HEADER, CHECKSUM, 2, 2**20), parts.PushOpen(INNER, 1, 16, 2**16))
FETCHES = (
    m.FetchRequest(m.FetchKind.UPDATE, "island-7", 2, 3, 42, 2**20, 2**22),
    m.FetchRequest(m.FetchKind.INNER, "a", 1, 15, 0),
)
REMOTE = (RemoteProtocolError,)
NAMES = ("", "a", "island-7", "é", "a\nb", "\x00", "x" * 200, "x" * 201, "int4", "rda", "learner_lost", "fp32", "inner")


# ---------------------------------------------------------------- protobuf messages of any content


def noise(message_class: Any) -> Make:
    """A message with random fields: what a mutation of bytes rarely reaches, such as many fields wrong at once."""

    def make(rng: Random) -> bytes:
        return bytes(_noise(rng, message_class.DESCRIPTOR, message_class()).SerializeToString())

    return make


def _noise(rng: Random, descriptor: Any, message: Any) -> Any:
    chosen = rng.choice(descriptor.fields) if descriptor.oneofs else None
    for field in descriptor.fields:
        if (chosen is not None and field is not chosen) or rng.random() < 0.2:
            continue
        count = rng.choice((0, 1, 2, 3, 4, 4, 200 if rng.random() < 0.05 else 1))
        if field.message_type is not None:
            target = getattr(message, field.name)
            many = isinstance(target, Sequence) or hasattr(target, "add")
            for _ in range(count if many else 1):
                _noise(rng, field.message_type, target.add() if many else target)
            if not many:
                target.SetInParent()
        elif hasattr(getattr(message, field.name), "extend"):
            getattr(message, field.name).extend(_scalar(rng, field) for _ in range(count))
        else:
            setattr(message, field.name, _scalar(rng, field))
    return message


def _scalar(rng: Random, field: Any) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 50, 2**16 + 1 if rng.random() < 0.02 else 3)))
        return rng.choice(NAMES)
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return rng.choice((0.0, 1.5, float("nan"), float("inf"), -1e308))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 4, 5, 99, -1))
    value = rng.choice((0, 1, 2, 3, 4, *SIZES))
    if kind == FieldDescriptor.CPPTYPE_UINT32:
        return value % 2**32
    if kind == FieldDescriptor.CPPTYPE_UINT64:
        return value
    return rng.choice((value % 2**63, value % 2**63, -1, -(2**63)))


def either(*makes: Make) -> Make:
    return lambda rng: rng.choice(makes)(rng)


def _stable(encode: Callable[[Any], bytes], parse: Callable[[bytes], Any]) -> Callable[[Any], None]:
    """What was accepted lies inside every bound: it can be sent on and means the same there. (By text: NaN is no equal
    of itself.)"""

    def check(message: Any) -> None:
        assert repr(parse(encode(message))) == repr(message)

    return check


def _message_target(name: str, cases: int, parse: Any, encode: Any, samples: Sequence[Any], proto: Any) -> Target:
    make = either(mutated([encode(sample) for sample in samples]), noise(proto))
    return Target(name, make, parse, cases, REMOTE, _stable(encode, parse))


def _parse_status(data: bytes) -> Any:
    return convert.parse_json_object("StatusReply.json", convert.parse_bytes(pb.StatusReply, data).json)


def _status_reply(document: bytes) -> bytes:
    """By hand: text that is not UTF-8 must be possible."""
    return b"\x0a" + varint(len(document)) + document


def _welcome(config: bytes) -> bytes:
    inner = pb.Welcome(run="r", epoch=1, generation=1, fingerprint="f", protocol=2).SerializeToString()
    inner += b"\x22" + varint(len(config)) + config
    return b"\x0a" + varint(len(inner)) + inner


def _view(parse: Callable[[memoryview], Any]) -> Callable[[bytes], Any]:
    return lambda data: parse(memoryview(data))


# ---------------------------------------------------------------- all of them


def wire_targets() -> list[Target]:
    learner = [convert.encode_learner_message(message) for message in LEARNER]
    syncer = [convert.encode_syncer_message(message) for message in SYNCER]
    opens = [parts.encode_push_open(opened) for opened in PUSH_OPENS]
    whole = push_stream()
    some_parts = [parts.encode_part(0, memoryview(b"some data"), opens[0]), parts.encode_part(2**20, memoryview(b"x"))]
    some_parts.append(parts.encode_refused_part("unknown_version", "left the ring; fetch it whole"))
    statuses = [json.dumps({"run": "r", "members": [{"learner": "a", "loss": None}], "versions": [1, 2]}).encode()]
    settings = [json.dumps(SyncConfig(fragments=4).to_dict()).encode()]
    transport = (RemoteProtocolError, PayloadError, RefusedError, UnreachableError)

    def sealed(opening: bytes) -> bytes:
        return parts.encode_part(0, memoryview(b"data"), opening)

    def parse_opening(data: bytes) -> Any:
        part = parts.parse_part(data)
        return None if part.opening is None else parts.parse_push_open(part.opening)

    return [
        _message_target(
            "wire.learner",
            18_000,
            convert.parse_learner_message,
            convert.encode_learner_message,
            LEARNER,
            pb.LearnerMessage,
        ),
        _message_target(
            "wire.syncer", 18_000, convert.parse_syncer_message, convert.encode_syncer_message, SYNCER, pb.SyncerMessage
        ),
        _message_target(
            "wire.push_open", 5000, _view(parts.parse_push_open), parts.encode_push_open, PUSH_OPENS, pb.PushOpen
        ),
        _message_target(
            "wire.push_reply",
            1500,
            parts.parse_push_reply,
            parts.encode_push_reply,
            (m.PushReply(True), REFUSED),
            pb.PushReply,
        ),
        _message_target(
            "wire.fetch_request", 2500, parts.parse_fetch_request, parts.encode_fetch_request, FETCHES, pb.FetchRequest
        ),
        _message_target(
            "wire.fetch_header",
            1500,
            _view(parts.parse_fetch_header),
            parts.encode_fetch_header,
            (m.FetchHeader(42, "int4", 2**36, CHECKSUM),),
            pb.FetchHeader,
        ),
        Target(
            "wire.fetch_refused",
            either(mutated([b"\x0a\x04busy\x12\x05later"]), noise(pb.Refused)),
            _view(parts.parse_fetch_refused),
            1000,
            REMOTE,
        ),
        Target("wire.status", mutated_json(statuses, _status_reply), _parse_status, 2000, REMOTE),
        Target("wire.settings", mutated_json(settings, _welcome), convert.parse_syncer_message, 4000, REMOTE),
        Target(
            "wire.seal",
            mutated([seal(message) for message in learner]),
            lambda data: convert.parse_learner_message(unseal(data)),
            3000,
            (RemoteProtocolError, PayloadError),
        ),
        Target("wire.part", mutated(some_parts), parts.parse_part, 8000, (RemoteProtocolError, PayloadError)),
        Target(
            "wire.part.opening", lambda rng: sealed(mutated(opens)(rng)), parse_opening, 3000, (*REMOTE, PayloadError)
        ),
        Target(
            "wire.push_stream",
            streams([whole], [noise(pb.PushPart)]),
            on_loop(receive_push),
            1200,
            check=check_push,
            memory=lambda size: 2**21 + 4 * size,
        ),
        Target(
            "wire.fetch_stream",
            streams([fetch_stream()], [noise(pb.FetchPart)]),
            on_loop(receive_fetch),
            1200,
            transport,
            memory=lambda size: m.INNER_PIECE_BYTES + 2**21 + 4 * size,
        ),
        Target(
            "wire.session",
            streams(
                [learner, learner[1:], learner[:1] + learner[2:5], [seal(message) for message in learner]],
                [noise(pb.LearnerMessage)],
            ),
            on_loop(serve_session),
            1500,
            check=check_session,
        ),
        Target(
            "wire.client_session",
            streams(
                [syncer, [syncer[0], *syncer[2:]], syncer[1:], [seal(message) for message in syncer]],
                [noise(pb.SyncerMessage)],
            ),
            on_loop(follow_session),
            1000,
            transport,
        ),
    ]
