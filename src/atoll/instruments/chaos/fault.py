"""One fault, as data that checks itself against the table of kinds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.instruments.chaos.kinds import DIRECTIONS, GUEST_PREFIX, KINDS, SYNCER, Kind, role_of

TARGET_CHARS_MAX = 200
"""As long as any learner id that a person would read in a plan."""
OF_RANKS = f"use one of {', '.join(name for name, kind in KINDS.items() if kind.of_ranks)}, or leave the rank out"
SECONDS_MAX = 366 * 86_400.0
"""No run that a plan is written for is longer than a year."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It begins at `at_s` seconds of the run or at `at_progress`, a share of its tokens: one of the two."""

    kind: str
    """A name in KINDS."""
    target: str
    """Id of the learner that it hits, syncer, shard-N, relay-N or standby; for join the id of the learner that it adds
    (guest-N)."""
    at_s: float = -1.0
    """Seconds after the run's first progress at which it begins; -1 when `at_progress` says it."""
    lasts_s: float = 0.0
    """Seconds that it lasts; 0 for an instant, or when `until_progress` says it."""
    amount: float = 0.0
    """How strong it is, in the kind's unit; 0 for kinds without one."""
    direction: str = "both"
    """Which direction of the learner's link it hits: both, up or down."""
    variant: str = ""
    """Which form of its kind, for kinds that have several."""
    detail: str = ""
    """What a reader of the report should know about it."""
    at_progress: float = -1.0
    """Share of the run's tokens at which it begins, 0 to 1; -1 when `at_s` says it."""
    until_progress: float = 0.0
    """Share of the run's tokens at which it ends; 0 for an instant, or when `lasts_s` says it."""
    rank: int = -1
    """Which process of a learner of several it hits alone; -1: the learner, whatever it is made of."""

    def __post_init__(self) -> None:
        kind = KINDS.get(self.kind)
        if kind is None:
            raise ConfigError(f"fault must be one of {', '.join(KINDS)}; not {self.kind!r}")
        self._check_target(kind)
        self._check_begin()
        self._check_end(kind)
        self._check_amount(kind)
        if self.direction not in (DIRECTIONS if kind.directional else DIRECTIONS[:1]):
            allowed = ", ".join(DIRECTIONS) if kind.directional else "both (the default): it has no directions"
            raise self._wrong(f"direction {self.direction!r} is not possible; use {allowed}")
        if self.variant not in (kind.variants or ("",)):
            allowed = f"one of {', '.join(kind.variants)}" if kind.variants else "no variant"
            raise self._wrong(f"variant {self.variant!r} is not possible; use {allowed}")
        if self.rank != -1 and not (kind.of_ranks and role_of(self.target) == "learner" and self.rank >= 0):
            raise self._wrong(f"it cannot hit rank {self.rank}; ranks count from 0, and learners have them: {OF_RANKS}")

    @property
    def end_s(self) -> float:
        """When it is over, in seconds of the run; for an instant, its moment. Only for faults with `at_s`."""
        return self.at_s + self.lasts_s

    def label(self) -> str:
        """Kind, target and strength in a few words, for messages and tables."""
        kind = KINDS[self.kind]
        parts = [self.kind, self.target, f"rank {self.rank}" if self.rank >= 0 else "", self.variant]
        parts.append(f"{self.amount:g} {kind.amount_unit}" if kind.amount else "")
        parts.append(self.direction if kind.directional else "")
        return " ".join(part for part in parts if part)

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"fault {self.kind} on {self.target}: {what}")

    def _check_target(self, kind: Kind) -> None:
        if not (0 < len(self.target) <= TARGET_CHARS_MAX and self.target.isprintable()):
            raise self._wrong(f"a target has 1 to {TARGET_CHARS_MAX} printable characters; name a learner or {SYNCER}")
        if "guest" in kind.targets:
            if not re.fullmatch(rf"{GUEST_PREFIX}[0-9]{{1,6}}", self.target):
                raise self._wrong(f"the learner that joins must be called {GUEST_PREFIX}N, such as {GUEST_PREFIX}0")
        elif (role := role_of(self.target)) not in (SYNCER, "learner"):
            if role not in kind.parts:
                raise self._wrong(f"it cannot hit a {role}; what can is {_hitting(role)}")
        elif self.target == SYNCER and SYNCER not in kind.targets:
            if self.kind == "slow":
                raise ConfigError("the syncer takes no steps that could be slow; choose a learner, or the fault kill")
            raise self._wrong(f"it cannot hit the {SYNCER}; name a learner, such as learner-0")
        elif self.target != SYNCER and "learner" not in kind.targets:
            raise self._wrong(f"it can only hit the {SYNCER}; use {SYNCER} as its target")

    def _check_begin(self) -> None:
        if (self.at_s != -1.0 and self.at_progress != -1.0) or self.at_s == self.at_progress == -1.0:
            raise self._wrong(
                "give the moment it begins either in seconds (at_s) or as a share of the run (at_progress)"
            )
        if self.at_s != -1.0 and not 0.0 <= self.at_s <= SECONDS_MAX:
            raise self._wrong(f"at_s must be between 0 and {SECONDS_MAX:.0f}; not {self.at_s!r}")
        if self.at_progress != -1.0 and not 0.0 <= self.at_progress <= 1.0:
            raise ConfigError(f"fault {self.kind} must begin between 0 and 1 of the run; not {self.at_progress!r}")

    def _check_end(self, kind: Kind) -> None:
        if not kind.lasting:
            if self.lasts_s or self.until_progress:
                raise self._wrong("it is an instant; leave out how long it lasts")
            return
        if not 0.0 <= self.lasts_s <= SECONDS_MAX:
            raise self._wrong(f"lasts_s must be above 0 and at most {SECONDS_MAX:.0f}; not {self.lasts_s!r}")
        if self.until_progress and not (self.at_progress != -1.0 and self.at_progress < self.until_progress <= 1.0):
            raise self._wrong(f"until_progress must be above at_progress and at most 1; not {self.until_progress!r}")
        if (self.lasts_s > 0.0) == (self.until_progress > 0.0):
            raise self._wrong(
                "it lasts; give either its seconds (lasts_s) or the share at which it ends (until_progress)"
            )

    def _check_amount(self, kind: Kind) -> None:
        if kind.amount is None:
            if self.amount:
                raise self._wrong(f"it has no amount; leave out {self.amount!r}")
            return
        low, high = kind.amount_allowed
        if not (math.isfinite(self.amount) and low <= self.amount <= high):
            raise self._wrong(f"amount ({kind.amount_unit}) must be between {low:g} and {high:g}; not {self.amount!r}")


def _hitting(role: str) -> str:
    return ", ".join(name for name, kind in KINDS.items() if role in kind.parts)
