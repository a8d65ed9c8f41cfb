"""One learner's place in a run, through all its restarts."""

from __future__ import annotations

from atoll.launch.plan import RestartPolicy, pause_before
from atoll.launch.process import Child, Command
from atoll.launch.watch import StepsReached


class LearnerSlot:
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
        self.fruitless = 0
        """Failures in a row that got no further than earlier ones."""
        self._reached = StepsReached(-1, 0)
        self.kills_planned = 0
        """Deaths that the chaos plan has brought about."""
        self.restart_at_s: float | None = None
        self.ever_joined = False
        self.finished = False
        self.stayed_out = False
        """Its script ended, and well, without ever joining a run that went on."""
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

    def failed(self, reached: StepsReached) -> None:
        """One that had joined has failed there. It got further if it took steps, to a step of the run that none of its
        processes had reached, and if it did not fail after exactly as many steps as the last one: a script that fails
        when it saves its model at the end trains each time, and will fail each time."""
        before = self._reached
        further = reached.steps > 0 and reached.steps != before.steps and reached.step > before.step
        self.fruitless = 0 if further else self.fruitless + 1
        self._reached = StepsReached(reached.steps, max(reached.step, before.step))

    def spent(self, policy: RestartPolicy) -> bool:
        """Whether it has died too often to be started again."""
        early = self.early_deaths >= policy.early_deaths_max
        return early or self.row >= policy.restarts_max or self.fruitless >= policy.fruitless_max

    def pause_s(self, policy: RestartPolicy) -> float:
        """How long to wait before it is started again."""
        if self.early_deaths:
            return policy.early_delay_s
        return pause_before(self.row, policy.delay_s, policy.delay_s_max)
