"""From one number to a scenario: the world, the settings, the faults.

`draw(seed)` is pure: the same seed gives the same scenario on every machine. Every third seed runs the settings that a
user gets who chooses none, and only its world and faults are drawn. The others draw each setting from `SETTINGS`.
`tests/sim/test_sim_drawing.py` fails for a setting, or a value of one, that none of the first thousand seeds draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from atoll.core import SECOND_NS, SyncConfig, fragments_for, parse_quorum
from atoll.instruments.chaos import KINDS, LIES
from atoll.instruments.sim.drawing_fabric import FABRIC_CHANCE, draw_changes, draw_fabric
from atoll.instruments.sim.ranges import whole
from atoll.instruments.sim.scenario import (
    CHANGES,
    LEARNERS_WITH_LIAR,
    SEED_MAX,
    SIM_KINDS,
    LearnerSpec,
    Scenario,
    SimFault,
)

DRAW_VERSION = 8
"""Raise it with every change of what a seed becomes, and with every new setting: "seed 4711" means a scenario only
together with this number. Reports say both, and a scenario that is kept is a file. 1 is all that came before it had a
number."""
DRAW_OLDEST = 3
"""The oldest that can still be drawn: what pages and kept scenarios name by its seed stays within reach."""
DEFAULTS_EVERY = 3
"""Seeds that this divides run the defaults."""
FAULTS_DRAWN_MAX = 12
LIAR_CHANCE = 0.5
"""That one of the learners lies, where the others outvote it (three learners or more): in a third of all seeds."""
ASKED_CHANCE = 0.2
"""Of a run without a liar, that the operator asks one learner to leave or, where there are keys, revokes one. It came
later (draw 5) and has dice of its own."""
LIES_DRAWN_MAX = 4
LIES_LAST_S = 100_000.0
"""Of lies that are told to the end."""
LARGE = 10**12
"""Parameters of a model that is divided into as many fragments as ever."""

SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "sync_every": (1, 2, 4, 6, 8, 12, 24),
    "fragments": (1, 2, 3, 4, 6, 8),
    "overlap": (0, 1, 2, 2, 2, 4),
    "quorum": ("1", "50%", "50%", "75%", "all"),
    "grace_cap_steps": (0.0, 1.0, 2.0),
    "grace_gamma": (0.8, 0.8, 0.0, 1.0),
    "weights": ("tokens2_per_step", "tokens", "uniform"),
    "age_discount": (1.0, 1.0, 1.0, 0.5, 0.0),
    "merge": ("half-rda", "half-rda", "rda", "mean"),
    "outer_lr": (0.7, 0.7, 0.4, 1.0),
    "outer_momentum": (0.3, 0.3, 0.0, 0.9),
    "codec_up": ("int4", "int4", "int4", "int2", "int8", "bf16", "fp32"),
    "codec_down": ("int4", "int4", "int4", "int2", "int8", "bf16", "fp32"),
    "adopt": ("rebase", "rebase", "rebase", "overwrite", "mix:0.5", "mix:1"),
    "carry_versions_max": (12, 12, 4, 1, 0),
    "ring_versions": (8, 8, 2, 1),
    "norm_outlier_factor": (10.0, 10.0, 5.0, 30.0),
    "quorum_timeout_ns": (5 * SECOND_NS, 20 * SECOND_NS, 60 * SECOND_NS, 120 * SECOND_NS),
    "lease_ns": (5 * SECOND_NS, 15 * SECOND_NS),
    "lost_after_ns": (10 * SECOND_NS, 60 * SECOND_NS),
    "feedback_up": (True,) * 7 + (False,),
    "feedback_down": (True,) * 7 + (False,),
    "correction": ("none",) * 5 + ("heloco",),
    "outer_schedule": ("constant", "linear", "cosine"),
    "momentum_restart": (0,) * 6 + (1, 3),
    "partial": ("scaled", "scaled", "scaled", "full"),
    "sizes": ("confirmed", "confirmed", "confirmed", "claimed"),
    "share_max": (1.0, 1.0, 1.0, 0.5),
    "robust": ("off", "cosine"),
}
"""What each setting is drawn from; a value that is there twice is drawn twice as often. The world decides about
learners_expected and tokens_budget."""
ADAPTIVE_CHANCE = 0.25
"""Of a seed that draws its settings, that some of what is sent is drawn from here as well. These came later and have
dice of their own, so that three of four seeds are what they were in draw 3."""
ADAPTIVE_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "adaptive": ("off", "network", "on", "learning"),
    "period_min": (4, 1),
    "period_max": (64, 24),
    "pacing": ("fixed", "warmup"),
    "codec_up": ("int4", "topk", "topk:10%:int4", "lowrank", "lowrank:1"),
    "codec_down": ("int4", "topk", "lowrank"),
}
SENT_CHANCE = 0.1
"""Likewise, of what came with draw 5; what belongs together is drawn together."""
SENT_SETTINGS: Sequence[Mapping[str, Any]] = (
    {"codec_up": "topk:10%"},
    {"codec_up": "topk:3%"},
    {"codec_down": "topk:10%"},
    {"codec_down": "topk:3%"},
    {"outer": "delayed"},
    {"outer": "rownorm"},
    {"adaptive": "network", "period_min": 1, "codec_up": "int4", "codec_ladder": "int4"},
    {"adaptive": "network", "period_min": 1, "codec_up": "int8", "codec_ladder": "int8,int4,int2"},
)
BUDGETS = (0.0,) * 9 + (0.5, 1.5, 1000.0)
"""A run's budget of tokens, as a share of what its learners process while faults begin. 0: none."""
AMOUNTS_DRAWN: Mapping[str, tuple[float, ...]] = {
    "slow": (2.0, 4.0, 10.0),
    "delay": (20.0, 300.0, 2000.0),
    "limit": (500.0, 5000.0, 50000.0),
    "corrupt": (1.0, 10.0, 30.0),
    "disk_slow": (5.0, 50.0),
    "lose": (0.01, 0.1, 0.3),
    "break": (0.1, 0.5, 0.9),
    "lie": (3.0, 1000.0, 2.0**60),
}
DIRECTED = ("partition", "delay", "limit", "corrupt")
"""Kinds of faults that may hit one direction only."""


