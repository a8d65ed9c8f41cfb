"""What happens to a run: the same for every system."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

__all__ = ["DEVICE", "EQUAL_TOKENS", "QUICK", "SCENARIOS", "SEARCH", "Fault", "Scenario", "replace", "scaled"]
MBIT = 1e6
MEDIUM_MBIT = 4 * 10.8 * 32
"""The first parameters of four workers, over one link."""
EQUAL_TOKENS = "tokens"
"""Every learner makes as many steps, and the model's held-out loss is compared."""
SEARCH = "search"
"""The same, once for each of the outer settings that are tried, with a seed that is not compared."""


@dataclass(frozen=True)
class Fault:
    at_s: float
    what: str
    """kill, coordinator, partition, join, or rate (of every link, from then on)."""
    worker: int = -1
    back_s: float = 3.0
    """After so long it is started, or connected, again."""
    rate: float = 0.0


@dataclass(frozen=True)
class Scenario:
    what: str
    seconds: float = 20.0
    step_ms: float = 50.0
    factors: dict[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    rate: float = 0.0
    """Bits per second of every worker's link and the coordinator's; 0: no limit."""
    rates: dict[int, float] = field(default_factory=dict)
    delay_ms: float = 0.0
    shape: str = "tiny"
    batch: int = 8
    seq: int = 64
    """Tokens of a row."""
    device: str = "cpu"
    start_s_max: float = 90.0
    """Whoever has not begun by then will not: the first parameters of all must fit into it."""
    faults: tuple[Fault, ...] = ()

    @property
    def needs_links(self) -> bool:
        return bool(self.rate or self.rates or self.delay_ms or any(f.what == "partition" for f in self.faults))

    @property
    def workers_min(self) -> int:
        """As many must take part for this to be what it says."""
        touched = [*self.factors, *self.rates, *(fault.worker for fault in self.faults)]
        return max([1, *touched]) + 1


def _medium(rate: float, seconds: float) -> Scenario:
    """One row a step: four models of this size share two cores."""
    text = f"links of {rate:g} Mbit/s, 10.8M parameters, steps of 0.5 s"
    start_s_max = 90.0 + 2 * MEDIUM_MBIT / rate
    return Scenario(
        text, seconds=seconds, rate=rate * MBIT, shape="medium", step_ms=500, batch=1, start_s_max=start_s_max
    )


def _small(rate: float) -> Scenario:
    return Scenario(f"links of {rate:g} Mbit/s, 0.46M parameters", seconds=22, rate=rate * MBIT)


SCENARIOS = {
    "clean": Scenario("nothing happens"),
    "jitter": Scenario("steps vary by 30%", jitter=0.3),
    "slow": Scenario("one learner is 4x slower", seconds=22, factors={3: 4.0}),
    "generations": Scenario("two learners are 18% slower, all vary by 10%", factors={2: 1.18, 3: 1.18}, jitter=0.1),
    "kill": Scenario("a learner is killed, and started again after 3 s", faults=(Fault(3, "kill", 1),)),
    "kills": Scenario(
        "a learner is killed every 30 s",
        seconds=75,
        faults=(Fault(2, "kill", 1), Fault(32, "kill", 2), Fault(62, "kill", 3)),
    ),
    "coordinator": Scenario(
        "the coordinator is killed, and started again after 3 s", faults=(Fault(3, "coordinator"),)
    ),
    "partition": Scenario(
        "a learner is cut off for a minute", seconds=75, faults=(Fault(3, "partition", 1, back_s=60),)
    ),
    "join": Scenario("the fourth learner comes in the middle", faults=(Fault(3, "join", 3, back_s=0),)),
    "1gbit": _medium(1000, 30),
    "100mbit": _medium(100, 40),
    "20mbit": _medium(20, 60),
    "5mbit": _medium(5, 120),
    "1gbit-small": _small(1000),
    "100mbit-small": _small(100),
    "20mbit-small": _small(20),
    "5mbit-small": _small(5),
    "delay": Scenario("100 ms there and back between any two hosts", delay_ms=50.0),
    "thin": Scenario("one learner of four has 4 Mbit/s", seconds=22, rates={3: 4 * MBIT}),
    "changing": Scenario(
        "links of 50 Mbit/s, after a minute 2, after two 20",
        seconds=180,
        rate=50 * MBIT,
        faults=(Fault(60, "rate", rate=2 * MBIT), Fault(120, "rate", rate=20 * MBIT)),
    ),
    "all": Scenario(
        "two generations, jitter, 50 ms, 100 Mbit/s, one with 2 Mbit/s; a kill, a partition, the coordinator killed, "
        "the fourth learner late",
        seconds=65,
        factors={2: 1.18, 3: 1.18},
        jitter=0.1,
        rate=100 * MBIT,
        rates={3: 2 * MBIT},
        delay_ms=25.0,
        faults=(
            Fault(3, "join", 3, back_s=0),
            Fault(10, "kill", 1),
            Fault(24, "coordinator"),
            Fault(36, "partition", 2, back_s=15),
        ),
    ),
    "gpu": Scenario(
        "85M parameters, all learners on one GPU, as fast as it goes",
        step_ms=0,
        shape="large",
        batch=16,
        seq=256,
        device="cuda",
    ),
}
QUICK = ("clean", "slow", "kill", "coordinator", "thin")
"""Of `scripts/bakeoff --quick`."""
DEVICE = ("clean", "slow", "generations", "kill", "coordinator", "join", "20mbit-small", "thin")
"""Of `--short`: what fits into a quarter of an hour of 16 cores."""


def scaled(scenario: Scenario, seconds: float = 0.0, step_ms: float = 0.0, batch: int = 0) -> Scenario:
    """With another window, step time and batch where it has the usual ones; 0: as it is."""
    usual = Scenario("")
    wanted = {"seconds": seconds, "step_ms": step_ms, "batch": batch}
    keep = {"seconds"} if scenario.faults else set()
    return replace(
        scenario,
        **{k: v for k, v in wanted.items() if v and k not in keep and getattr(scenario, k) == getattr(usual, k)},
    )
