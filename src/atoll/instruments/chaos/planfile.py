"""Plans of faults in TOML files: drawn from a seed, written by hand, or both.

seed = 7                            # of what is drawn
faults = 60                         # how many are drawn; without it 3 per minute, or none if the file lists faults
kinds = ["kill", "partition"]       # which are drawn; all when left out

[[fault]]
kind = "partition"
target = "learner-1"
at = "30%"                          # of the run's length; or "90s", "1.5m", or a number of seconds
lasts = "20s"
direction = "up"

[[fault]]
kind = "kill"
target = "learner-0"
rank = 1                            # one process of a learner that has several (kill, freeze)
at = "60s"
"""

from __future__ import annotations

import json
import math
import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core import meant
from atoll.errors import ConfigError
from atoll.instruments.chaos.draw import FAULTS_MAX, FAULTS_PER_MINUTE, draw_faults, learner_names, storm_down_max
from atoll.instruments.chaos.fault import SECONDS_MAX, Fault
from atoll.instruments.chaos.kinds import DRAWN_KINDS, KINDS, SYNCER

PLAN_BYTES_MAX = 4_000_000
"""Room for the most faults that a plan may have, at about 250 bytes each with comments."""
SEED_MAX = 2**64 - 1
NUMBER_MAX = 1e300
"""Beyond this a number in a file is not meant, and Python's own conversions fail."""
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

_PLAN_KEYS = ("seed", "faults", "kinds", "fault")
_FAULT_KEYS = ("kind", "target", "rank", "at", "lasts", "amount", "direction", "variant", "detail")
RANK_MAX = 2**20
"""More processes than any learner has."""


@dataclass(frozen=True, slots=True)
class StormPlan:
    """What goes wrong in one run, and where it came from."""

    faults: tuple[Fault, ...]
    """In order of their beginning, all with `at_s`."""
    seed: int = 0
    """What the drawn ones were drawn from."""