def draw(seed: int, version: int = DRAW_VERSION) -> Scenario:
    """The scenario of this seed, in this version of drawing."""
    whole("seed", seed, 0, SEED_MAX)
    whole("draw", version, DRAW_OLDEST, DRAW_VERSION)
    dice = Random(f"scenario/{seed}/world")
    count = dice.choice([1, 2, 2, 3, 3, 3, 4, 4, 5, 6])
    pace_ns = dice.choice([50, 100, 200, 400, 800]) * 1_000_000
    learners = tuple(_draw_learner(dice, pace_ns) for _ in range(count))
    seconds = min(120.0, max(20.0, pace_ns * dice.choice([200, 400]) / 1e9))
    rules = Random(f"scenario/{seed}/settings")
    budget = _draw_budget(rules, learners, seconds)
    settings = _default_config if seed % DEFAULTS_EVERY == 0 else _draw_config
    later = Random(f"scenario/{seed}/adaptive")
    config, faults = settings(rules, count, budget), _draw_all_faults(Random(f"scenario/{seed}/faults"), count, seconds)
    if version >= 4 and seed % DEFAULTS_EVERY and later.random() < ADAPTIVE_CHANCE:
        config = _draw_adaptive(later, config)
    latest = Random(f"scenario/{seed}/sent")
    if version >= 5 and seed % DEFAULTS_EVERY and latest.random() < SENT_CHANCE:
        config = replace(config, **latest.choice(SENT_SETTINGS))
    if version >= 8 and config.robust == "cosine" and config.correction == "none":
        config = replace(config, robust=Random(f"scenario/{seed}/trimmed").choice(("cosine", "cosine", "trimmed")))
    tongue = Random(f"scenario/{seed}/lies")
    if count >= LEARNERS_WITH_LIAR and tongue.random() < LIAR_CHANCE:
        config, faults = _without_the_liar(config, count - 1), _with_lies(tongue, count, seconds, faults)
    steals = any(fault.kind == "lie" and LIES[fault.variant].steals for fault in faults)
    crowds = any(fault.variant == "crowd" for fault in faults)  # there is no key for ids that are made up
    keys = (tongue.random() < 0.5 and not crowds) or steals
    if version >= 5 and not any(fault.kind == "lie" for fault in faults):
        faults = _with_operator(Random(f"scenario/{seed}/operator"), count, seconds, faults, keys=keys)
    scenario = Scenario(
        seed=seed,
        draw=version,
        config=config,
        learners=learners,
        seconds=seconds,
        faults=faults,
        arrays=dice.random() < 0.5,
        inline=dice.random() < 0.5,
        inner=dice.random() < 0.5,
        keys=keys,
        durability=dice.choice(["commit"] * 8 + ["interval", "none"]),
        merge_ns=dice.choice([1, 5, 50]) * 1_000_000,
        sync_ns=dice.choice([1, 5, 50]) * 1_000_000,
        commit_ns=dice.choice([2, 20, 200]) * 1_000_000,
    )
    fabric = Random(f"scenario/{seed}/fabric")
    if version >= 6 and not scenario.liar and fabric.random() < FABRIC_CHANCE:
        scenario = draw_fabric(fabric, scenario)
        return draw_changes(Random(f"scenario/{seed}/changes"), scenario) if version >= 7 else scenario
    return scenario


