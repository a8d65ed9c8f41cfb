"""How fast the simulator is: machine events per second of one core, without arrays, and seeds per second.

    python benchmarks/sim.py

A machine event is one input that a SyncerMachine or LearnerMachine handles (a step, a message, a push, a wake-up); the
virtual network, disk and processes around them are part of the time. The runs have no faults: with faults most time is
spent the same way.
"""

from __future__ import annotations

import argparse
import time

from atoll.core import SyncConfig
from atoll.instruments.sim import LearnerSpec, Scenario, World, run_seed

WARM_UP_S = 10
SEEDS = 40


def events_per_second(learners: int, fragments: int, events: int) -> tuple[float, float]:
    """Events per second of CPU time, and simulated seconds per second."""
    config = SyncConfig(sync_every=24, fragments=fragments, learners_expected=learners, quorum="50%")
    specs = tuple(LearnerSpec(step_ns=200_000_000 + i * 1_000_003, jitter=0.1) for i in range(learners))
    world = World(Scenario(seed=1, config=config, learners=specs, arrays=False, inline=True))
    world.begin()
    world.clock.run(WARM_UP_S * 1_000_000_000)
    before, began_ns, began_s = world.events, world.now_ns, time.process_time()
    while world.events - before < events:
        world.clock.run(world.now_ns + 1_000_000_000)
    took_s = time.process_time() - began_s
    return (world.events - before) / took_s, (world.now_ns - began_ns) / 1e9 / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000, help="Machine events per row.")
    arguments = parser.parse_args()
    print("| learners | fragments | machine events/s | simulated s per s |\n|---|---|---|---|")
    for learners, fragments in ((4, 4), (16, 4), (16, 24), (256, 4)):
        rate, pace = events_per_second(learners, fragments, arguments.events)
        print(f"| {learners} | {fragments} | {rate:,.0f} | {pace:,.1f} |", flush=True)
    began_s = time.process_time()
    events = sum(run_seed(seed).events for seed in range(SEEDS))
    took_s = time.process_time() - began_s
    print(f"\n{SEEDS} drawn seeds (half with arrays): {SEEDS / took_s:.1f} seeds/s, {events / took_s:,.0f} events/s")


if __name__ == "__main__":
    main()
