"""The header and the reply of a push, to and from protobuf: used by bulk parts and by small pushes on control alike."""

from __future__ import annotations

from typing import Any

from atoll.core.messages import INNER_PIECE_BYTES, NO_VERSION, PushHeader, PushKind, PushReply
from atoll.errors import RemoteProtocolError
from atoll.wire import checks
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.limits import INNER_PIECES_MAX, PUSH_BYTES_MAX

INNER_CODEC = "inner"
"""What a piece of inner state is encoded as: opaque to everybody but learners."""

_KINDS = {
    pb.PUSH_CONTRIBUTION: PushKind.CONTRIBUTION,
    pb.PUSH_SEED: PushKind.SEED,
    pb.PUSH_HEAL: PushKind.HEAL,
    pb.PUSH_INNER: PushKind.INNER,
}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}


def push_header_message(header: PushHeader) -> Any:
    return pb.PushHeader(
        kind=_NUMBERS[header.kind],
        learner=header.learner,
        generation=header.generation,
        fragment=header.fragment,
        round=header.round,
        attempt=header.attempt,
        seq=header.seq,
        base_version=header.base_version,
        steps=header.steps,
        tokens=header.tokens,
        codec=header.codec,
        size=header.size,
        checksum=header.checksum,
    )


def check_push_header(header: Any) -> PushHeader:
    if header.kind not in _KINDS:
        raise RemoteProtocolError(f"PushHeader.kind {header.kind} is unknown; update the older side")
    checked = PushHeader(
        kind=_KINDS[header.kind],
        learner=checks.identifier("PushHeader.learner", header.learner),
        generation=checks.count("PushHeader.generation", header.generation),
        fragment=checks.fragment("PushHeader.fragment", header.fragment),
        round=checks.count("PushHeader.round", header.round),
        attempt=checks.count("PushHeader.attempt", header.attempt),
        seq=checks.count("PushHeader.seq", header.seq),
        base_version=checks.count("PushHeader.base_version", header.base_version, low=NO_VERSION),
        steps=checks.count("PushHeader.steps", header.steps),
        tokens=checks.count("PushHeader.tokens", header.tokens),
        codec=checks.identifier("PushHeader.codec", header.codec),
        size=checks.count("PushHeader.size", header.size, high=PUSH_BYTES_MAX),
        checksum=int(header.checksum),
    )
    if checked.kind is PushKind.INNER:
        _check_inner(checked)
    if checked.kind is PushKind.HEAL:
        checks.count("PushHeader.base_version of a healing push", checked.base_version)
    return checked


def _check_inner(header: PushHeader) -> None:
    """One piece of inner state, where several fields mean other things: see PushKind.INNER. The service has nothing to
    hold its size against, so the bound here is the one that counts."""
    checks.slot("PushHeader.fragment (relay slot)", header.fragment)
    checks.count("PushHeader.size of a piece", header.size, low=1, high=INNER_PIECE_BYTES)
    checks.count("PushHeader.steps (pieces)", header.steps, low=1, high=INNER_PIECES_MAX)
    checks.count("PushHeader.seq (piece)", header.seq, high=header.steps - 1)
    whole_max = header.steps * INNER_PIECE_BYTES
    checks.count("PushHeader.tokens (size of the whole)", header.tokens, low=header.size, high=whole_max)
    checks.choice("PushHeader.codec", header.codec, (INNER_CODEC,))


def push_reply_message(reply: PushReply) -> Any:
    return pb.PushReply(accepted=reply.accepted, code=reply.code, detail=checks.cut(reply.detail), late=reply.late)


def check_push_reply(reply: Any) -> PushReply:
    code = checks.optional_identifier("PushReply.code", reply.code)
    if reply.accepted == bool(code):
        raise RemoteProtocolError("PushReply must be either accepted or carry a code")
    return PushReply(bool(reply.accepted), code, checks.text("PushReply.detail", reply.detail), bool(reply.late))
