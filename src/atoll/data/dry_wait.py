"""What to do when there is nothing to read: wait a little, go over old chunks, or end."""

from __future__ import annotations

from atoll.data.lease_client import LeaseClient
from atoll.data.seam import LearnerLike
from atoll.errors import UnreachableError
from atoll.observe import events

FIRST_LEASE_S = 120.0
"""How long the very first lease may take: as long as joining may."""
DRY_GRACE_S = 2.0
"""Leases run out only when the link is down, or when chunks are so short that one round trip takes longer than what is
in hand. This much patience tells the two apart."""
LINGER_S_MAX = 30.0
"""At the end of the data a learner stays for two chunks' time, at most this long, in case others hand some back."""
SLICE_S = 0.05
"""A waiting loop looks up this often, so that Ctrl-C works and the run's end is noticed."""

WHEN_DRY = ("repeat", "wait")


class DryWait:
    """One per loader. `idle` is called whenever there is nothing to read."""

    def __init__(
        self, learner: LearnerLike, client: LeaseClient, when_dry: str, first_lease_s: float = FIRST_LEASE_S
    ) -> None:
        self._learner = learner
        self._client = client
        self._when_dry = when_dry
        self._first_lease_s = first_lease_s
        self._since_s: float | None = None
        self._answers = 0
        self._dry = False
        self._leased = 0
        self._repeated = 0

    def fed(self) -> None:
        """There was something to read."""
        self._since_s = None
        if self._dry and self._client.leased > self._leased:
            self._dry = False
            again = self._client.counts.repeated - self._repeated
            self._warn(f"data stream {self._client.stream!r} has leases again; {again} samples were repeated meanwhile")

    def idle(self) -> bool:
        """Wait a moment at most. False: the data is at its end."""
        client = self._client
        if client.over:
            return False
        client.nudge(now=True)
        outlook = client.outlook()
        if outlook == "ready":
            self.fed()
            return True
        if self._since_s is None:
            self._since_s, self._answers = client.clock(), client.answers
        waited_s = client.clock() - self._since_s
        if outlook == "exhausted":
            linger_s = min(LINGER_S_MAX, 2 * client.chunk_s)
            asked = client.answers > self._answers
            if waited_s >= linger_s + (0.0 if asked else DRY_GRACE_S):
                return False
        elif outlook == "new":
            if waited_s >= self._first_lease_s:
                raise UnreachableError(self._why_nothing_came())
        elif self._dry or waited_s >= DRY_GRACE_S:
            self._enter_drought()
            if self._when_dry == "repeat" and client.repeat_one():
                return True
        client.wait(SLICE_S)
        return True

    def _enter_drought(self) -> None:
        if self._dry:
            return
        self._dry, self._leased, self._repeated = True, self._client.leased, self._client.counts.repeated
        meanwhile = "going over its last chunks again" if self._when_dry == "repeat" else "waiting"
        self._warn(f"data stream {self._client.stream!r} ran out of leases and the syncer does not answer: {meanwhile}")

    def _warn(self, text: str) -> None:
        self._learner.events.emit(events.Warned(self._learner.learner_id, text))

    def _why_nothing_came(self) -> str:
        return (
            f"no lease of data stream {self._client.stream!r} came within {self._first_lease_s:g} s; see that the "
            "syncer is up and at least as new as this learner, or sample the data without atoll.data"
        )
