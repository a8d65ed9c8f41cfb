"""What a syncer tells whoever looks in (`atoll status`): one JSON-compatible document of its live state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from atoll.core import PROTOCOL_OLDEST, PROTOCOL_VERSION, Member, MemberState
from atoll.wire import build_version

if TYPE_CHECKING:
    from atoll.syncer.shell import SyncerShell

MEMBERS_SHOWN = 1000
"""Learners in one document: about 500 characters each, and a status is at most 1 MiB. Those that are gone come last."""
GONE = (MemberState.LOST, MemberState.LEFT)


def look_in(shell: SyncerShell) -> dict[str, Any]:
    machine, now_ns = shell.machine, time.monotonic_ns()
    versions = machine.versions
    members = sorted(machine.members.values(), key=lambda m: (m.state in GONE, m.learner))
    return {
        "run": machine.run,
        "build": {"version": build_version(), "protocols": [PROTOCOL_OLDEST, PROTOCOL_VERSION]},
        "epoch": machine.epoch,
        "uptime_s": round(shell.uptime_s, 1),
        "time_s": round(time.time(), 3),
        "expected": machine.config.learners_expected,
        "committed": machine.committed,
        "stopping": machine.stopping,
        "healing": machine.is_healing,
        "config": machine.config.to_dict(),
        "members": [_member(shell, member, versions, now_ns) for member in members[:MEMBERS_SHOWN]],
        "members_left_out": max(0, len(members) - MEMBERS_SHOWN),
        "versions": versions,
        "durability": shell.keeper.level,
        "degraded": shell.keeper.degraded,
        "standby": shell.keeper.replica.status() if shell.keeper.replica is not None else {},
        "relays": shell.platform.relays.status(),
        "recording": shell.keeper.recorder.status(),
        "recovered_from": machine.recovered_from,
        "waits": machine.waits or machine.stalled,
        "data": machine.data_status(),
        **shell.news.status(),
        **machine.stats(),
    }


def _member(shell: SyncerShell, m: Member, versions: list[int], now_ns: int) -> dict[str, Any]:
    return {
        "learner": m.learner,
        "generation": m.generation,
        "state": str(m.state),
        "aside": m.aside,
        "dismissed": m.dismissed,
        "heard_s": round(max(0, now_ns - m.heard_ns) / 1e9, 1),
        "from": shell.peer_of(m.session) if m.connected else "",
        "protocol": m.protocol,
        "step": m.step,
        "tokens": m.tokens,
        "step_ms": round(m.step_ns / 1e6, 3),
        "loss": m.loss if m.loss == m.loss else None,
        "behind": sum(max(0, version - b) for version, b in zip(versions, m.bases, strict=False)),
        "up_bytes_s": round(shell.flow_up.rate(m.learner)),
        "down_bytes_s": round(shell.flow_down.rate(m.learner)),
        "up_bytes": shell.flow_up.total(m.learner),
        "down_bytes": shell.flow_down.total(m.learner),
        "thin": shell.news.thin(m.learner),
    }
