"""Control messages: dataclasses of `core` <-> bytes of `atoll.proto`.

Encoding trusts our own objects. Parsing trusts nothing: whatever the bytes are, the result is a valid message or a
RemoteProtocolError whose text names the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from atoll.core import messages as m
from atoll.core.config import FRAGMENTS_MAX, TENSOR_MERGES, SyncConfig
from atoll.errors import ConfigError, RemoteProtocolError
from atoll.wire import checks, recovery
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.headers import check_push_header, check_push_reply, push_header_message, push_reply_message
from atoll.wire.limits import (
    DIMENSIONS_MAX,
    DISCARDS_MAX,
    JSON_CHARS_MAX,
    OUTSTANDING_MAX,
    TENSOR_NAME_CHARS_MAX,
    TENSORS_MAX,
)
from atoll.wire.versions import settings_in
from atoll.wire.weight import weigh_learner_message, weigh_syncer_message

UINT32_MAX = 2**32 - 1


def parse_bytes(message_class: Any, data: bytes | memoryview) -> Any:
    """Bytes -> protobuf message, with one kind of error. ValueError covers text that is not UTF-8 in the pure-Python
    implementation of protobuf."""
    try:
        return message_class.FromString(bytes(data))
    except (DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"bytes that are no {message_class.DESCRIPTOR.name}: {error}") from None


# ---------------------------------------------------------------- learner -> syncer


def encode_learner_message(message: m.LearnerMessage) -> bytes:
    return bytes(_learner_message(message).SerializeToString())


def _learner_message(message: m.LearnerMessage) -> Any:
    match message:
        case m.Hello():
            return pb.LearnerMessage(hello=_hello(message))
        case m.Ready():
            return pb.LearnerMessage(ready=pb.Ready(step=message.step, bases=message.bases))
        case m.Progress():
            discarded = [
                pb.DiscardCount(fragment=d.fragment, cause=d.cause, tokens=d.tokens) for d in message.discarded
            ]
            return pb.LearnerMessage(
                progress=pb.Progress(
                    step=message.step,
                    steps=message.steps,
                    tokens=message.tokens,
                    step_ns=message.step_ns,
                    loss=message.loss,
                    bases=message.bases,
                    discarded=discarded,
                    pending=message.pending,
                )
            )
        case m.Nothing():
            return pb.LearnerMessage(nothing=pb.Nothing(round=message.round, fragment=message.fragment))
        case m.Leave():
            return pb.LearnerMessage(leave=pb.Leave(reason=checks.cut(message.reason)))
        case m.Contribution():
            header = push_header_message(message.header)
            return pb.LearnerMessage(contribution=pb.Contribution(header=header, payload=message.payload))
        case m.DataReport():
            return pb.LearnerMessage(data_report=recovery.data_report_message(message))


def _hello(hello: m.Hello) -> Any:
    return pb.Hello(
        learner=hello.learner,
        instance=hello.instance,
        protocol=hello.protocol,
        tensors=[pb.TensorSpec(name=t.name, shape=t.shape, dtype=t.dtype, merge=t.merge) for t in hello.tensors],
        generation=hello.generation,
        run=hello.run,
        bases=hello.bases,
        outstanding=[pb.Outstanding(fragment=o.fragment, seq=o.seq) for o in hello.outstanding],
        epoch=hello.epoch,
        checksums=hello.checksums,
        wants_inner=hello.wants_inner,
        frozen=hello.frozen,
    )


def parse_learner_message(data: bytes) -> m.LearnerMessage:
    weigh_learner_message(data)
    outer = parse_bytes(pb.LearnerMessage, data)
    which = outer.WhichOneof("message")
    if which is None:
        raise RemoteProtocolError("a learner message of an unknown kind; update the older side")
    parsed: m.LearnerMessage = _LEARNER_PARSERS[which](getattr(outer, which))
    return parsed


def _parse_hello(hello: Any) -> m.Hello:
    checks.length("Hello.tensors", len(hello.tensors), TENSORS_MAX)
    checks.length("Hello.outstanding", len(hello.outstanding), OUTSTANDING_MAX)
    bases = checks.versions("Hello.bases", hello.bases)
    if len(hello.checksums) not in (0, len(bases)):
        raise RemoteProtocolError(
            f"Hello.checksums must be empty or one for each of the {len(bases)} bases; got {len(hello.checksums)}"
        )
    return m.Hello(
        learner=checks.identifier("Hello.learner", hello.learner),
        instance=checks.identifier("Hello.instance", hello.instance),
        protocol=checks.count("Hello.protocol", hello.protocol, high=UINT32_MAX),
        tensors=tuple(_parse_tensor(tensor) for tensor in hello.tensors),
        generation=checks.count("Hello.generation", hello.generation),
        run=checks.optional_identifier("Hello.run", hello.run),
        bases=bases,
        outstanding=tuple(
            m.Outstanding(
                fragment=checks.fragment("Outstanding.fragment", o.fragment),
                seq=checks.count("Outstanding.seq", o.seq),
            )
            for o in hello.outstanding
        ),
        epoch=checks.count("Hello.epoch", hello.epoch),
        checksums=tuple(int(checksum) for checksum in hello.checksums),
        wants_inner=bool(hello.wants_inner),
        frozen=int(hello.frozen),
    )


def _parse_tensor(tensor: Any) -> m.TensorSpec:
    checks.length("TensorSpec.shape", len(tensor.shape), DIMENSIONS_MAX)
    return m.TensorSpec(
        name=checks.identifier("TensorSpec.name", tensor.name, TENSOR_NAME_CHARS_MAX),
        shape=tuple(checks.count("TensorSpec.shape", side, low=1) for side in tensor.shape),
        dtype=checks.identifier("TensorSpec.dtype", tensor.dtype),
        merge=checks.choice("TensorSpec.merge", tensor.merge, TENSOR_MERGES),
    )


def _parse_progress(progress: Any) -> m.Progress:
    checks.length("Progress.discarded", len(progress.discarded), DISCARDS_MAX)
    checks.length("Progress.pending", len(progress.pending), FRAGMENTS_MAX)
    return m.Progress(
        step=checks.count("Progress.step", progress.step),
        steps=checks.count("Progress.steps", progress.steps),
        tokens=checks.count("Progress.tokens", progress.tokens),
        step_ns=checks.count("Progress.step_ns", progress.step_ns),
        loss=float(progress.loss),
        bases=checks.versions("Progress.bases", progress.bases),
        discarded=tuple(
            m.DiscardCount(
                fragment=checks.fragment("DiscardCount.fragment", d.fragment),
                cause=checks.choice("DiscardCount.cause", d.cause, tuple(m.Discard)),
                tokens=checks.count("DiscardCount.tokens", d.tokens),
            )
            for d in progress.discarded
        ),
        pending=tuple(checks.count("Progress.pending", tokens) for tokens in progress.pending),
    )


def _parse_contribution(contribution: Any) -> m.Contribution:
    checks.length("Contribution.payload", len(contribution.payload), m.INLINE_BYTES_MAX)
    header = check_push_header(contribution.header)
    if header.kind is not m.PushKind.CONTRIBUTION:
        raise RemoteProtocolError(f"a push of kind {header.kind} must travel over bulk, not inside Contribution")
    return m.Contribution(header, bytes(contribution.payload))


_LEARNER_PARSERS: dict[str, Callable[[Any], m.LearnerMessage]] = {
    "hello": _parse_hello,
    "ready": lambda r: m.Ready(step=checks.count("Ready.step", r.step), bases=checks.versions("Ready.bases", r.bases)),
    "progress": _parse_progress,
    "nothing": lambda n: m.Nothing(
        round=checks.count("Nothing.round", n.round), fragment=checks.fragment("Nothing.fragment", n.fragment)
    ),
    "leave": lambda n: m.Leave(reason=checks.text("Leave.reason", n.reason)),
    "contribution": _parse_contribution,
    "data_report": recovery.parse_data_report,
}


# ---------------------------------------------------------------- syncer -> learner


def encode_syncer_message(message: m.SyncerMessage) -> bytes:
    return bytes(_syncer_message(message).SerializeToString())


def _syncer_message(message: m.SyncerMessage) -> Any:
    match message:
        case m.Welcome():
            welcome = pb.Welcome(
                run=message.run,
                epoch=message.epoch,
                generation=message.generation,
                config_json=json.dumps(settings_in(message.config.to_dict(), message.protocol)),
                fingerprint=message.fingerprint,
                seed=message.seed,
                protocol=message.protocol if message.protocol > 1 else 0,  # protocol 1 has neither field
                rank_plus_one=message.rank + 1,
            )
            return pb.SyncerMessage(welcome=welcome)
        case m.Refused():
            return pb.SyncerMessage(refused=pb.Refused(code=message.code, detail=checks.cut(message.detail)))
        case m.Start():
            states = [pb.FragmentState(version=f.version, checksum=f.checksum) for f in message.fragments]
            return pb.SyncerMessage(start=pb.Start(step=message.step, fragments=states, due_steps=message.due_steps))
        case m.Upcoming():
            return pb.SyncerMessage(upcoming=pb.Upcoming(fragments=message.fragments))
        case m.Request():
            request = pb.Request(round=message.round, attempt=message.attempt, fragment=message.fragment)
            return pb.SyncerMessage(request=request)
        case m.Published():
            published = pb.Published(
                fragment=message.fragment,
                version=message.version,
                round=message.round,
                checksum=message.checksum,
                merged_seq=message.merged_seq,
                contributors=message.contributors,
                clock_step=message.clock_step,
                update=message.update,
                due_step=message.due_step,
            )
            return pb.SyncerMessage(published=published)
        case m.Fate():
            fate = pb.Fate(
                fragment=message.fragment, seq=message.seq, version=message.version, reason=checks.cut(message.reason)
            )
            return pb.SyncerMessage(fate=fate)
        case m.Reseed():
            return pb.SyncerMessage(reseed=pb.Reseed(reason=checks.cut(message.reason)))
        case m.Stop():
            return pb.SyncerMessage(stop=pb.Stop(reason=checks.cut(message.reason)))
        case m.Received():
            reply = push_reply_message(message.reply)
            return pb.SyncerMessage(received=pb.Received(fragment=message.fragment, seq=message.seq, reply=reply))
        case m.Heal():
            return pb.SyncerMessage(heal=pb.Heal(fragments=message.fragments))
        case m.Donate():
            return pb.SyncerMessage(donate=pb.Donate(slot=message.slot, bases=message.bases))
        case m.InnerOffer():
            return pb.SyncerMessage(inner_offer=recovery.inner_offer_message(message))
        case m.DataLeases():
            return pb.SyncerMessage(data_leases=recovery.data_leases_message(message))


def parse_syncer_message(data: bytes) -> m.SyncerMessage:
    weigh_syncer_message(data)
    outer = parse_bytes(pb.SyncerMessage, data)
    which = outer.WhichOneof("message")
    if which is None:
        raise RemoteProtocolError("a syncer message of an unknown kind; update the older side")
    parsed: m.SyncerMessage = _SYNCER_PARSERS[which](getattr(outer, which))
    return parsed


def _parse_welcome(welcome: Any) -> m.Welcome:
    return m.Welcome(
        run=checks.identifier("Welcome.run", welcome.run),
        epoch=checks.count("Welcome.epoch", welcome.epoch),
        generation=checks.count("Welcome.generation", welcome.generation),
        config=_parse_config(welcome.config_json),
        fingerprint=checks.identifier("Welcome.fingerprint", welcome.fingerprint),
        seed=bool(welcome.seed),
        protocol=checks.count("Welcome.protocol", welcome.protocol or 1, high=UINT32_MAX),
        rank=welcome.rank_plus_one - 1,
    )


def _parse_config(config_json: str) -> SyncConfig:
    try:
        return SyncConfig.from_dict(parse_json_object("Welcome.config_json", config_json))
    except ConfigError as error:
        raise RemoteProtocolError(f"Welcome.config_json: {error}") from None


def parse_json_object(name: str, value: str) -> dict[str, Any]:
    checks.length(name, len(value), JSON_CHARS_MAX)
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"{name} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise RemoteProtocolError(f"{name} must be a JSON object; got {type(parsed).__name__}")
    return parsed


def parse_refused(refused: Any) -> m.Refused:
    """The code is not checked against our list: a newer syncer may know more reasons."""
    return m.Refused(
        code=checks.identifier("Refused.code", refused.code), detail=checks.text("Refused.detail", refused.detail)
    )


def _parse_start(start: Any) -> m.Start:
    checks.length("Start.fragments", len(start.fragments), FRAGMENTS_MAX)
    checks.length("Start.due_steps", len(start.due_steps), FRAGMENTS_MAX)
    return m.Start(
        step=checks.count("Start.step", start.step),
        fragments=tuple(
            m.FragmentState(version=checks.count("FragmentState.version", f.version), checksum=int(f.checksum))
            for f in start.fragments
        ),
        due_steps=tuple(checks.count("Start.due_steps", step) for step in start.due_steps),
    )


def _parse_upcoming(upcoming: Any) -> m.Upcoming:
    checks.length("Upcoming.fragments", len(upcoming.fragments), FRAGMENTS_MAX)
    return m.Upcoming(fragments=tuple(checks.fragment("Upcoming.fragments", f) for f in upcoming.fragments))


def _parse_request(request: Any) -> m.Request:
    return m.Request(
        round=checks.count("Request.round", request.round),
        attempt=checks.count("Request.attempt", request.attempt),
        fragment=checks.fragment("Request.fragment", request.fragment),
    )


def _parse_published(published: Any) -> m.Published:
    checks.length("Published.update", len(published.update), m.INLINE_BYTES_MAX)
    return m.Published(
        fragment=checks.fragment("Published.fragment", published.fragment),
        version=checks.count("Published.version", published.version),
        round=checks.count("Published.round", published.round),
        checksum=int(published.checksum),
        merged_seq=checks.count("Published.merged_seq", published.merged_seq, low=-1),
        contributors=checks.count("Published.contributors", published.contributors),
        clock_step=checks.count("Published.clock_step", published.clock_step),
        update=bytes(published.update),
        due_step=checks.count("Published.due_step", published.due_step),
    )


def _parse_fate(fate: Any) -> m.Fate:
    return m.Fate(
        fragment=checks.fragment("Fate.fragment", fate.fragment),
        seq=checks.count("Fate.seq", fate.seq),
        version=checks.count("Fate.version", fate.version, low=-1),
        reason=checks.text("Fate.reason", fate.reason),
    )


_SYNCER_PARSERS: dict[str, Callable[[Any], m.SyncerMessage]] = {
    "welcome": _parse_welcome,
    "refused": parse_refused,
    "start": _parse_start,
    "upcoming": _parse_upcoming,
    "request": _parse_request,
    "published": _parse_published,
    "fate": _parse_fate,
    "reseed": lambda r: m.Reseed(reason=checks.text("Reseed.reason", r.reason)),
    "stop": lambda s: m.Stop(reason=checks.text("Stop.reason", s.reason)),
    "received": lambda r: m.Received(
        fragment=checks.fragment("Received.fragment", r.fragment),
        seq=checks.count("Received.seq", r.seq),
        reply=check_push_reply(r.reply),
    ),
    "heal": recovery.parse_heal,
    "donate": recovery.parse_donate,
    "inner_offer": recovery.parse_inner_offer,
    "data_leases": recovery.parse_data_leases,
}
