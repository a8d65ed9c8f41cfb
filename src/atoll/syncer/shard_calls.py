"""What a coordinator and its shards say to each other (the link itself is `wire.shard_peer`).

    coordinator -> shard
      attach         who leads; the shard says what it holds          lay_out      the model, and its fragments
      commit_seed    what was put as the seed is version 0            compare, merge, heal, store, keep_handed
      copy           every array of a fragment, for a snapshot        copy_theta   make a copy that can be fetched
      revoked        a learner's key has ended (notice)
      describe, read    a fragment that is to move: what there is of it, and its bytes, piece by piece
      receive, put, install    the same at the shard that it goes to; it is there when it is on that disk
      drop           a fragment is another's now                      adopt        fragments whose arrays learners bring
      sender         a learner's session has begun (notice)           forget       a contribution is not needed (notice)
    shard -> coordinator
      push_open      may these bytes come in?                         push_done    they are here, and were looked at
      theta          may the parameters be copied now?                fetched      somebody fetches (notice)
      relay_failed   a relay did not send what it holds (notice)

Where relays hold contributions, merge and keep_handed say with which of them, and the shard asks those (`relay_calls`).

Both sides run the same version of atoll, so that there is nothing here for older ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from atoll.core import ContributionId, ContributionRecord, PushHeader, PushReply, VersionToStore
from atoll.core import effects as fx
from atoll.wire import read_push_header

ATTACH, LAY_OUT, COMMIT_SEED = "attach", "lay_out", "commit_seed"
COMPARE, MERGE, HEAL, STORE, KEEP_HANDED = "compare", "merge", "heal", "store", "keep_handed"
COPY, COPY_THETA, SENDER, FORGET = "copy", "copy_theta", "sender", "forget"
REVOKED = "revoked"
DESCRIBE, READ, RECEIVE, PUT, INSTALL, DROP, ADOPT = "describe", "read", "receive", "put", "install", "drop", "adopt"
PUSH_OPEN, PUSH_DONE, THETA, FETCHED = "push_open", "push_done", "theta", "fetched"
RELAY_FAILED = "relay_failed"

LINK_VERSION = 3
"""Of what is said here. Both sides must have the same."""


def header_values(header: PushHeader) -> dict[str, Any]:
    return {**asdict(header), "kind": str(header.kind)}


def header_of(values: dict[str, Any]) -> PushHeader:
    """Checked as one from a learner is: it may be word for word a learner's. Raises RemoteProtocolError."""
    return read_push_header(values)


def reply_of(values: dict[str, Any]) -> PushReply:
    return PushReply(**values)


def id_values(identity: ContributionId) -> list[Any]:
    return [identity.learner, identity.generation, identity.fragment, identity.seq]


def id_of(values: list[Any]) -> ContributionId:
    learner, generation, fragment, seq = values
    return ContributionId(str(learner), int(generation), int(fragment), int(seq))


At = tuple[str, float] | None
"""Where a contribution is: at the relay of this name, which has said this norm; None: on the shard."""


def merge_values(merge: fx.Merge, at: Sequence[At]) -> dict[str, Any]:
    return {**asdict(merge), "contributions": [id_values(one) for one in merge.contributions], "at": list(at)}


def merge_of(values: dict[str, Any]) -> fx.Merge:
    named = {name: value for name, value in values.items() if name != "at"}
    contributions = tuple(id_of(one) for one in values["contributions"])
    return fx.Merge(**{**named, "contributions": contributions, "weights": tuple(values["weights"])})


def finished_values(done: fx.MergeFinished, bytes_up: int) -> dict[str, Any]:
    """`bytes_up` came from relays."""
    return {**asdict(done), "lost": [id_values(one) for one in done.lost], "bytes_up": bytes_up}


def finished_of(values: dict[str, Any]) -> tuple[fx.MergeFinished, int]:
    named = {name: value for name, value in values.items() if name != "bytes_up"}
    return fx.MergeFinished(**{**named, "lost": tuple(map(id_of, values["lost"]))}), int(values["bytes_up"])


def compare_values(compare: fx.Compare) -> dict[str, Any]:
    return {**asdict(compare), "contributions": [id_values(one) for one in compare.contributions]}


def compare_of(values: dict[str, Any]) -> fx.Compare:
    contributions = tuple(id_of(one) for one in values["contributions"])
    return fx.Compare(int(values["fragment"]), contributions, tuple(values["voices"]))


def store_of(values: dict[str, Any]) -> VersionToStore:
    return VersionToStore(**values)


def record_values(record: ContributionRecord) -> dict[str, Any]:
    return {**asdict(record), "id": id_values(record.id)}


def record_of(values: dict[str, Any]) -> ContributionRecord:
    return ContributionRecord(**{**values, "id": id_of(values["id"])})
