"""What happens to a run: the same for every system."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

__all__ = ["QUICK", "SCENARIOS", "Fault", "Scenario", "replace"]
MBIT = 1e6


@dataclass(frozen=True)
class Fault:
    at_s: float
    what: str
    """kill, coordinator, partition, or join."""
    worker: int = -1
    back_s: float = 5.0
    """After so long it is started, or connected, again."""


@dataclass(frozen=True)
class Scenario:
    what: str
    seconds: float = 30.0
    step_ms: float = 50.0
    factors: dict[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    rate: float = 0.0
    """Bits per second of every worker's link and the coordinator's; 0: no limit."""
    rates: dict[int, float] = field(default_factory=dict)
    delay_ms: float = 0.0
    shape: str = "tiny"
    faults: tuple[Fault, ...] = ()

    @property
    def needs_links(self) -> bool:
        return bool(self.rate or self.rates or self.delay_ms or any(f.what == "partition" for f in self.faults))


SCENARIOS = {
    "clean": Scenario("nothing happens"),
    "jitter": Scenario("steps vary by 30%", jitter=0.3),
    "slow": Scenario("one learner is 4x slower", factors={3: 4.0}),
    "generations": Scenario("two learners are 18% slower, all vary by 10%", factors={2: 1.18, 3: 1.18}, jitter=0.1),
    "kill": Scenario("a learner is killed, and started again after 5 s", seconds=40, faults=(Fault(8, "kill", 1),)),
    "kills": Scenario(
        "a learner is killed every 30 s",
        seconds=100,
        faults=(Fault(8, "kill", 1), Fault(38, "kill", 2), Fault(68, "kill", 3)),
    ),
    "coordinator": Scenario(
        "the coordinator is killed, and started again after 5 s", seconds=40, faults=(Fault(8, "coordinator"),)
    ),
    "partition": Scenario(
        "a learner is cut off for a minute", seconds=100, faults=(Fault(10, "partition", 1, back_s=60),)
    ),
    "join": Scenario("the fourth learner comes in the middle", seconds=40, faults=(Fault(12, "join", 3, back_s=0),)),
    "1gbit": Scenario("links of 1 Gbit/s, 10.8M parameters", rate=1000 * MBIT, shape="medium", step_ms=500),
    "100mbit": Scenario(
        "links of 100 Mbit/s, 10.8M parameters", seconds=60, rate=100 * MBIT, shape="medium", step_ms=500
    ),
    "20mbit": Scenario("links of 20 Mbit/s, 10.8M parameters", seconds=90, rate=20 * MBIT, shape="medium", step_ms=500),
    "5mbit": Scenario("links of 5 Mbit/s, 10.8M parameters", seconds=120, rate=5 * MBIT, shape="medium", step_ms=500),
    "delay": Scenario("100 ms between any two hosts", delay_ms=50.0),
    "thin": Scenario("one learner has 2 Mbit/s", rates={3: 2 * MBIT}, seconds=60),
    "all": Scenario(
        "two generations, jitter, 100 Mbit/s, a kill, the coordinator killed",
        seconds=100,
        factors={2: 1.18, 3: 1.18},
        jitter=0.1,
        rate=100 * MBIT,
        faults=(Fault(10, "kill", 1), Fault(40, "coordinator"), Fault(70, "kill", 2)),
    ),
}
QUICK = ("clean", "slow", "kill", "coordinator", "thin")
"""Of `scripts/bakeoff --quick`."""
