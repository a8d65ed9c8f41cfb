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
    INNER_PIECES_MAX,
    LEARNER_CHARS_MAX,
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
learner_ids = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=64)
secrets = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=64)
texts = st.text(printable, max_size=50)
bases = st.lists(versions, max_size=5).map(tuple)
slots = st.integers(0, m.INNER_SLOTS_MAX - 1)
leases = st.builds(m.Lease, chunk=counts, start=counts)


def tuples(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=4).map(tuple)


tensors = st.builds(
    m.TensorSpec, name=ids, shape=tuples(st.integers(1, COUNT_MAX)), dtype=ids, merge=st.sampled_from(["rda", "mean"])
)
discards = st.builds(m.DiscardCount, fragment=fragments, cause=st.sampled_from(list(m.Discard)), tokens=counts)
configs = st.builds(SyncConfig, sync_every=st.integers(1, 1000), outer_lr=st.floats(0, 100), quorum=st.just("50%"))


def push_headers(kind: m.PushKind, **narrower: Any) -> st.SearchStrategy[m.PushHeader]:
    values = {
        "learner": learner_ids,
        "generation": counts,
        "fragment": fragments,
        "round": counts,
        "attempt": counts,
        "seq": counts,
        "base_version": versions,
        "steps": counts,
        "tokens": counts,
        "codec": ids,
        "size": st.integers(0, PUSH_BYTES_MAX),
        "checksum": checksums,
        "secret": secrets,
    }
    return st.builds(m.PushHeader, kind=st.just(kind), **{**values, **narrower})


@st.composite
def inner_headers(draw: st.DrawFn) -> m.PushHeader:
    pieces = draw(st.integers(1, INNER_PIECES_MAX))
    size = draw(st.integers(1, m.INNER_PIECE_BYTES))
    header = push_headers(
        m.PushKind.INNER,
        fragment=slots,
        seq=st.integers(0, pieces - 1),
        steps=st.just(pieces),
        tokens=st.integers(size, pieces * m.INNER_PIECE_BYTES),
        codec=st.just("inner"),
        size=st.just(size),
    )
    return draw(header)


contribution_headers = push_headers(m.PushKind.CONTRIBUTION)
all_push_headers = st.one_of(
    contribution_headers,
    push_headers(m.PushKind.SEED),
    push_headers(m.PushKind.HEAL, base_version=counts),
    inner_headers(),
)
push_replies = st.one_of(
    st.builds(m.PushReply, accepted=st.just(True), late=st.booleans(), detail=texts),
    st.builds(m.PushReply, accepted=st.just(False), code=ids, detail=texts),
)
payloads = st.binary(max_size=40)


@st.composite
def hellos(draw: st.DrawFn) -> m.Hello:
    held = draw(bases)
    proofs = st.just(()) | st.lists(checksums, min_size=len(held), max_size=len(held)).map(tuple)
    hello = st.builds(
        m.Hello,
        learner=learner_ids,
        instance=ids,
        protocol=st.integers(0, 2**32 - 1),
        tensors=tuples(tensors),
        generation=counts,
        run=st.just("") | ids,
        bases=st.just(held),
        outstanding=tuples(st.builds(m.Outstanding, fragment=fragments, seq=counts)),
        epoch=counts,
        checksums=proofs,
        wants_inner=st.booleans(),
        frozen=checksums,
        fingerprint=st.just("") | ids,
    )
    return draw(hello)


@st.composite
def inner_offers(draw: st.DrawFn) -> m.InnerOffer:
    pieces = draw(st.integers(0, INNER_PIECES_MAX))
    size = st.integers(pieces, pieces * m.INNER_PIECE_BYTES)
    offer = st.builds(m.InnerOffer, slot=slots, pieces=st.just(pieces), size=size, peer=st.just("") | ids, reason=texts)
    return draw(offer)


