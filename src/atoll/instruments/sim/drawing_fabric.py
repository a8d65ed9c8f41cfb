"""From a scenario with one syncer to one with a fabric: a standby, shards, a relay, and what happens to them.

It came with draw 6 and has dice of its own: the learners, the settings and the faults of the smaller world stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from atoll.instruments.sim.scenario import Scenario, SimFault

FABRIC_CHANCE = 0.5
"""Of a run without a liar, that it has a fabric: a third of all seeds."""
TOPOLOGIES: tuple[Mapping[str, int | str], ...] = (
    {"standby": "folder"},
    {"standby": "replicate"},
    {"shards": 1},
    {"shards": 2},
    {"shards": 3},
    {"shards": 2, "standby": "folder"},
    {"relayed": 1},
    {"relayed": 2},
    {"relayed": 6},
    {"relayed": 2, "standby": "folder"},
    {"relayed": 3, "standby": "replicate"},
    {"relayed": 2, "shards": 2},
)
"""What is drawn, each as often as it is here."""
FAULTS_MAX = 6
HOST_KINDS = ("kill", "kill", "kill", "freeze", "freeze", "wipe", "power", "disk_full", "disk_slow")
RELAY_KINDS = ("kill", "kill", "freeze")
LINK_KINDS = ("partition", "partition", "partition", "stall", "cut", "delay", "corrupt", "lose")
AMOUNTS = {"delay": (20.0, 300.0), "corrupt": (1.0, 10.0), "lose": (0.01, 0.1), "disk_slow": (5.0, 50.0)}
CHANGES_CHANCE = 0.8
"""Of a run with shards, that somebody changes who has what (since draw 7)."""
CHANGES_MAX = 5
CHANGE_KINDS = ("move", "move", "move", "add", "add", "remove", "remove", "give-up")
MISHAP_CHANCE = 0.6
"""Of such a change, that one of those who have a part in it fails at about that time."""
SPLIT_CHANCE = 0.2
"""Of a run with a fabric, that its network falls in two for a while (since draw 7)."""
INSTANT = frozenset({"wipe", "power", "cut"})


def draw_fabric(dice: Random, scenario: Scenario) -> Scenario:
    shape = dice.choice(TOPOLOGIES)
    durability = scenario.durability
    if shape.get("standby"):
        durability = "commit" if shape["standby"] == "replicate" or durability == "none" else durability
    keys = scenario.keys and not shape.get("relayed")
    kept = tuple(
        fault
        for fault in scenario.faults
        if fault.kind != "takeover" and (keys or fault.kind != "revoke") and _is_promised(shape, fault)
    )
    after_s, merges = dice.choice([5.0, 15.0]), dice.random() < 0.8
    relayed = min(int(shape.get("relayed", 0)), len(scenario.learners))
    found = replace(
        scenario,
        **{**shape, "relayed": relayed},  # type: ignore[arg-type]
        durability=durability,
        keys=keys,
        arrays=True,
        standby_after_s=after_s,
        relay_merges=merges,
        faults=kept,
    )
    more = [_draw_fault(dice, found) for _ in range(dice.randint(1, FAULTS_MAX))]
    more = [fault for fault in more if _is_promised(shape, fault)]
    return replace(found, faults=tuple(sorted((*kept, *more), key=_order)))


def _order(fault: SimFault) -> tuple[float, str, str]:
    return fault.at_s, fault.kind, fault.target


def _is_promised(shape: Mapping[str, int | str], fault: SimFault) -> bool:
    """Two things are documented not to work (docs/howto/topologies.md). A primary that replicates and whose own disk
    fails goes on without its standby, so that there may be two histories of the run. And a coordinator that has lost
    its disk needs a snapshot, which this world does not have."""
    alone = shape.get("standby") == "replicate" and fault.kind == "disk_full"
    lost = bool(shape.get("shards")) and fault.kind == "wipe"
    return not ((alone and fault.target == "syncer") or (lost and fault.target in ("syncer", "standby")))


def _draw_fault(dice: Random, scenario: Scenario) -> SimFault:
    place = dice.choice(scenario.places)
    if dice.random() < 0.45:
        other = dice.choice([name for name in (*scenario.places, *scenario.names) if name != place])
        target = dice.choice([f"{place}~{other}", f"{place}~{other}", place])
        kind = dice.choice(LINK_KINDS)
    else:
        target, kind = place, dice.choice(RELAY_KINDS if place.startswith("relay") else HOST_KINDS)
    lasts_s = 0.0 if kind in INSTANT else round(dice.choice([1, 3, 10, 25, 45]) * dice.uniform(0.5, 1.5), 3)
    direction = dice.choice(["both", "both", "up", "down"]) if kind == "partition" else "both"
    at_s = round(dice.uniform(0.0, scenario.seconds), 3)
    return SimFault(kind, target, at_s, lasts_s, dice.choice(AMOUNTS.get(kind, (0.0,))), direction)


# ---------------------------------------------------------------- since draw 7, with dice of their own


def draw_changes(dice: Random, scenario: Scenario) -> Scenario:
    """Fragments that move, shards that come and go, and a network that falls in two."""
    if scenario.shards and dice.random() < CHANGES_CHANCE:
        scenario = _with_changes(dice, scenario)
    if dice.random() < SPLIT_CHANCE:
        scenario = _with_faults(scenario, _draw_split(dice, scenario))
    return scenario


def _with_faults(scenario: Scenario, more: Sequence[SimFault]) -> Scenario:
    promised = [fault for fault in more if _is_promised({"shards": scenario.shards}, fault)]
    return replace(scenario, faults=tuple(sorted((*scenario.faults, *promised), key=_order)))


def _with_changes(dice: Random, scenario: Scenario) -> Scenario:
    found = replace(
        scenario,
        spares=max(dice.choice([0, 1, 1, 2]), 2 - scenario.shards),
        lost_after_s=dice.choice([0.0, 0.0, 0.0, 5.0, 15.0]),
        follows=dice.random() < 0.8,
    )
    faults: list[SimFault] = []
    for _ in range(dice.randint(1, CHANGES_MAX)):
        faults += _draw_change(dice, found)
    return _with_faults(found, faults)


def _draw_change(dice: Random, scenario: Scenario) -> list[SimFault]:
    """Something that the operator asks for, and often a fault of somebody who has a part in it, at about that time."""
    shards = [name for name in scenario.places if name.startswith("shard-")]
    kind, at_s = dice.choice(CHANGE_KINDS), dice.uniform(0.0, 0.95) * scenario.seconds
    spares = shards[scenario.shards :]
    shard = dice.choice(spares if kind == "add" and spares and dice.random() < 0.9 else shards)
    moved = sorted(dice.sample(range(scenario.config.fragments), min(dice.randint(1, 3), scenario.config.fragments)))
    variant = ",".join(map(str, moved)) if kind == "move" else ""
    made = [SimFault(kind, shard, round(at_s, 3), variant=variant)]
    if kind == "give-up":  # only what is away can be
        before_s = round(max(0.0, at_s - dice.uniform(0.5, 3.0)), 3)
        made.append(SimFault("kill", shard, before_s, round(dice.uniform(5.0, 40.0), 3)))
    if dice.random() < MISHAP_CHANCE:
        made.append(_draw_mishap(dice, scenario, dice.choice(["syncer", shard, dice.choice(shards)]), at_s))
    return made


def _draw_mishap(dice: Random, scenario: Scenario, place: str, at_s: float) -> SimFault:
    begins_s = round(min(scenario.seconds, at_s + dice.choice([0.05, 0.5, 5.0]) * dice.random()), 3)
    kind = dice.choice(HOST_KINDS if dice.random() < 0.6 else LINK_KINDS)
    others = [name for name in scenario.places if name != place]
    target = f"{place}~{dice.choice(others)}" if kind in LINK_KINDS and dice.random() < 0.7 else place
    lasts_s = 0.0 if kind in INSTANT else round(dice.choice([1, 3, 10, 25]) * dice.uniform(0.5, 1.5), 3)
    return SimFault(kind, target, begins_s, lasts_s, dice.choice(AMOUNTS.get(kind, (0.0,))))


def _draw_split(dice: Random, scenario: Scenario) -> list[SimFault]:
    """Some of the parties are cut off from the others, all of them at once and for as long."""
    parties = [*scenario.places, *scenario.names]
    away = set(dice.sample(parties, dice.randint(1, len(parties) - 1)))
    at_s = round(dice.uniform(0.0, scenario.seconds), 3)
    lasts_s = round(dice.choice([3, 10, 25, 45]) * dice.uniform(0.5, 1.5), 3)
    pairs = [(one, other) for one in parties if one in away for other in parties if other not in away]
    return [
        SimFault("partition", f"{one}~{other}", at_s, lasts_s)
        for one, other in pairs
        if not (one in scenario.names and other in scenario.names)
    ]
