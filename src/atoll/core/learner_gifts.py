"""What a learner gives because the syncer asks for it: the run's first parameters, and versions that a syncer lost.

A syncer that asked for something waits for it and asks nobody else while the session lasts. So a push that broke is
tried again until then; what the next session needs, it asks for anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from atoll.core.effects import GiveHeal
from atoll.core.learner_host import LearnerDriverHost, LinkState, OutgoingPayload, Payload
from atoll.core.learner_machine import LearnerMachine
from atoll.core.learner_waits import RETRY_NS
from atoll.core.messages import HealedVersion, PushHeader, PushReply, Refusal, SeedPart

PUSH_AGAIN = (Refusal.BUSY, Refusal.CHECKSUM, Refusal.SECRET)
"""Refusals of something that the syncer asked for and still waits for: the bytes were damaged, it had no room, or they
were at a shard before the word of this session's secret."""


class LearnerGifts:
    """Both are whole fragments, and belong to no round."""

    def __init__(self, machine: LearnerMachine, host: LearnerDriverHost, link: LinkState) -> None:
        self._machine = machine
        self._host = host
        self._link = link
        self._seeding = False
        self._seed_wanted = False

    # ------------------------------------------------------------ the run's first parameters

    def seed(self, fragment: int = 0) -> None:
        """One fragment after the other."""
        if self._seeding:
            self._seed_wanted = True  # asked again, by a syncer that has forgotten what came: it begins anew
        elif fragment < len(self._machine.fragments):
            self._seeding = True
            self._host.read_seed(fragment, partial(self._push_seed, fragment))

    def _push_seed(self, fragment: int, made: OutgoingPayload) -> None:
        part = SeedPart(*self._who(), fragment, made.size, made.checksum, self._machine.secret)
        self._push(part.header(), made.payload, partial(self._seeded, fragment))

    def _seeded(self, fragment: int, reply: PushReply | None) -> None:
        self._seeding = False
        if self._seed_wanted:
            self._seed_wanted = False
            self.seed()
        elif reply is not None and reply.accepted:
            self.seed(fragment + 1)
        elif reply is not None and reply.code == Refusal.NOT_FINITE:
            self._host.fail(reply.code, reply.detail)
        # Otherwise the syncer asks again, or asks somebody else.

    # ------------------------------------------------------------ versions that a syncer lost

    def heal(self, effect: GiveHeal) -> None:
        self._heal(list(effect.versions))

    def _heal(self, versions: list[tuple[int, int]]) -> None:
        if versions:
            fragment, version = versions.pop(0)
            self._host.read_held(fragment, version, partial(self._push_held, versions, fragment, version))

    def _push_held(
        self, versions: list[tuple[int, int]], fragment: int, version: int, made: OutgoingPayload | None
    ) -> None:
        if made is None:
            self._heal(versions)  # no longer here
        else:
            healed = HealedVersion(*self._who(), fragment, version, made.size, made.checksum, self._machine.secret)
            self._push(healed.header(), made.payload, partial(self._healed, versions))

    def _healed(self, versions: list[tuple[int, int]], reply: PushReply | None) -> None:
        if reply is not None:  # else the link is gone: the next Hello says what this host holds
            self._heal(versions)

    # ------------------------------------------------------------ one push that the syncer waits for

    def _push(self, header: PushHeader, payload: Payload, done: Callable[[PushReply | None], None]) -> None:
        """Again and again while the session lasts; None once it is over."""
        session = self._link.session

        def attempt() -> None:
            if self._link.up and self._link.session == session:
                self._host.push(header, payload, answered)
            else:
                done(None)

        def answered(reply: PushReply | None) -> None:
            if reply is not None and reply.code not in PUSH_AGAIN:
                done(reply)
            else:
                self._host.later(RETRY_NS, attempt)

        attempt()

    def _who(self) -> tuple[str, int]:
        return self._machine.learner, self._machine.generation