learner_messages = st.one_of(
    hellos(),
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
        pending=tuples(counts),
    ),
    st.builds(m.Nothing, round=counts, fragment=fragments),
    st.builds(m.Leave, reason=texts),
    st.builds(m.InlinePush, header=contribution_headers, payload=payloads),
    st.builds(
        m.DataReport,
        stream=ids,
        serial=counts,
        chunks=counts,
        want=st.integers(0, m.CHUNKS_MAX),
        done=tuples(counts),
        holding=tuples(counts),
        returned=tuples(leases),
    ),
)
syncer_messages = st.one_of(
    st.builds(
        m.Welcome,
        run=ids,
        epoch=counts,
        generation=counts,
        config=configs,
        fingerprint=ids,
        seed=st.booleans(),
        protocol=st.integers(1, 2**32 - 1),
        secret=secrets,
    ),
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
        due_step=counts,
    ),
    st.builds(m.Fate, fragment=fragments, seq=counts, version=versions, reason=texts),
    st.builds(m.Reseed, reason=texts),
    st.builds(m.Stop, reason=texts),
    st.builds(m.InlineReply, fragment=fragments, seq=counts, reply=push_replies),
    st.builds(m.Heal, fragments=tuples(fragments)),
    st.builds(m.Donate, slot=slots, bases=bases),
    inner_offers(),
    st.builds(
        m.DataLeases,
        stream=ids,
        serial=counts,
        granted=tuples(leases),
        revoked=tuples(counts),
        exhausted=st.booleans(),
    ),
    st.builds(m.Serving, shards=st.just(("10.0.0.1:1", "b:2")), shard_of=tuples(st.integers(0, 1)).filter(bool)),
)
push_opens = st.builds(
    parts.PushOpen,
    header=all_push_headers,
    attempt_id=checksums,
    stripes=st.integers(1, STRIPES_MAX),
    part_bytes=st.integers(PART_BYTES_MIN, PART_BYTES_MAX),
)
replies = st.builds(m.PushReply, accepted=st.just(True), detail=texts, late=st.booleans()) | st.builds(
    m.PushReply, accepted=st.just(False), code=ids, detail=texts
)
fetch_requests = st.builds(
    m.FetchRequest,
    kind=st.sampled_from([m.FetchKind.UPDATE, m.FetchKind.THETA]),
    learner=learner_ids,
    generation=counts,
    fragment=fragments,
    version=versions,
    offset=counts,
    length=counts,
    secret=secrets,
) | st.builds(
    m.FetchRequest,
    kind=st.just(m.FetchKind.INNER),
    learner=learner_ids,
    generation=counts,
    fragment=slots,
    version=st.integers(0, INNER_PIECES_MAX - 1),
    offset=counts,
    length=counts,
    secret=secrets,
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
    "long learner id": (pb.LearnerMessage(hello=pb.Hello(learner="x" * (LEARNER_CHARS_MAX + 1))), "Hello.learner"),
    "a learner id that is not ASCII": (pb.LearnerMessage(hello=pb.Hello(learner="l\u0435arner")), "ASCII"),
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
    "negative pending": (pb.LearnerMessage(progress=pb.Progress(pending=[-1])), "Progress.pending"),
    "pending of too many": (
        pb.LearnerMessage(progress=pb.Progress(pending=[0] * (FRAGMENTS_MAX + 1))),
        "Progress.pending must have at most 4096 entries",
    ),
    "huge step": (pb.LearnerMessage(ready=pb.Ready(step=2**63 - 1)), "Ready.step"),
    "unknown cause": (
        pb.LearnerMessage(progress=pb.Progress(discarded=[pb.DiscardCount(cause="bored")])),
        "DiscardCount.cause",
    ),
    "too many bases": (pb.LearnerMessage(ready=pb.Ready(bases=[0] * (FRAGMENTS_MAX + 1))), "at most 4096 entries"),
    "unknown kind": (pb.LearnerMessage(), "unknown kind"),
    "negative epoch": (pb.LearnerMessage(hello=pb.Hello(learner="a", instance="i", epoch=-1)), "Hello.epoch"),
    "checksums of nothing": (
        pb.LearnerMessage(hello=pb.Hello(learner="a", instance="i", bases=[1, 2], checksums=[7])),
        "Hello.checksums must be empty or one for each of the 2 bases; got 1",
    ),
    "nameless stream": (pb.LearnerMessage(data_report=pb.DataReport()), "DataReport.stream"),
    "wants too much": (
        pb.LearnerMessage(data_report=pb.DataReport(stream="s", want=m.CHUNKS_MAX + 1)),
        "DataReport.want",
    ),
    "too many chunks": (
        pb.LearnerMessage(data_report=pb.DataReport(stream="s", done=[0] * (m.CHUNKS_MAX + 1))),
        "DataReport.done must have at most 10000 entries",
    ),
    "too many leases": (
        pb.LearnerMessage(data_report=pb.DataReport(stream="s", returned=[pb.Lease()] * (m.CHUNKS_MAX + 1))),
        "DataReport.returned must have at most 10000 entries",
    ),
    "negative chunk": (pb.LearnerMessage(data_report=pb.DataReport(stream="s", holding=[-1])), "DataReport.holding"),
    "negative start": (
        pb.LearnerMessage(data_report=pb.DataReport(stream="s", returned=[pb.Lease(chunk=1, start=-1)])),
        "Lease.start",
    ),
    "healing on control": (
        pb.LearnerMessage(
            contribution=pb.Contribution(header=pb.PushHeader(kind=pb.PUSH_HEAL, learner="a", codec="fp32"))
        ),
        "must travel over bulk",
    ),
}

