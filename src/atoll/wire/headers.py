"""The header and the reply of a push, from protobuf: used by bulk parts and by small pushes on control alike."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from atoll.core import INNER_CODEC, INNER_PIECE_BYTES, PushHeader, PushKind, PushReply
from atoll.errors import RemoteProtocolError
from atoll.wire import checks
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.limits import INNER_PIECES_MAX, PUSH_BYTES_MAX
from atoll.wire.records import free, record

_KINDS = {
    pb.PUSH_CONTRIBUTION: PushKind.CONTRIBUTION,
    pb.PUSH_SEED: PushKind.SEED,
    pb.PUSH_HEAL: PushKind.HEAL,
    pb.PUSH_INNER: PushKind.INNER,
}


def kind(kinds: dict[Any, Any], name: str, value: int) -> Any:
    if value not in kinds:
        raise RemoteProtocolError(f"{name} {value} is unknown; update the older side")
    return kinds[value]


_push_header = record(
    PushHeader,
    kind=partial(kind, _KINDS),
    learner=checks.learner_id,
    generation=checks.count,
    fragment=checks.fragment,
    round=checks.count,
    attempt=checks.count,
    seq=checks.count,
    base_version=checks.version,
    steps=checks.count,
    tokens=checks.count,
    codec=checks.identifier,
    size=partial(checks.count, high=PUSH_BYTES_MAX),
    checksum=free,
    secret=checks.secret,
)


def check_push_header(header: Any) -> PushHeader:
    checked = _push_header(header)
    if checked.kind is PushKind.INNER:
        _check_inner(checked)
    if checked.kind is PushKind.HEAL:
        checks.count("PushHeader.base_version of a healing push", checked.base_version)
    return checked


def read_push_header(values: Mapping[str, Any]) -> PushHeader:
    """The same from a JSON object, as relays and shards send it. Raises RemoteProtocolError."""
    try:
        kind = PushKind(str(values.get("kind", "")))
        message = pb.PushHeader(**{**values, "kind": f"PUSH_{kind.name}"})
    except (TypeError, ValueError, OverflowError) as error:
        raise RemoteProtocolError(f"this is no header of a push: {error}") from None
    return check_push_header(message)


def _check_inner(header: PushHeader) -> None:
    """One piece of inner state, where several fields mean other things: see InnerPiece. The service has nothing to
    hold its size against, so the bound here is the one that counts."""
    checks.slot("PushHeader.fragment (inner slot)", header.fragment)
    checks.count("PushHeader.size of a piece", header.size, low=1, high=INNER_PIECE_BYTES)
    checks.count("PushHeader.steps (pieces)", header.steps, low=1, high=INNER_PIECES_MAX)
    checks.count("PushHeader.seq (piece)", header.seq, high=header.steps - 1)
    whole_max = header.steps * INNER_PIECE_BYTES
    checks.count("PushHeader.tokens (size of the whole)", header.tokens, low=header.size, high=whole_max)
    checks.choice("PushHeader.codec", header.codec, (INNER_CODEC,))


_push_reply = record(PushReply, accepted=free, code=checks.optional_identifier, detail=checks.text, late=free)


def check_push_reply(reply: Any) -> PushReply:
    checked = _push_reply(reply)
    if checked.accepted == bool(checked.code):
        raise RemoteProtocolError("PushReply must be either accepted or carry a code")
    return checked
