"""Which protocol knows what, and how to speak an older one.

Protocol 1 is the one of the first release; `SINCE` and the functions below name everything that came later. A session
speaks what its Welcome says, and nothing that is newer goes out through it. Bulk calls have no session: the kinds that
protocol 2 added are only ever asked for by its messages (Heal, Donate, InnerOffer), and the secret of protocol 3 comes
with its Welcome.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from atoll.core import messages as m
from atoll.errors import RefusedError

SINCE: Mapping[type, int] = {m.DataReport: 2, m.Heal: 2, m.Donate: 2, m.InnerOffer: 2, m.DataLeases: 2, m.Serving: 3}
"""The protocol that added a message; those that are not here were in protocol 1."""

SETTINGS_1 = frozenset(
    {
        *("sync_every", "fragments", "overlap", "quorum", "learners_expected", "grace_cap_steps", "grace_gamma"),
        *("weights", "age_discount", "merge", "outer_lr", "outer_momentum", "codec_up", "codec_down", "adopt"),
        *("carry_versions_max", "ring_versions", "norm_outlier_factor", "quorum_timeout_ns", "lease_ns"),
        *("lost_after_ns", "tokens_budget"),
    }
)
"""The settings of protocol 1, whose learners refuse a Welcome with any other."""
SYNCERS_OWN = frozenset(
    {
        *("partial", "pacing", "outer", "sizes", "share_max", "robust"),
        *("adaptive", "period_min", "period_max", "codec_ladder"),
    }
)
"""Settings that say nothing to any learner, and that those who came before them would refuse."""
MERGES_1 = frozenset({"rda", "mean"})
"""How contributions are merged says nothing to a learner either; the first release knows these ways of it."""

CAUSES_1 = frozenset(
    {
        *(m.Discard.OVERWRITTEN, m.Discard.LOST, m.Discard.STALE),
        *(m.Discard.QUARANTINED, m.Discard.EARLIER_RUN, m.Discard.REFUSED),
    }
)
"""The causes of protocol 1, whose syncer refuses any other. The rest is told to it as EARLIER_RUN: such tokens were
accounted for by a syncer before it."""


def since(message: m.LearnerMessage | m.SyncerMessage) -> int:
    """The oldest protocol in which this message may be sent."""
    return SINCE.get(type(message), 1)


def hello_in(hello: m.Hello, protocol: int) -> m.Hello:
    """The same greeting in this protocol: what that one does not know is left out, and so is the list of tensors where
    their fingerprint stands for it."""
    if protocol >= 3:
        return replace(hello, protocol=protocol, tensors=() if hello.fingerprint else hello.tensors)
    if protocol < 2:
        hello = replace(hello, epoch=0, checksums=(), wants_inner=False, frozen=0, codecs=())
    return replace(hello, protocol=protocol, fingerprint="", shards=False, any_update=False, moves=False)


def learner_message_in(message: m.LearnerMessage, protocol: int) -> m.LearnerMessage:
    """A message of a learner without what the session's protocol does not know of it."""
    if protocol > 1 or not isinstance(message, m.Progress):
        return message
    tokens: Counter[tuple[int, str]] = Counter()
    for count in message.discarded:
        cause = count.cause if count.cause in CAUSES_1 else m.Discard.EARLIER_RUN
        tokens[count.fragment, cause] += count.tokens
    discarded = tuple(m.DiscardCount(fragment, cause, total) for (fragment, cause), total in tokens.items())
    return replace(message, discarded=discarded, pending=())


def may_speak_older(refusal: RefusedError, protocol: int) -> bool:
    """True if the syncer refused the protocol of a Hello and we speak an older one as well."""
    return refusal.code == m.Refusal.PROTOCOL and protocol > m.PROTOCOL_OLDEST


def settings_in(settings: Mapping[str, Any], protocol: int) -> dict[str, Any]:
    """The run's settings as far as a protocol knows them. What is left out has no meaning to its learners."""
    known = {name: value for name, value in settings.items() if name not in SYNCERS_OWN}
    if known.get("merge") not in MERGES_1:
        known.pop("merge", None)
    return {name: value for name, value in known.items() if protocol > 1 or name in SETTINGS_1}


def build_version() -> str:
    """This build's, as it was installed; a checkout that was only put on the path has none."""
    try:
        return version("atoll")
    except PackageNotFoundError:
        return "unknown"