BAD_FROM_SYNCER = {
    "slot out of bounds": (pb.SyncerMessage(donate=pb.Donate(slot=m.INNER_SLOTS_MAX)), "Donate.slot"),
    "negative slot": (pb.SyncerMessage(inner_offer=pb.InnerOffer(slot=-1)), "InnerOffer.slot"),
    "too many pieces": (pb.SyncerMessage(inner_offer=pb.InnerOffer(pieces=INNER_PIECES_MAX + 1)), "InnerOffer.pieces"),
    "pieces too large": (
        pb.SyncerMessage(inner_offer=pb.InnerOffer(pieces=2, size=2 * m.INNER_PIECE_BYTES + 1)),
        "InnerOffer.size",
    ),
    "bytes without pieces": (pb.SyncerMessage(inner_offer=pb.InnerOffer(size=1)), "InnerOffer.size"),
    "unprintable peer": (pb.SyncerMessage(inner_offer=pb.InnerOffer(peer="a\tb")), "InnerOffer.peer"),
    "no such fragment": (pb.SyncerMessage(heal=pb.Heal(fragments=[FRAGMENTS_MAX])), "Heal.fragments"),
    "too many fragments": (
        pb.SyncerMessage(heal=pb.Heal(fragments=[0] * (FRAGMENTS_MAX + 1))),
        "Heal.fragments must have at most",
    ),
    "too many grants": (
        pb.SyncerMessage(data_leases=pb.DataLeases(stream="s", granted=[pb.Lease()] * (m.CHUNKS_MAX + 1))),
        "DataLeases.granted must have at most",
    ),
    "negative revocation": (
        pb.SyncerMessage(data_leases=pb.DataLeases(stream="s", revoked=[-1])),
        "DataLeases.revoked",
    ),
    "no such shard": (pb.SyncerMessage(serving=pb.Serving(shards=["a:1"], shard_of=[0, 1])), "Serving.shard_of"),
    "shards for nothing": (
        pb.SyncerMessage(serving=pb.Serving(shards=["a:1"])),
        "Serving.shard_of must say of every fragment",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_values_out_of_bounds_are_named(bad: str) -> None:
    message, expected = BAD[bad]
    with pytest.raises(RemoteProtocolError, match=expected):
        parse_learner_message(message.SerializeToString())


@pytest.mark.parametrize("bad", BAD_FROM_SYNCER)
def test_values_out_of_bounds_from_a_syncer_are_named(bad: str) -> None:
    message, expected = BAD_FROM_SYNCER[bad]
    with pytest.raises(RemoteProtocolError, match=expected):
        parse_syncer_message(message.SerializeToString())


INNER = {
    "kind": pb.PUSH_INNER,
    "learner": "a",
    "codec": "inner",
    "fragment": m.INNER_SLOTS_MAX - 1,
    "steps": 3,
    "seq": 2,
    "size": m.INNER_PIECE_BYTES,
    "tokens": 3 * m.INNER_PIECE_BYTES,
}
BAD_HEADERS = {
    "slot": ({**INNER, "fragment": m.INNER_SLOTS_MAX}, "inner slot"),
    "empty piece": ({**INNER, "size": 0}, "size of a piece"),
    "large piece": ({**INNER, "size": m.INNER_PIECE_BYTES + 1}, "size of a piece"),
    "piece after the last": ({**INNER, "seq": 3}, r"seq \(piece\)"),
    "no pieces": ({**INNER, "steps": 0, "seq": 0}, "pieces"),
    "too many pieces": ({**INNER, "steps": INNER_PIECES_MAX + 1}, "pieces"),
    "whole larger than its pieces": ({**INNER, "tokens": 3 * m.INNER_PIECE_BYTES + 1}, "size of the whole"),
    "whole smaller than a piece": ({**INNER, "tokens": 1}, "size of the whole"),
    "codec": ({**INNER, "codec": "fp32"}, "PushHeader.codec"),
    "heal of nothing": (
        {"kind": pb.PUSH_HEAL, "learner": "a", "codec": "fp32", "base_version": -1},
        "base_version of a healing push",
    ),
}


@pytest.mark.parametrize("bad", BAD_HEADERS)
def test_headers_out_of_bounds_are_named(bad: str) -> None:
    def parse(fields: dict[str, Any]) -> parts.PushOpen:
        opened = pb.PushOpen(header=pb.PushHeader(**fields), stripes=1, part_bytes=PART_BYTES_MIN)
        return parts.parse_push_open(memoryview(opened.SerializeToString()))

    assert parse(INNER).header.kind is m.PushKind.INNER
    fields, expected = BAD_HEADERS[bad]
    with pytest.raises(RemoteProtocolError, match=expected):
        parse(fields)


@pytest.mark.parametrize("fields", [{"fragment": m.INNER_SLOTS_MAX}, {"version": -1}, {"version": INNER_PIECES_MAX}])
def test_fetches_of_inner_state_are_bounded(fields: dict[str, int]) -> None:
    request = pb.FetchRequest(kind=pb.FETCH_INNER, learner="a")
    assert parts.parse_fetch_request(request.SerializeToString()).kind is m.FetchKind.INNER
    request = pb.FetchRequest(kind=pb.FETCH_INNER, learner="a", **fields)
    with pytest.raises(RemoteProtocolError, match=r"inner slot|piece"):
        parts.parse_fetch_request(request.SerializeToString())


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
    names = {"InlinePush": "Contribution", "InlineReply": "Received"}
    renamed = {"Welcome": {"config": "config_json", "rank": "rank_plus_one"}}
    carried = [
        *get_args(m.LearnerMessage),
        *get_args(m.SyncerMessage),
        *(m.TensorSpec, m.Outstanding, m.DiscardCount, m.FragmentState, m.Lease),
        *(m.PushHeader, m.PushReply, m.FetchRequest, m.FetchHeader),
    ]
    for message in carried:
        name = message.__name__
        fields = {renamed.get(name, {}).get(f.name, f.name) for f in dataclasses.fields(message)}
        assert fields == set(getattr(pb, names.get(name, name)).DESCRIPTOR.fields_by_name), name
