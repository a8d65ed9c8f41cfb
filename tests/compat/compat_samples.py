"""One or more messages of every kind of protocol 1, and how to bring them to bytes and back.

This file runs under the current code and, as a script, under that of older protocols (see README.md): it may use only
what all have. As a script it takes messages that the current code encoded, as JSON on standard input, and says what it
makes of them and which bytes it would have sent itself.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from typing import Any, get_args

from atoll.core import messages as m
from atoll.core.config import SyncConfig
from atoll.wire import convert, parts

INLINE_PUSH = getattr(m, "InlinePush", None) or m.Contribution
INLINE_REPLY = getattr(m, "InlineReply", None) or m.Received
"""They had the contract's names in protocol 1."""
LARGE = 2**62
CHECKSUM = 2**64 - 1

HEADER = m.PushHeader(
    kind=m.PushKind.CONTRIBUTION,
    learner="island-7",
    generation=2,
    fragment=4095,
    round=LARGE,
    attempt=3,
    seq=12,
    base_version=41,
    steps=24,
    tokens=98_304,
    codec="int4",
    size=5,
    checksum=CHECKSUM,
)
SEED = m.PushHeader(m.PushKind.SEED, "a", 1, 0, 0, 0, 0, m.NO_VERSION, 0, 0, "fp32", 2**36, 7)
TENSORS = (m.TensorSpec("embed.weight", (256, 64), "bfloat16", "mean"), m.TensorSpec("scale", (), "float32"))
REFUSED = m.PushReply(False, m.Refusal.STALE_BASE, "5 versions old; adopt the published version first")
FIRST_DEFAULTS: dict[str, Any] = {
    "sync_every": 24,
    "merge": "rda",
    "outer_lr": 0.7,
    "outer_momentum": 0.5,
    "carry_versions_max": 4,
}
"""Of settings whose defaults have changed since."""
SEEDING: dict[str, Any] = {"sync_every": 7, "fragments": 3, "quorum": "all", "outer_lr": 1.0}
CAUSES = ("overwritten", "learner_lost", "stale", "quarantined", "earlier_run", "refused")

LEARNER = {
    "hello": m.Hello("island-7", "4f00c1", 1, TENSORS),
    "hello again": m.Hello("~a b~", "i", 1, TENSORS, 3, "run", (-1, 0, LARGE), (m.Outstanding(4095, 9),)),
    "ready": m.Ready(96, (-1, 5)),
    "progress": m.Progress(120, 24, 98_304, 10**9, 3.25, (5, 6), (m.DiscardCount(1, m.Discard.LOST, 77),)),
    "diverged": m.Progress(LARGE, LARGE, LARGE, LARGE, float("inf"), ()),
    "causes": m.Progress(1, 1, 1, 1, 0.0, (), tuple(m.DiscardCount(0, cause, 1) for cause in CAUSES)),
    "nothing": m.Nothing(9, 4095),
    "leave": m.Leave("finished"),
    "contribution": INLINE_PUSH(HEADER, b"\x00\x01\x02\xfe\xff"),
}
SYNCER = {
    "welcome": m.Welcome("run", 1, 2, SyncConfig(**FIRST_DEFAULTS), "ab" * 32, False),
    "seeding": m.Welcome("run", 4, 1, SyncConfig(**{**FIRST_DEFAULTS, **SEEDING}), "c", True),
    "refused": m.Refused(m.Refusal.LAYOUT, "it lacks tensor 'w'; start every learner with the same model"),
    "start": m.Start(96, (m.FragmentState(0, CHECKSUM), m.FragmentState(LARGE, 0)), (97, 99)),
    "upcoming": m.Upcoming((0, 4095)),
    "request": m.Request(9, 1, 3),
    "published": m.Published(3, 42, 9, CHECKSUM, 12, 4, 96, b"\xffupdate"),
    "published without me": m.Published(0, 1, 0, 0, -1, 1, 0),
    "fate": m.Fate(3, 12, 42, "merged"),
    "dropped": m.Fate(3, 13, -1, "stale"),
    "reseed": m.Reseed("not finite"),
    "stop": m.Stop("budget spent"),
    "received": INLINE_REPLY(3, 12, m.PushReply(True, late=True)),
    "received not": INLINE_REPLY(3, 13, REFUSED),
}
PUSH_OPENS = {
    "push of a contribution": parts.PushOpen(HEADER, CHECKSUM, 2, 2**20),
    "push of a seed": parts.PushOpen(SEED, 1, 16, 2**16),
}
PUSH_REPLIES = {"reply": m.PushReply(True), "reply late": m.PushReply(True, late=True), "reply no": REFUSED}
FETCH_REQUESTS = {
    "fetch of an update": m.FetchRequest(m.FetchKind.UPDATE, "island-7", 2, 3, 42, 2**20, 2**22),
    "fetch of a fragment": m.FetchRequest(m.FetchKind.THETA, "a", 1, 0, m.NO_VERSION),
}
FETCH_HEADERS = {"fetch header": m.FetchHeader(42, "int4", 2**36, CHECKSUM)}