def load_plan(
    path: str | Path, *, learners: int | Sequence[str], seconds: float, parts: Sequence[str] = ()
) -> StormPlan:
    """Read a plan for a run of `seconds` with these learners (ids, or how many) and other parts (shard-0, relay-0,
    standby). Raises ConfigError that says where."""
    names = learner_names(learners) if isinstance(learners, int) else tuple(learners)
    values = _read(Path(path))
    try:
        _no_unknown(values, _PLAN_KEYS)
        listed = listed_faults(values.get("fault", []), names, seconds, parts)
        seed = _whole("seed", values.get("seed", 0), SEED_MAX)
        usual = 0 if "fault" in values else max(1, round(seconds / 60.0 * FAULTS_PER_MINUTE))
        count = _whole("faults", values.get("faults", usual), FAULTS_MAX - len(listed))
        drawn = draw_faults(
            random.Random(seed),
            learners=names,
            seconds=seconds,
            count=count,
            kinds=_kinds(values.get("kinds", list(DRAWN_KINDS))),
            down_max=storm_down_max(len(names)),
            among=listed,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return StormPlan(tuple(sorted((*listed, *drawn), key=lambda fault: (fault.at_s, fault.kind, fault.target))), seed)


def dump_plan(plan: StormPlan | Sequence[Fault]) -> str:
    """The plan as a TOML file (UTF-8) that lists each fault, so that a drawn plan can be kept and edited."""
    storm = plan if isinstance(plan, StormPlan) else StormPlan(tuple(plan))
    lines = [f"seed = {storm.seed}", "faults = 0  # nothing is drawn: every fault is listed"]
    for fault in storm.faults:
        if fault.at_s < 0.0:
            raise ConfigError(
                f"fault {fault.label()} begins at a share of the tokens; a plan file needs moments in time"
            )
        values: dict[str, str | float] = {"kind": fault.kind, "target": fault.target, "at": f"{fault.at_s!r}s"}
        values |= {"rank": fault.rank} if fault.rank >= 0 else {}
        values |= {"lasts": f"{fault.lasts_s!r}s"} if fault.lasts_s else {}
        values |= {"amount": fault.amount} if fault.amount else {}
        values |= {"direction": fault.direction} if KINDS[fault.kind].directional else {}
        values |= {"variant": fault.variant} if fault.variant else {}
        values |= {"detail": fault.detail} if fault.detail else {}
        lines += ["", "[[fault]]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: str | float) -> str:
    # JSON's escapes are TOML's too, except that TOML has no surrogate pairs (so characters stay as they are) and wants
    # DEL escaped as well.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(PLAN_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"the plan {path} cannot be read ({error.strerror}); name a TOML file of faults") from None
    if len(text) > PLAN_BYTES_MAX:
        raise ConfigError(
            f"{path}: a plan has at most {PLAN_BYTES_MAX} bytes; this file is no plan, or needs splitting"
        )
    try:
        return tomllib.loads(text.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a TOML file ({error}); see the documentation of atoll chaos storm") from None


def listed_faults(entries: Any, learners: Sequence[str], seconds: float, parts: Sequence[str] = ()) -> list[Fault]:
    """The faults of a file's [[fault]] tables, for a run of `seconds` with these learners and other parts."""
    if not isinstance(entries, list):
        raise ConfigError("a fault is a table of its own; begin each with [[fault]] in double brackets")
    if len(entries) > FAULTS_MAX:
        raise ConfigError(f"it lists {len(entries)} faults and a plan has at most {FAULTS_MAX}; split the run")
    faults: list[Fault] = []
    for number, entry in enumerate(entries, 1):
        try:
            fault = _fault(entry, learners, seconds, parts)
            _no_overlap(fault, faults)
        except ConfigError as error:
            raise ConfigError(f"[[fault]] number {number}: {error}") from None
        faults.append(fault)
    return faults


def _fault(entry: Any, learners: Sequence[str], seconds: float, parts: Sequence[str]) -> Fault:
    if not isinstance(entry, dict):
        raise ConfigError("a fault is a table of its own; begin each with [[fault]] in double brackets")
    _no_unknown(entry, _FAULT_KEYS)
    for key in ("kind", "target", "at"):
        if key not in entry:
            raise ConfigError(f"it has no {key}; add a line such as {key} = {_EXAMPLES[key]}")
    for key in ("kind", "target", "direction", "variant", "detail"):
        if not isinstance(entry.get(key, ""), str):
            raise ConfigError(f"{key} must be text in quotes; not {entry[key]!r}")
    amount = entry.get("amount", 0.0)
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not -NUMBER_MAX < amount < NUMBER_MAX:
        raise ConfigError(f"amount must be a number of usual size; not {str(amount)[:40]}")
    kind = KINDS.get(entry["kind"])
    if kind is not None and kind.lasting and "lasts" not in entry:
        raise ConfigError('a fault of this kind lasts; add a line such as lasts = "30s"')
    fault = Fault(
        kind=entry["kind"],
        target=entry["target"],
        at_s=seconds_of("at", entry["at"], seconds),
        lasts_s=seconds_of("lasts", entry["lasts"], seconds) if "lasts" in entry else 0.0,
        amount=float(amount),
        direction=entry.get("direction", "both"),
        variant=entry.get("variant", ""),
        detail=entry.get("detail", KINDS[entry["kind"]].doc if entry["kind"] in KINDS else ""),
        rank=_whole("rank", entry["rank"], RANK_MAX) if "rank" in entry else -1,
    )
    if fault.target not in (SYNCER, *learners, *parts) and fault.kind != "join":
        raise ConfigError(f"this run has no {fault.target}; use one of {', '.join((_some(learners), *parts))}")
    if fault.end_s > seconds:
        what = "ends" if fault.lasts_s else "comes"
        raise ConfigError(
            f"it {what} at {fault.end_s:g} s and the run has {seconds:g} s; let it begin earlier, or run longer"
        )
    return fault


_EXAMPLES = {"kind": '"kill"', "target": '"learner-1"', "at": '"90s"'}


def _no_overlap(fault: Fault, earlier: Sequence[Fault]) -> None:
    """Of two faults of one kind on one target at once the first to end would end both: an executor cannot keep them.
    A learner may tell several lies."""
    for number, other in enumerate(earlier, 1):
        same = (other.kind, other.target) == (fault.kind, fault.target)
        same = same and (fault.kind != "lie" or other.variant == fault.variant)
        if same and other.at_s <= fault.end_s and fault.at_s <= other.end_s:
            raise ConfigError(
                f"{fault.kind} on {fault.target} falls together with number {number}; join the two, or move one"
            )


def seconds_of(key: str, value: Any, seconds: float) -> float:
    """A number of seconds, a text with a unit, or a share of the run."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        result = float(value) if abs(value) < NUMBER_MAX else math.inf
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e-?[0-9]+)?)\s*(%|ms|s|min|m|h)\s*", str(value))
        if not isinstance(value, str) or match is None:
            raise ConfigError(f'{key} must be a time such as "90s", "1.5m" or "30%" of the run; not {value!r}')
        number, unit = float(match[1]), match[2]
        result = number / 100.0 * seconds if unit == "%" else number * UNITS_S[unit]
    if not 0.0 <= result <= seconds and seconds >= SECONDS_MAX:  # it is not known yet how long the run is
        raise ConfigError(f"{key} is {value!r}; use 0 s to {SECONDS_MAX / 86_400:g} days, or 0% to 100% of the run")
    if not 0.0 <= result <= seconds:
        raise ConfigError(f"{key} is {value!r}, outside this run of {seconds:g} s; use 0 to {seconds:g}, or run longer")
    return result


def _kinds(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(kind, str) for kind in value):
        raise ConfigError(f'kinds must be a list of names such as ["kill", "freeze"]; not {value!r}')
    return value


def _whole(key: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ConfigError(f"{key} must be a whole number from 0 to {most}; not {value!r}")
    return value


def _no_unknown(values: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {key!r}; {meant(key, known)}use {', '.join(known)}")


def _some(learners: Sequence[str]) -> str:
    shown = ", ".join((*learners[:8], SYNCER))
    return shown if len(learners) <= 8 else f"{shown} and {len(learners) - 8} more learners"
