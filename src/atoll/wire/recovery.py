"""The messages that protocol 2 added, to and from protobuf: healing, inner state from a peer, data leases.

As in `convert`, whose tables lead here, encoding trusts our own objects and parsing trusts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from atoll.core import messages as m
from atoll.core.config import FRAGMENTS_MAX
from atoll.wire import checks
from atoll.wire.generated import atoll_pb2 as pb
from atoll.wire.limits import INNER_PIECES_MAX

# ---------------------------------------------------------------- data leases


def data_report_message(report: m.DataReport) -> Any:
    return pb.DataReport(
        stream=report.stream,
        serial=report.serial,
        chunks=report.chunks,
        want=report.want,
        done=report.done,
        holding=report.holding,
        returned=_lease_messages(report.returned),
    )


def parse_data_report(report: Any) -> m.DataReport:
    return m.DataReport(
        stream=checks.identifier("DataReport.stream", report.stream),
        serial=checks.count("DataReport.serial", report.serial),
        chunks=checks.count("DataReport.chunks", report.chunks),
        want=checks.count("DataReport.want", report.want, high=m.CHUNKS_MAX),
        done=_parse_chunks("DataReport.done", report.done),
        holding=_parse_chunks("DataReport.holding", report.holding),
        returned=_parse_leases("DataReport.returned", report.returned),
    )


def data_leases_message(leases: m.DataLeases) -> Any:
    return pb.DataLeases(
        stream=leases.stream,
        serial=leases.serial,
        granted=_lease_messages(leases.granted),
        revoked=leases.revoked,
        exhausted=leases.exhausted,
    )


def parse_data_leases(leases: Any) -> m.DataLeases:
    return m.DataLeases(
        stream=checks.identifier("DataLeases.stream", leases.stream),
        serial=checks.count("DataLeases.serial", leases.serial),
        granted=_parse_leases("DataLeases.granted", leases.granted),
        revoked=_parse_chunks("DataLeases.revoked", leases.revoked),
        exhausted=bool(leases.exhausted),
    )


def _lease_messages(leases: Iterable[m.Lease]) -> list[Any]:
    return [pb.Lease(chunk=lease.chunk, start=lease.start) for lease in leases]


def _parse_leases(name: str, leases: Sequence[Any]) -> tuple[m.Lease, ...]:
    checks.length(name, len(leases), m.CHUNKS_MAX)
    return tuple(
        m.Lease(chunk=checks.count("Lease.chunk", lease.chunk), start=checks.count("Lease.start", lease.start))
        for lease in leases
    )


def _parse_chunks(name: str, chunks: Sequence[int]) -> tuple[int, ...]:
    checks.length(name, len(chunks), m.CHUNKS_MAX)
    return tuple(checks.count(name, chunk) for chunk in chunks)


# ---------------------------------------------------------------- healing and inner state


def parse_heal(heal: Any) -> m.Heal:
    checks.length("Heal.fragments", len(heal.fragments), FRAGMENTS_MAX)
    return m.Heal(fragments=tuple(checks.fragment("Heal.fragments", fragment) for fragment in heal.fragments))


def parse_donate(donate: Any) -> m.Donate:
    return m.Donate(slot=checks.slot("Donate.slot", donate.slot), bases=checks.versions("Donate.bases", donate.bases))


def inner_offer_message(offer: m.InnerOffer) -> Any:
    return pb.InnerOffer(
        slot=offer.slot, pieces=offer.pieces, size=offer.size, peer=offer.peer, reason=checks.cut(offer.reason)
    )


def parse_inner_offer(offer: Any) -> m.InnerOffer:
    pieces = checks.count("InnerOffer.pieces", offer.pieces, high=INNER_PIECES_MAX)
    return m.InnerOffer(
        slot=checks.slot("InnerOffer.slot", offer.slot),
        pieces=pieces,
        size=checks.count("InnerOffer.size", offer.size, low=pieces, high=pieces * m.INNER_PIECE_BYTES),
        peer=checks.optional_identifier("InnerOffer.peer", offer.peer),
        reason=checks.text("InnerOffer.reason", offer.reason),
    )
