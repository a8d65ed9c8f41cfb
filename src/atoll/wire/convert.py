"""Control messages: dataclasses of `core` <-> bytes of `atoll.proto`.

Encoding trusts our own objects. Parsing trusts nothing: whatever the bytes are, the result is a valid message or a
RemoteProtocolError whose text names the field.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from atoll.core import FRAGMENTS_MAX, TENSOR_MERGES, SyncConfig
from atoll.core import messages as m
from atoll.errors import ConfigError, RemoteProtocolError
from atoll.wire import checks, limits
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.headers import check_push_header, check_push_reply
from atoll.wire.records import Parse, free, inside, many, parse_bytes, payload, plain, record
from atoll.wire.versions import settings_in
from atoll.wire.weight import weigh_learner_message, weigh_syncer_message

_protocol = partial(checks.count, high=2**32 - 1)
_bases = many(checks.version, FRAGMENTS_MAX)
_fragments = many(checks.fragment, FRAGMENTS_MAX)
_chunks = many(checks.count, m.CHUNKS_MAX)
_leases = many(inside(record(m.Lease, chunk=checks.count, start=checks.count)), m.CHUNKS_MAX)


# ---------------------------------------------------------------- learner -> syncer


def encode_learner_message(message: m.LearnerMessage) -> bytes:
    return bytes(pb.LearnerMessage(**{_LEARNER_FIELDS[type(message)]: plain(message)}).SerializeToString())


def parse_learner_message(data: bytes) -> m.LearnerMessage:
    weigh_learner_message(data)
    outer = parse_bytes(pb.LearnerMessage, data)
    which = outer.WhichOneof("message")
    if which is None:
        raise RemoteProtocolError("a learner message of an unknown kind; update the older side")
    return _LEARNER_PARSERS[which](getattr(outer, which))


_tensor = record(
    m.TensorSpec,
    name=partial(checks.identifier, chars_max=limits.TENSOR_NAME_CHARS_MAX),
    shape=many(partial(checks.count, low=1), limits.DIMENSIONS_MAX),
    dtype=checks.identifier,
    merge=partial(checks.choice, choices=TENSOR_MERGES),
)
_hello = record(
    m.Hello,
    learner=checks.learner_id,
    instance=checks.identifier,
    protocol=_protocol,
    tensors=many(inside(_tensor), limits.TENSORS_MAX),
    generation=checks.count,
    run=checks.optional_identifier,
    bases=_bases,
    outstanding=many(inside(record(m.Outstanding, fragment=checks.fragment, seq=checks.count)), limits.OUTSTANDING_MAX),
    epoch=checks.count,
    checksums=many(free, FRAGMENTS_MAX),
    wants_inner=free,
    frozen=free,
    fingerprint=checks.optional_identifier,
    codecs=many(checks.identifier, limits.CODECS_MAX),
    shards=free,
    any_update=free,
    moves=free,
)


def _parse_hello(message: Any) -> m.Hello:
    hello = _hello(message)
    if len(hello.checksums) not in (0, len(hello.bases)):
        raise RemoteProtocolError(
            f"Hello.checksums must be empty or one for each of the {len(hello.bases)} bases; got {len(hello.checksums)}"
        )
    return hello


_discard_count = record(
    m.DiscardCount,
    fragment=checks.fragment,
    cause=partial(checks.choice, choices=tuple(m.Discard)),
    tokens=checks.count,
)
_contribution = record(m.InlinePush, payload=payload(m.INLINE_BYTES_MAX), header=inside(check_push_header))


def _parse_contribution(message: Any) -> m.InlinePush:
    contribution = _contribution(message)
    kind = contribution.header.kind
    if kind is not m.PushKind.CONTRIBUTION:
        raise RemoteProtocolError(f"a push of kind {kind} must travel over bulk, not inside Contribution")
    return contribution


_LEARNER_FIELDS: dict[type[m.LearnerMessage], str] = {
    m.Hello: "hello",
    m.Ready: "ready",
    m.Progress: "progress",
    m.Nothing: "nothing",
    m.Leave: "leave",
    m.InlinePush: "contribution",
    m.DataReport: "data_report",
}
_LEARNER_PARSERS: dict[str, Parse[m.LearnerMessage]] = {
    "hello": _parse_hello,
    "ready": record(m.Ready, step=checks.count, bases=_bases),
    "progress": record(
        m.Progress,
        step=checks.count,
        steps=checks.count,
        tokens=checks.count,
        step_ns=checks.count,
        loss=free,
        bases=_bases,
        discarded=many(inside(_discard_count), limits.DISCARDS_MAX),
        pending=many(checks.count, FRAGMENTS_MAX),
    ),
    "nothing": record(m.Nothing, round=checks.count, fragment=checks.fragment),
    "leave": record(m.Leave, reason=checks.text),
    "contribution": _parse_contribution,
    "data_report": record(
        m.DataReport,
        stream=checks.identifier,
        serial=checks.count,
        chunks=checks.count,
        want=partial(checks.count, high=m.CHUNKS_MAX),
        done=_chunks,
        holding=_chunks,
        returned=_leases,
    ),
}


# ---------------------------------------------------------------- syncer -> learner


def encode_syncer_message(message: m.SyncerMessage) -> bytes:
    values = _welcome(message) if isinstance(message, m.Welcome) else plain(message)
    return bytes(pb.SyncerMessage(**{_SYNCER_FIELDS[type(message)]: values}).SerializeToString())


def parse_syncer_message(data: bytes) -> m.SyncerMessage:
    weigh_syncer_message(data)
    outer = parse_bytes(pb.SyncerMessage, data)
    which = outer.WhichOneof("message")
    if which is None:
        raise RemoteProtocolError("a syncer message of an unknown kind; update the older side")
    return _SYNCER_PARSERS[which](getattr(outer, which))


def _welcome(welcome: m.Welcome) -> dict[str, Any]:
    return {
        "run": welcome.run,
        "epoch": welcome.epoch,
        "generation": welcome.generation,
        "config_json": json.dumps(settings_in(welcome.config.to_dict(), welcome.protocol)),
        "fingerprint": welcome.fingerprint,
        "seed": welcome.seed,
        "protocol": welcome.protocol if welcome.protocol > 1 else 0,  # protocol 1 has neither field
        "rank_plus_one": welcome.rank + 1,
        "secret": welcome.secret,
        "shards": welcome.shards,
        "shard_of": welcome.shard_of,
    }


def _parse_welcome(welcome: Any) -> m.Welcome:
    return m.Welcome(
        run=checks.identifier("Welcome.run", welcome.run),
        epoch=checks.count("Welcome.epoch", welcome.epoch),
        generation=checks.count("Welcome.generation", welcome.generation),
        config=_parse_config(welcome.config_json),
        fingerprint=checks.identifier("Welcome.fingerprint", welcome.fingerprint),
        seed=bool(welcome.seed),
        protocol=_protocol("Welcome.protocol", welcome.protocol or 1),
        rank=welcome.rank_plus_one - 1,
        secret=checks.secret("Welcome.secret", welcome.secret),
        **_parse_shards("Welcome", welcome),
    )


def _parse_shards(name: str, message: Any) -> dict[str, tuple[Any, ...]]:
    """Who serves which fragment: every fragment has one of the shards, or there are none."""
    shards = many(checks.identifier, limits.SHARDS_MAX)(f"{name}.shards", message.shards)
    last = max(0, len(shards) - 1)
    shard_of = many(partial(checks.count, high=last), FRAGMENTS_MAX)(f"{name}.shard_of", message.shard_of)
    if bool(shards) != bool(shard_of):
        raise RemoteProtocolError(f"{name}.shard_of must say of every fragment which of {name}.shards serves it")
    return {"shards": shards, "shard_of": shard_of}


def _parse_serving(message: Any) -> m.Serving:
    return m.Serving(**_parse_shards("Serving", message))


def _parse_config(config_json: str) -> SyncConfig:
    try:
        return SyncConfig.from_dict(parse_json_object("Welcome.config_json", config_json))
    except ConfigError as error:
        raise RemoteProtocolError(f"Welcome.config_json: {error}") from None


def parse_json_object(name: str, value: str) -> dict[str, Any]:
    checks.length(name, len(value), limits.JSON_CHARS_MAX)
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"{name} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise RemoteProtocolError(f"{name} must be a JSON object; got {type(parsed).__name__}")
    return parsed


parse_refused = record(m.Refused, code=checks.identifier, detail=checks.text)
"""The code is not checked against our list: a newer syncer may know more reasons."""


def _parse_inner_offer(message: Any) -> m.InnerOffer:
    pieces = checks.count("InnerOffer.pieces", message.pieces, high=limits.INNER_PIECES_MAX)
    offer = record(
        m.InnerOffer,
        slot=checks.slot,
        pieces=free,
        size=partial(checks.count, low=pieces, high=pieces * m.INNER_PIECE_BYTES),
        peer=checks.optional_identifier,
        reason=checks.text,
    )
    return offer(message)


_SYNCER_FIELDS: dict[type[m.SyncerMessage], str] = {
    m.Welcome: "welcome",
    m.Refused: "refused",
    m.Start: "start",
    m.Upcoming: "upcoming",
    m.Request: "request",
    m.Published: "published",
    m.Fate: "fate",
    m.Reseed: "reseed",
    m.Stop: "stop",
    m.InlineReply: "received",
    m.Heal: "heal",
    m.Donate: "donate",
    m.InnerOffer: "inner_offer",
    m.DataLeases: "data_leases",
    m.Serving: "serving",
}
_SYNCER_PARSERS: dict[str, Parse[m.SyncerMessage]] = {
    "welcome": _parse_welcome,
    "refused": parse_refused,
    "start": record(
        m.Start,
        step=checks.count,
        fragments=many(inside(record(m.FragmentState, version=checks.count, checksum=free)), FRAGMENTS_MAX),
        due_steps=many(checks.count, FRAGMENTS_MAX),
        away=_fragments,
    ),
    "upcoming": record(m.Upcoming, fragments=_fragments),
    "request": record(
        m.Request,
        round=checks.count,
        attempt=checks.count,
        fragment=checks.fragment,
        codec=checks.optional_identifier,
        away=many(checks.fragment, FRAGMENTS_MAX),
    ),
    "published": record(
        m.Published,
        fragment=checks.fragment,
        version=checks.count,
        round=checks.count,
        checksum=free,
        merged_seq=checks.version,
        contributors=checks.count,
        clock_step=checks.count,
        update=payload(m.INLINE_BYTES_MAX),
        due_step=checks.count,
    ),
    "fate": record(m.Fate, fragment=checks.fragment, seq=checks.count, version=checks.version, reason=checks.text),
    "reseed": record(m.Reseed, reason=checks.text),
    "stop": record(m.Stop, reason=checks.text),
    "received": record(m.InlineReply, fragment=checks.fragment, seq=checks.count, reply=inside(check_push_reply)),
    "heal": record(m.Heal, fragments=_fragments),
    "donate": record(m.Donate, slot=checks.slot, bases=_bases),
    "inner_offer": _parse_inner_offer,
    "data_leases": record(
        m.DataLeases,
        stream=checks.identifier,
        serial=checks.count,
        granted=_leases,
        revoked=_chunks,
        exhausted=free,
    ),
    "serving": _parse_serving,
}
