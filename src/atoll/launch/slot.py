"""One learner's place in a run, through all its restarts."""

from __future__ import annotations

from atoll.launch.plan import RestartPolicy
from atoll.launch.process import Child, Command


class Slot:
    """What the supervisor knows of one learner."""

    def __init__(self, command: Command, *, guest: bool = False) -> None:
        self.command = command
        self.guest = guest
        """A chaos plan has added it to the run."""
        self.child: Child | None = None
        self.restarts = 0
        """In all."""
        self.row = 0
        """Since it last trained well for a while: what the pause and the limit go by."""
        self.early_deaths = 0
        self.restart_at_s: float | None = None
        self.ever_joined = False
        self.finished = False
        self.left = False
        self.given_up = False
        self.resting = False
        """A chaos plan has sent it away and will bring it back."""

    @property
    def over(self) -> bool:
        return self.finished or self.left or self.given_up

    def died(self, policy: RestartPolicy, *, joined: bool, lived_s: float) -> None:
        """Its process has ended with an error. One that joined and trained well for a while begins anew: a machine that
        loses it once an hour is not a program that keeps crashing."""
        self.early_deaths = 0 if joined else self.early_deaths + 1
        if joined and lived_s >= policy.calm_s:
            self.row = 0

    def spent(self, policy: RestartPolicy) -> bool:
        """Whether it has died too often to be started again."""
        return self.row >= policy.restarts_max or self.early_deaths >= policy.early_deaths_max

    def pause_s(self, policy: RestartPolicy) -> float:
        """How long to wait before it is started again."""
        if self.early_deaths:
            return policy.early_delay_s
        return min(policy.delay_s_max, policy.delay_s * 2.0 ** min(self.row, 30))