KINDS = [
    (LEARNER, convert.encode_learner_message, convert.parse_learner_message),
    (SYNCER, convert.encode_syncer_message, convert.parse_syncer_message),
    (PUSH_OPENS, parts.encode_push_open, lambda data: parts.parse_push_open(memoryview(data))),
    (PUSH_REPLIES, parts.encode_push_reply, parts.parse_push_reply),
    (FETCH_REQUESTS, parts.encode_fetch_request, parts.parse_fetch_request),
    (FETCH_HEADERS, parts.encode_fetch_header, lambda data: parts.parse_fetch_header(memoryview(data))),
]
SAMPLES: dict[str, Any] = {name: message for samples, _, _ in KINDS for name, message in samples.items()}
ENCODERS = {name: encode for samples, encode, _ in KINDS for name in samples}
PARSERS = {name: parse for samples, _, parse in KINDS for name in samples}

PART = (2**20, b"some of the payload")


def encoded() -> dict[str, str]:
    """Every sample as bytes, in hexadecimal, and a part as it travels in a push or a fetch."""
    opening = parts.encode_push_open(PUSH_OPENS["push of a contribution"])
    bulk = {
        "part": parts.encode_part(PART[0], memoryview(PART[1])),
        "first": parts.encode_part(0, memoryview(b"x"), opening),
        "refused part": parts.encode_refused_part("unknown_version", "left the ring; fetch it whole"),
    }
    messages = {name: ENCODERS[name](message) for name, message in SAMPLES.items()}
    return {name: data.hex() for name, data in {**messages, **bulk}.items()}


def misread(given: dict[str, str]) -> list[str]:
    """The names of those that do not mean here what they meant there."""
    data = {name: bytes.fromhex(text) for name, text in given.items()}
    wrong = [name for name, message in SAMPLES.items() if PARSERS[name](data[name]) != message]
    part, first, refused = (parts.parse_part(data[name]) for name in ("part", "first", "refused part"))
    if (part.offset, bytes(part.data), part.opening) != (*PART, None):
        wrong.append("part")
    if parts.parse_push_open(first.opening) != PUSH_OPENS["push of a contribution"] or bytes(first.data) != b"x":
        wrong.append("first")
    if parts.parse_fetch_refused(refused.refused).code != "unknown_version":
        wrong.append("refused part")
    return wrong


def report(given: dict[str, str]) -> dict[str, Any]:
    sampled = {type(message).__name__ for message in SAMPLES.values()}
    kinds = {kind.__name__ for kind in (*get_args(m.LearnerMessage), *get_args(m.SyncerMessage))}
    return {
        "protocol": m.PROTOCOL_VERSION,
        "misread": misread(given),
        "encoded": encoded(),
        "kinds without a sample": sorted(kinds - sampled),
        "push kinds": sorted(m.PushKind),
        "fetch kinds": sorted(m.FetchKind),
        "settings": sorted(field.name for field in fields(SyncConfig)),
        "causes": sorted(m.Discard),
    }


if __name__ == "__main__":
    if "--record" in sys.argv:
        print(json.dumps(encoded(), indent=2, sort_keys=True))
    else:
        print(json.dumps(report(json.load(sys.stdin))))
