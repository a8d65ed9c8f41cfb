"""Whose key a call carries, and what that lets its owner do.

    role        may
    learner     be the learner of its own name: its session, pushes and fetches; ask itself to leave; see the status
    observer    see the status
    operator    see the status; ask any learner to leave; change shards, and lead them (the syncer's key
                towards them)

Without an identity (one token for everybody, or none) anybody may be anybody: who has the token is trusted that far.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from enum import StrEnum

from atoll.core.config import SECOND_NS
from atoll.core.messages import Refusal, Refused

SECRET_PROTOCOL = 3
"""The protocol whose sessions have a secret: nobody else can push or fetch in their name."""
NEW_IDS_AT_ONCE = 10_000
"""Learner ids without a key that may be new at once: as many as the wire has sessions, so that no fleet waits."""
NEW_IDS_PER_MINUTE = 600
"""How many more after that. A thousand learners that draw a new id whenever they are restarted, each every two minutes,
need 500; somebody who invents ids needs three hours to fill the books (MEMBERS_MAX)."""


class Role(StrEnum):
    LEARNER = "learner"
    OBSERVER = "observer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a key says of its owner. The operator wrote it down, so it is no claim."""

    name: str
    role: Role
    tokens_per_step: int = 0
    """What a step of this learner processes; 0: not declared."""


def check_learner(identity: Identity | None, learner: str) -> Refused | None:
    """None if the owner of this key may be this learner."""
    if identity is None or (identity.role is Role.LEARNER and identity.name == learner):
        return None
    if identity.role is not Role.LEARNER:
        detail = f"{identity.name!r} is the key of an {identity.role}, who neither trains nor reads parameters"
        return Refused(Refusal.NOT_ALLOWED, f"{detail}; use a key that was issued with --role learner")
    return Refused(
        Refusal.NOT_ALLOWED,
        f"the key of {identity.name!r} cannot be learner {learner!r}; set ATOLL_LEARNER={identity.name}, or use the "
        "key of that learner",
    )


def check_leave(identity: Identity | None, learner: str) -> Refused | None:
    """None if the owner of this key may ask this learner to leave."""
    if identity is None or identity.role is Role.OPERATOR or check_learner(identity, learner) is None:
        return None
    detail = f"the key of {identity.name!r} ({identity.role}) cannot ask learner {learner!r} to leave"
    return Refused(Refusal.NOT_ALLOWED, f"{detail}; use that learner's key, or one with --role operator")


def check_operator(identity: Identity | None, what: str) -> Refused | None:
    """None if the owner of this key may do what concerns the whole run."""
    if identity is None or identity.role is Role.OPERATOR:
        return None
    detail = f"the key of {identity.name!r} ({identity.role}) cannot {what}"
    return Refused(Refusal.NOT_ALLOWED, f"{detail}; use one with --role operator (--token-file)")


def check_coordinator(identity: Identity | None) -> Refused | None:
    """None if the owner of this key may tell a shard what to do."""
    if identity is None or identity.role is Role.OPERATOR:
        return None
    detail = f"the key of {identity.name!r} ({identity.role}) cannot lead a shard"
    return Refused(Refusal.NOT_ALLOWED, f"{detail}; give the syncer a key with --role operator (--token-file)")


def same_secret(given: str, known: str) -> bool:
    """In a time that says nothing about where they differ."""
    return hmac.compare_digest(given.encode(), known.encode())


class NewIds:
    """How many ids that nobody has seen may still come now: NEW_IDS_AT_ONCE, refilled by NEW_IDS_PER_MINUTE."""

    def __init__(self) -> None:
        self._left = float(NEW_IDS_AT_ONCE)
        self._since_ns = 0

    def count(self) -> None:
        """One has come."""
        self._left -= 1

    def check(self, now_ns: int) -> Refused | None:
        """None if one more may come."""
        more = (now_ns - self._since_ns) * NEW_IDS_PER_MINUTE / (60 * SECOND_NS)
        self._left, self._since_ns = min(NEW_IDS_AT_ONCE, self._left + more), now_ns
        if self._left >= 1:
            return None
        detail = f"more than {NEW_IDS_PER_MINUTE} new learner ids a minute; this one is taken in later"
        return Refused(Refusal.BUSY, f"{detail}. Learners that keep their id (ATOLL_LEARNER) need not wait")
