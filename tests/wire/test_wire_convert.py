"""Every message survives the way there and back; no bytes whatsoever give anything but a message or a clear error."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core import messages as m
from atoll.core.config import FRAGMENTS_MAX, SyncConfig
from atoll.errors import PayloadError, RemoteProtocolError
from atoll.wire import parts
from atoll.wire.convert import (
    encode_learner_message,
    encode_syncer_message,
    parse_learner_message,
    parse_syncer_message,
)
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.limits import (
    COUNT_MAX,
    ID_CHARS_MAX,
    PART_BYTES_MAX,
    PART_BYTES_MIN,
    PUSH_BYTES_MAX,
    STRIPES_MAX,
    TEXT_CHARS_MAX,
)

counts = st.integers(0, COUNT_MAX)
versions = st.integers(-1, COUNT_MAX)
fragments = st.integers(0, FRAGMENTS_MAX - 1)
checksums = st.integers(0, 2**64 - 1)
printable = st.characters(exclude_categories=("C", "Z"))
ids = st.text(printable, min_size=1, max_size=20)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=50)
bases = st.lists(versions, max_size=5).map(tuple)


def tuples(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=4).map(tuple)


tensors = st.builds(
    m.TensorSpec, name=ids, shape=tuples(st.integers(1, COUNT_MAX)), dtype=ids, merge=st.sampled_from(["rda", "mean"])
)
discards = st.builds(m.DiscardCount, fragment=fragments, cause=st.sampled_from(list(m.Discard)), tokens=counts)
configs = st.builds(SyncConfig, sync_every=st.integers(1, 1000), outer_lr=st.floats(0, 100), quorum=st.just("50%"))

push_headers = st.builds(
    m.PushHeader,
    kind=st.sampled_from(m.PushKind),
    learner=ids,
    generation=counts,
    fragment=fragments,
    round=counts,
    attempt=counts,
    seq=counts,
    base_version=versions,
    steps=counts,
    tokens=counts,
    codec=ids,
    size=st.integers(0, PUSH_BYTES_MAX),
    checksum=checksums,
)
push_replies = st.one_of(
    st.builds(m.PushReply, accepted=st.just(True), late=st.booleans(), detail=texts),
    st.builds(m.PushReply, accepted=st.just(False), code=ids, detail=texts),
)
payloads = st.binary(max_size=40)

learner_messages = st.one_of(
    st.builds(
        m.Hello,
        learner=ids,
        instance=ids,
        protocol=st.integers(0, 2**32 - 1),
        tensors=tuples(tensors),
        generation=counts,
        run=st.just("") | ids,
        bases=bases,
        outstanding=tuples(st.builds(m.Outstanding, fragment=fragments, seq=counts)),
    ),
    st.builds(m.Ready, step=counts, bases=bases),
    st.builds(
        m.Progress,
        step=counts,
        steps=counts,
        tokens=counts,
        step_ns=counts,
        loss=st.floats(allow_nan=False),
        bases=bases,
        discarded=tuples(discards),
    ),
    st.builds(m.Nothing, round=counts, fragment=fragments),
    st.builds(m.Leave, reason=texts),
    st.builds(m.Contribution, header=push_headers, payload=payloads),
)
syncer_messages = st.one_of(
    st.builds(m.Welcome, run=ids, epoch=counts, generation=counts, config=configs, fingerprint=ids, seed=st.booleans()),
    st.builds(m.Refused, code=st.sampled_from(list(m.Refusal)) | ids, detail=texts),
    st.builds(
        m.Start,
        step=counts,
        fragments=tuples(st.builds(m.FragmentState, version=counts, checksum=checksums)),
        due_steps=tuples(counts),
    ),
    st.builds(m.Upcoming, fragments=tuples(fragments)),
    st.builds(m.Request, round=counts, attempt=counts, fragment=fragments),
    st.builds(
        m.Published,
        fragment=fragments,
        version=counts,
        round=counts,
        checksum=checksums,
        merged_seq=versions,
        contributors=counts,
        clock_step=counts,
        update=payloads,
    ),
    st.builds(m.Fate, fragment=fragments, seq=counts, version=versions, reason=texts),
    st.builds(m.Reseed, reason=texts),
    st.builds(m.Stop, reason=texts),
    st.builds(m.Received, fragment=fragments, seq=counts, reply=push_replies),
)
push_opens = st.builds(
    parts.PushOpen,
    header=push_headers,
    attempt_id=checksums,
    stripes=st.integers(1, STRIPES_MAX),
    part_bytes=st.integers(PART_BYTES_MIN, PART_BYTES_MAX),
)
replies = st.builds(m.PushReply, accepted=st.just(True), detail=texts, late=st.booleans()) | st.builds(
    m.PushReply, accepted=st.just(False), code=ids, detail=texts
)
fetch_requests = st.builds(
    m.FetchRequest,
    kind=st.sampled_from(m.FetchKind),
    learner=ids,
    generation=counts,
    fragment=fragments,
    version=versions,
    offset=counts,
    length=counts,
)
fetch_headers = st.builds(
    m.FetchHeader, version=counts, codec=ids, size=st.integers(0, PUSH_BYTES_MAX), checksum=checksums
)


@given(learner_messages)
def test_learner_messages_round_trip(message: m.LearnerMessage) -> None:
    assert parse_learner_message(encode_learner_message(message)) == message


@given(syncer_messages)
def test_syncer_messages_round_trip(message: m.SyncerMessage) -> None:
    assert parse_syncer_message(encode_syncer_message(message)) == message


@given(push_opens, replies, fetch_requests, fetch_headers)
def test_bulk_messages_round_trip(
    opened: parts.PushOpen, reply: m.PushReply, request: m.FetchRequest, header: m.FetchHeader
) -> None:
    assert parts.parse_push_open(memoryview(parts.encode_push_open(opened))) == opened
    assert parts.parse_push_reply(parts.encode_push_reply(reply)) == reply
    assert parts.parse_fetch_request(parts.encode_fetch_request(request)) == request
    assert parts.parse_fetch_header(memoryview(parts.encode_fetch_header(header))) == header


def test_a_loss_may_be_not_a_number() -> None:
    sent = m.Progress(1, 1, 1, 1, math.nan, ())
    received = parse_learner_message(encode_learner_message(sent))
    assert isinstance(received, m.Progress) and math.isnan(received.loss)


def test_our_own_long_texts_are_cut_not_refused() -> None:
    received = parse_syncer_message(encode_syncer_message(m.Stop("x" * (TEXT_CHARS_MAX + 1))))
    assert isinstance(received, m.Stop) and len(received.reason) == TEXT_CHARS_MAX


# ---------------------------------------------------------------- bytes from anywhere

PARSERS = [
    parse_learner_message,
    parse_syncer_message,
    parts.parse_push_open,
    parts.parse_push_reply,
    parts.parse_fetch_request,
    parts.parse_fetch_header,
    parts.parse_fetch_refused,
    parts.parse_part,
]


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes_give_a_message_or_a_clear_error(data: bytes) -> None:
    for parser in PARSERS:
        try:
            parser(data)  # type: ignore[operator]
        except (RemoteProtocolError, PayloadError) as error:
            assert str(error)


@given(learner_messages, syncer_messages, st.data())
@settings(max_examples=200)
def test_damaged_messages_give_a_message_or_a_clear_error(
    learner: m.LearnerMessage, syncer: m.SyncerMessage, data: st.DataObject
) -> None:
    for encoded, parser in (
        (encode_learner_message(learner), parse_learner_message),
        (encode_syncer_message(syncer), parse_syncer_message),
    ):
        damaged = bytearray(encoded)
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        cut = data.draw(st.integers(0, len(damaged)))
        for candidate in (bytes(damaged), bytes(damaged[:cut])):
            try:
                parser(candidate)
            except RemoteProtocolError as error:
                assert str(error)


HELLO = pb.Hello(learner="a", instance="i", protocol=1)
BAD = {
    "empty learner id": (pb.LearnerMessage(hello=pb.Hello(instance="i")), "Hello.learner"),
    "long learner id": (pb.LearnerMessage(hello=pb.Hello(learner="x" * (ID_CHARS_MAX + 1))), "Hello.learner"),
    "control characters": (pb.LearnerMessage(hello=pb.Hello(learner="a\nb")), "printable"),
    "negative generation": (pb.LearnerMessage(hello=pb.Hello(learner="a", instance="i", generation=-1)), "generation"),
    "zero side": (
        pb.LearnerMessage(
            hello=pb.Hello(
                learner="a",
                instance="i",
                tensors=[pb.TensorSpec(name="w", shape=[2, 0], dtype="float32", merge="rda")],
            )
        ),
        "TensorSpec.shape",
    ),
    "unknown merge": (
        pb.LearnerMessage(
            hello=pb.Hello(learner="a", instance="i", tensors=[pb.TensorSpec(name="w", dtype="f", merge="sum")])
        ),
        "must be one of rda, mean",
    ),
    "negative tokens": (pb.LearnerMessage(progress=pb.Progress(tokens=-5)), "Progress.tokens"),
    "huge step": (pb.LearnerMessage(ready=pb.Ready(step=2**63 - 1)), "Ready.step"),
    "unknown cause": (
        pb.LearnerMessage(progress=pb.Progress(discarded=[pb.DiscardCount(cause="bored")])),
        "DiscardCount.cause",
    ),
    "too many bases": (pb.LearnerMessage(ready=pb.Ready(bases=[0] * (FRAGMENTS_MAX + 1))), "at most 4096 entries"),
    "unknown kind": (pb.LearnerMessage(), "unknown kind"),
}


@pytest.mark.parametrize("bad", BAD)
def test_values_out_of_bounds_are_named(bad: str) -> None:
    message, expected = BAD[bad]
    with pytest.raises(RemoteProtocolError, match=expected):
        parse_learner_message(message.SerializeToString())


@pytest.mark.parametrize("config_json", ["", "[]", "{", '{"sync_every": 0}', '{"colour": 1}', "[" * 100_000])
def test_settings_that_do_not_hold_are_refused(config_json: str) -> None:
    welcome = pb.Welcome(run="r", fingerprint="f", config_json=config_json)
    with pytest.raises(RemoteProtocolError, match="config_json"):
        parse_syncer_message(pb.SyncerMessage(welcome=welcome).SerializeToString())


@pytest.mark.parametrize("accepted, code", [(True, "busy"), (False, "")])
def test_a_reply_is_either_accepted_or_has_a_code(accepted: bool, code: str) -> None:
    with pytest.raises(RemoteProtocolError, match="PushReply"):
        parts.parse_push_reply(pb.PushReply(accepted=accepted, code=code).SerializeToString())


def test_unknown_kinds_of_bulk_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="kind"):
        parts.parse_push_open(memoryview(b""))
    with pytest.raises(RemoteProtocolError, match="kind"):
        parts.parse_fetch_request(pb.FetchRequest(kind=9).SerializeToString())


def test_every_field_of_every_message_is_in_the_contract() -> None:
    """A field added to core/messages.py and forgotten here would be lost silently on the wire."""
    renamed = {"Welcome": {"config": "config_json"}}
    carried = [
        *get_args(m.LearnerMessage),
        *get_args(m.SyncerMessage),
        *(m.TensorSpec, m.Outstanding, m.DiscardCount, m.FragmentState),
        *(m.PushHeader, m.PushReply, m.FetchRequest, m.FetchHeader),
    ]
    for message in carried:
        name = message.__name__
        fields = {renamed.get(name, {}).get(f.name, f.name) for f in dataclasses.fields(message)}
        assert fields == set(getattr(pb, name).DESCRIPTOR.fields_by_name), name
