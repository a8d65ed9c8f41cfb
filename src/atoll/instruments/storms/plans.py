"""From the setting `chaos` to faults: a plan by name, or a TOML file of faults.

A run with a token budget takes the moments of a storm as shares of its tokens, because nobody knows how fast it will
be. Seconds count where a file of faults gives them, and where there is no budget.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from atoll.errors import ConfigError
from atoll.instruments.chaos import (
    CHAOS_PLANS,
    KINDS,
    STANDBY,
    STORM_MINUTES_MAX,
    SYNCER,
    Fault,
    StormPlan,
    chaos_plan,
    dump_plan,
    load_plan,
)
from atoll.launch import PLAN_SUFFIX, RunConfig, TrainConfig, plan_path
from atoll.observe import InjectedFault

CALM = "calm"
"""No faults, but every link goes through the proxy, as in a storm: what a storm is compared with."""
STEP_MS_GUESS = 150.0
"""What a step takes where nothing is known: the model `tiny`, four learners on two cores. It only decides how many
faults there are and how long they last."""
RATE_MBIT_MIN, RATE_MBIT_MAX = 0.1, 100_000.0
"""From a poor radio link to more than a pair of virtual interfaces carries."""
STORM_S_MIN = 60.0
"""A shorter run gets the faults of a minute: else there would be none."""


def check_settings(config: TrainConfig | RunConfig) -> None:
    """Refuse what cannot be carried out."""
    check_chaos(config.chaos, config.storm_minutes)
    if isinstance(config, RunConfig) and config.chaos == "demo":
        raise ConfigError("chaos demo is made for the model of `atoll train`; use --chaos storm")
    faults = planned_faults(config)
    _check_ranks(faults, config.ranks if isinstance(config, RunConfig) else 1)
    if isinstance(config, TrainConfig) and config.chaos != "none" and not config.synchronises:
        raise ConfigError(
            f"chaos {config.chaos} is for runs with a syncer: method {config.method} does not survive the loss of a "
            f"learner; use --chaos none, or --method decoupled or diloco"
        )
    if config.durability.durability == "none" and any(fault.target == SYNCER for fault in faults):
        raise ConfigError(
            f"chaos {config.chaos} kills the syncer or fills its disk, and with durability none its state would be "
            f"lost; use --durability commit or interval, or --chaos none"
        )
    if isinstance(config, TrainConfig):
        if config.namespaces and parts_of(config):
            raise ConfigError("namespaces are for learners and one syncer alone; leave shards, relays and standby away")
        check_links(config.chaos, namespaces=config.namespaces, rate_mbit=config.rate_mbit)


def _check_ranks(faults: Sequence[Fault], ranks: int) -> None:
    for fault in faults:
        if fault.rank >= ranks or (ranks == 1 and fault.rank >= 0):
            raise ConfigError(
                f"fault {fault.label()}: the learners of this run have {ranks} rank{'s' * (ranks > 1)} each; leave the "
                "rank out, or start more of them (atoll run --ranks)"
            )


def check_chaos(chaos: str, storm_minutes: float) -> None:
    """Refuse what is neither a name nor a file of faults."""
    if plan_path(chaos) is None and chaos not in (*CHAOS_PLANS, CALM):
        names = ", ".join((*CHAOS_PLANS, CALM))
        raise ConfigError(f"chaos must be one of {names}, or a {PLAN_SUFFIX} file of faults; not {chaos!r}")
    if not (math.isfinite(storm_minutes) and 0.0 < storm_minutes <= STORM_MINUTES_MAX):
        raise ConfigError(f"storm_minutes must be above 0 and at most {STORM_MINUTES_MAX:g}; not {storm_minutes!r}")


def check_links(chaos: str, *, namespaces: bool, rate_mbit: float) -> None:
    """Refuse links of a kind that the run would not have."""
    if namespaces and chaos in ("none", "demo"):
        raise ConfigError(f"namespaces are for runs whose links are touched, not for chaos {chaos}; use storm or calm")
    if rate_mbit and not namespaces:
        raise ConfigError("rate_mbit is the rate of links between network namespaces; give --namespaces as well")
    if rate_mbit and not RATE_MBIT_MIN <= rate_mbit <= RATE_MBIT_MAX:
        raise ConfigError(
            f"rate_mbit must be 0 (no limit) or from {RATE_MBIT_MIN:g} to {RATE_MBIT_MAX:g}; not {rate_mbit!r}"
        )


def planned_faults(config: TrainConfig | RunConfig) -> tuple[Fault, ...]:
    """What will go wrong in a run: at seconds since its first step or, where it has a budget and no file of faults says
    otherwise, at shares of its tokens."""
    seconds, learners, seed = plan_seconds(config), config.learners, config.chaos_seed
    if isinstance(config, TrainConfig) and plan_path(config.chaos) is None:
        return faults_by_share(config.chaos, learners=learners, seconds=seconds, seed=seed)
    if isinstance(config, TrainConfig) and not config.step_ms:
        seconds = config.storm_minutes * 60.0
    faults = faults_in_time(config.chaos, learners=learners, seconds=seconds, seed=seed, parts=parts_of(config))
    if isinstance(config, RunConfig) and config.ranks > 1 and plan_path(config.chaos) is None:
        return on_ranks(faults, config.ranks)
    return faults


def parts_of(config: TrainConfig | RunConfig) -> tuple[str, ...]:
    """What a plan may hit besides learners and syncer."""
    shards = config.shards if isinstance(config.shards, int) else 0
    named = [f"{part}-{n}" for part, count in (("shard", shards), ("relay", config.relays)) for n in range(count)]
    return (*named, *([STANDBY] if config.standby else []))


def on_ranks(faults: Sequence[Fault], ranks: int) -> tuple[Fault, ...]:
    """Of a drawn plan, where learners have several processes: every other kill and freeze hits one of them alone, and
    the ranks take turns."""
    found: list[Fault] = []
    hit = 0
    for fault in faults:
        if KINDS[fault.kind].of_ranks and fault.target != SYNCER:
            hit += 1
            fault = replace(fault, rank=hit // 2 % ranks) if hit % 2 == 0 else fault
        found.append(fault)
    return tuple(found)


def plan_seconds(config: TrainConfig | RunConfig) -> float:
    """How long the run, or the storm in it, is expected to take."""
    if isinstance(config, RunConfig):
        return config.storm_minutes * 60.0
    return config.steps * (config.step_ms or STEP_MS_GUESS) / 1000.0


def still_to_come(plan: Sequence[Fault], so_far: Sequence[InjectedFault]) -> list[Fault]:
    """What is left of a plan: a fault happens once in a run, however often it is resumed. Seconds of the plan are
    counted from the first step, so those that are over are taken off."""
    happened = Counter((one.fault, one.target) for one in so_far)
    over_s = max((one.t_s for one in so_far), default=0.0)
    left = []
    for fault in plan:
        if happened[fault.kind, fault.target] > 0:
            happened[fault.kind, fault.target] -= 1
        else:
            left.append(replace(fault, at_s=max(0.0, fault.at_s - over_s)) if fault.at_s >= 0.0 else fault)
    return left


def faults_in_time(
    chaos: str, *, learners: int, seconds: float, seed: int, parts: Sequence[str] = ()
) -> tuple[Fault, ...]:
    """The faults of a run of `seconds`, at seconds since its first step."""
    path = plan_path(chaos)
    if path is not None:
        return load_plan(path, learners=learners, seconds=seconds, parts=parts).faults
    return () if chaos == CALM else chaos_plan(chaos, learners, seed=seed, minutes=seconds / 60.0)


def faults_by_share(chaos: str, *, learners: int, seconds: float, seed: int) -> tuple[Fault, ...]:
    """The faults of a run with a token budget, at shares of it. `seconds` is a guess of its length."""
    if chaos != "storm":
        return () if chaos == CALM else chaos_plan(chaos, learners)
    seconds = min(max(seconds, STORM_S_MIN), STORM_MINUTES_MAX * 60.0)
    return tuple(
        _by_share(fault, seconds) for fault in faults_in_time(chaos, learners=learners, seconds=seconds, seed=seed)
    )


def _by_share(fault: Fault, seconds: float) -> Fault:
    until = min(1.0, fault.end_s / seconds) if fault.lasts_s else 0.0
    return replace(fault, at_s=-1.0, lasts_s=0.0, at_progress=fault.at_s / seconds, until_progress=until)


def plan_text(faults: tuple[Fault, ...], *, seed: int, seconds: float) -> str:
    """The plan as TOML, for the run folder; shares of the tokens become shares of the time that was expected."""
    listed = [_in_time(fault, seconds) if fault.at_progress >= 0.0 else fault for fault in faults]
    return dump_plan(StormPlan(tuple(listed), seed))


def _in_time(fault: Fault, seconds: float) -> Fault:
    lasts_s = fault.lasts_s or max(0.0, fault.until_progress - fault.at_progress) * seconds
    return replace(fault, at_s=fault.at_progress * seconds, at_progress=-1.0, lasts_s=lasts_s, until_progress=0.0)