def _draw_learner(dice: Random, pace_ns: int) -> LearnerSpec:
    slower = dice.choice([1.0, 1.0, 1.0, 1.3, 2.0, 5.0])
    return LearnerSpec(
        step_ns=int(pace_ns * slower),
        tokens=dice.randint(1, 64),
        jitter=dice.choice([0.0, 0.1, 0.5]),
        latency_ns=dice.choice([100_000, 1_000_000, 20_000_000, 150_000_000]),
        link_jitter_ns=dice.choice([0, 1_000_000, 50_000_000]),
        up_bits_per_s=dice.choice([0.0, 0.0, 1e9, 1e7, 1e6]),
        down_bits_per_s=dice.choice([0.0, 0.0, 1e9, 1e8, 1e7]),
        loss=dice.choice([0.0, 0.0, 0.001, 0.05]),
        encode_ns=dice.choice([100_000, 1_000_000, 30_000_000]),
    )


# ---------------------------------------------------------------- settings


def _default_config(dice: Random, learners: int, budget: int) -> SyncConfig:
    """What a user gets: the model's size says how many fragments, the launcher how many learners (if there is one)."""
    most = fragments_for(LARGE, SyncConfig().sync_every)
    fragments = dice.choice([1, most // 2, most, most])
    return SyncConfig(fragments=fragments, learners_expected=dice.choice([learners, learners, 1]), tokens_budget=budget)


def is_default(config: SyncConfig) -> bool:
    """Whether nobody chose anything: what is left follows from the model, the launcher and the run's length."""
    decided = {name: getattr(config, name) for name in ("fragments", "learners_expected", "tokens_budget")}
    return config == SyncConfig(**decided)


def _draw_config(dice: Random, learners: int, budget: int) -> SyncConfig:
    values = {name: dice.choice(choices) for name, choices in SETTINGS.items()}
    expected = dice.randint(1, learners)
    if values["overlap"] == 0:  # everybody waits for everybody, as a rule
        values["grace_cap_steps"] = 0.0
        values["quorum"] = "all" if dice.random() < 0.7 else values["quorum"]
    elif dice.random() < 0.2:
        values["quorum"] = str(expected)
    if not budget:
        values["outer_schedule"] = "constant"  # the others go by it
    return SyncConfig(**values, learners_expected=expected, tokens_budget=budget)


def _draw_adaptive(dice: Random, config: SyncConfig) -> SyncConfig:
    values = {name: dice.choice(choices) for name, choices in ADAPTIVE_SETTINGS.items()}
    return replace(config, **{**values, "period_min": min(values["period_min"], config.sync_every)})


def _draw_budget(dice: Random, learners: Sequence[LearnerSpec], seconds: float) -> int:
    """Some runs end by themselves: while faults begin, soon after the last one, or so late that they never do."""
    per_s = math.fsum(spec.tokens * 1e9 / spec.step_ns for spec in learners)
    return int(dice.choice(BUDGETS) * per_s * seconds)


# ---------------------------------------------------------------- faults


def _draw_all_faults(dice: Random, learners: int, seconds: float) -> tuple[SimFault, ...]:
    names = [f"learner-{index}" for index in range(learners)]
    faults = draw_sim_faults(dice, names, seconds, dice.randint(0, FAULTS_DRAWN_MAX))
    faults += (*_draw_mute(dice, names, seconds), *_draw_poison(dice, names, seconds))
    return tuple(sorted(faults, key=_fault_order))


def draw_sim_faults(dice: Random, names: list[str], seconds: float, count: int) -> tuple[SimFault, ...]:
    """Harsher than a storm on real processes: faults overlap at will, and everybody may be down at once."""
    apart = {"join", "mute", "lie", "dismiss", "revoke", *CHANGES}  # drawn with dice of their own
    kinds = [kind for kind in sorted(SIM_KINDS) if kind not in apart]
    kinds += ["kill", "kill", "kill", "cut"]
    faults = []
    for number in range(count):
        kind = dice.choice(kinds + ["join"] * (number < 3))
        target = dice.choice(names)
        if kind == "join":
            target = f"guest-{number}"
        elif SIM_KINDS[kind][0] == "syncer" or (kind in ("kill", "freeze") and dice.random() < 0.4):
            target = "syncer"
        lasts_s = round(dice.choice([1, 3, 10, 25, 45]) * dice.uniform(0.5, 1.5), 3) if SIM_KINDS[kind][1] else 0.0
        faults.append(
            SimFault(
                kind,
                target,
                round(dice.uniform(0.0, seconds), 3),
                lasts_s,
                dice.choice(AMOUNTS_DRAWN.get(kind, (0.0,))),
                dice.choice(["both", "up", "down"]) if kind in DIRECTED else "both",
                dice.choice(KINDS["poison"].variants) if kind == "poison" else "",
            )
        )
    return tuple(faults)


def _fault_order(fault: SimFault) -> tuple[float, str, str]:
    return fault.at_s, fault.kind, fault.target


def _draw_mute(dice: Random, names: list[str], seconds: float) -> list[SimFault]:
    """In a third of the runs somebody does not deliver for long: many periods, while everybody else goes on."""
    if len(names) < 2 or dice.random() > 1 / 3:
        return []
    at_s, lasts_s = dice.uniform(0.0, 0.3) * seconds, dice.uniform(0.3, 0.7) * seconds
    return [SimFault("mute", dice.choice(names), round(at_s, 3), round(lasts_s, 3))]


def _draw_poison(dice: Random, names: list[str], seconds: float) -> list[SimFault]:
    """In a third of the runs somebody sends nonsense where that is worst: first of all, when nobody knows yet how large
    contributions should be, or at the end, when everybody does."""
    if dice.random() > 1 / 3:
        return []
    at_s, lasts_s = dice.choice([0.0, dice.uniform(0.6, 0.9) * seconds]), dice.uniform(5.0, 30.0)
    variant = dice.choice(["huge", "huge", "nan"])
    return [SimFault("poison", dice.choice(names), round(at_s, 3), round(lasts_s, 3), variant=variant)]


def _with_operator(
    dice: Random, learners: int, seconds: float, faults: tuple[SimFault, ...], *, keys: bool
) -> tuple[SimFault, ...]:
    if dice.random() >= ASKED_CHANCE:
        return faults
    name, at_s = f"learner-{dice.randrange(learners)}", round(dice.uniform(0.1, 0.9) * seconds, 3)
    revoked = keys and dice.random() < 0.5
    asked = SimFault("dismiss", name, at_s, round(dice.uniform(3.0, 20.0), 3))
    return tuple(sorted((*faults, SimFault("revoke", name, at_s) if revoked else asked), key=_fault_order))


# ---------------------------------------------------------------- lies


def _without_the_liar(config: SyncConfig, honest: int) -> SyncConfig:
    """Where everybody's answer is asked for, whoever keeps silent stops the run: the run's own wish, not a lie's."""
    number, share = parse_quorum(config.quorum)
    return replace(config, quorum="50%") if share == 1.0 or number > honest else config


def _with_lies(dice: Random, learners: int, seconds: float, faults: tuple[SimFault, ...]) -> tuple[SimFault, ...]:
    """One learner tells a few lies, for a while or to the end. In half of the runs nothing else goes wrong, so that
    whatever the others lose they lose by the lies."""
    liar = f"learner-{dice.randrange(learners)}"
    calm = dice.random() < 0.5
    more: list[SimFault] = []
    for name in dice.sample(sorted(LIES), dice.randint(1, LIES_DRAWN_MAX)):
        at_s = round(dice.choice([0.0, dice.uniform(0.0, 0.8) * seconds]), 3)
        lasts_s = round(dice.choice([LIES_LAST_S, dice.uniform(0.2, 0.6) * seconds]), 3)
        more.append(SimFault("lie", liar, at_s, lasts_s, dice.choice(AMOUNTS_DRAWN["lie"]), variant=name))
        if LIES[name].restarts:
            kind = dice.choice(LIES[name].restarts.split())
            more.append(SimFault(kind, "syncer", round(at_s + dice.uniform(0.0, 0.2) * seconds, 3)))
    return tuple(sorted((*(() if calm else faults), *more), key=_fault_order))
