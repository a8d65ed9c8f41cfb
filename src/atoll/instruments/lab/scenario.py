"""The world of a lab run as a file: how fast the learners are, over which links they reach the syncer, what goes wrong.

step_ms = 1000                      # of every learner; also latency_ms, link_jitter_ms, up_mbit, down_mbit, loss, lies
jitter = 0.1

[[learner]]                         # what is different for some
who = "4-7"                         # or a number, or a list of numbers
step_ms = 1180

[[fault]]                           # as in a plan of `atoll chaos`; a killed learner may stay down (`lasts`)
kind = "kill"
target = "learner-1"
at = "30%"
lasts = "60s"

[failures]                          # each learner fails by itself, at random
every = "10m"                       # on average
down = "60s"                        # on average

[[extra]]                           # learners that come and go
learners = 4
from = "25%"
until = "75%"

Shares are of the run's nominal length, which `LabScenario.seconds` gives. Nothing here is trusted: whatever cannot be
is a ConfigError that says where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from atoll.core import meant
from atoll.errors import ConfigError
from atoll.instruments.chaos import learner_names, listed_faults, seconds_of
from atoll.instruments.lab.spec import LEARNERS_MAX
from atoll.instruments.lab.toml import read_toml
from atoll.instruments.sim import FAULTS_MAX, SECONDS_MAX, LearnerSpec, SimFault, real, whole

HORIZON = 2.0
"""Failures are drawn for this many times the length that a run would have if everybody were down as often as on
average: runs end before that, and a run that does not has an end without failures instead of no end."""
DOWN_S_MIN = 0.001
"""A drawn failure lasts at least this long: 0 would mean the supervisor's usual pause."""
GUESTS_MAX = LEARNERS_MAX
_KEYS = ("learner", "fault", "failures", "extra")
NUMBERS = ("step_ms", "jitter", "latency_ms", "link_jitter_ms", "up_mbit", "down_mbit", "loss")
"""Those of a LearnerPace."""

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class LearnerPace:
    """How fast a learner is and how it reaches the syncer."""

    step_ms: float = 1000.0
    """Of one inner step, in virtual time."""
    jitter: float = 0.0
    """A step takes between 1 - jitter/2 and 1 + jitter/2 times that."""
    latency_ms: float = 5.0
    """One way."""
    link_jitter_ms: float = 0.0
    """Added at random to each message."""
    up_mbit: float = 0.0
    """Mbit/s from the learner to the syncer; 0: no limit."""
    down_mbit: float = 0.0
    """Mbit/s from the syncer to the learner; 0: no limit."""
    loss: float = 0.0
    """Share of packets that must be sent again."""
    lies: str = ""
    """What it makes of its contributions, all along: a variant of the fault `poison`, such as flip."""

    def __post_init__(self) -> None:
        self.spec(1)

    def spec(self, tokens: int) -> LearnerSpec:
        """For the simulator; `tokens` of one step."""
        for name in NUMBERS:
            real(name, getattr(self, name), 0.0, LOSS_MAX if name == "loss" else 1e12)
        try:
            return LearnerSpec(
                step_ns=round(self.step_ms * 1e6),
                tokens=tokens,
                jitter=float(self.jitter),
                latency_ns=round(self.latency_ms * 1e6),
                link_jitter_ns=round(self.link_jitter_ms * 1e6),
                up_bits_per_s=self.up_mbit * 1e6,
                down_bits_per_s=self.down_mbit * 1e6,
                loss=float(self.loss),
                lies=self.lies,
            )
        except ConfigError as error:
            raise ConfigError(f"{error}; mind the units: step_ms and latency_ms are ms, up_mbit is Mbit/s") from None


LOSS_MAX = 0.9
"""A link that loses more than nine packets of ten is one that is down; say so with a fault."""
PACE_KEYS = tuple(entry.name for entry in fields(LearnerPace))


def plain_world(values: Mapping[str, Any]) -> dict[str, Any]:
    """A world that `from_values` takes, without what is as usual: so that equal worlds look equal."""
    usual = LearnerPace()
    kept = {key: value for key, value in values.items() if key not in PACE_KEYS or value != getattr(usual, key)}
    return {key: float(value) if key in NUMBERS else value for key, value in kept.items() if value not in ([], {})}


@dataclass(frozen=True, slots=True)
class Failures:
    """Every learner fails by itself: up for `every` and down for `down` on average, both exponential."""

    every: str | float
    down: str | float

    def times_s(self, seconds: float) -> tuple[float, float]:
        every_s, down_s = _time("every", self.every, seconds), _time("down", self.down, seconds)
        if every_s <= 0.0 or down_s <= 0.0:
            raise ConfigError("every and down must be above 0; leave out [failures] for none")
        return every_s, down_s


@dataclass(frozen=True, slots=True)
class Extra:
    """Learners that join and, if `until` is given, leave."""

    learners: int
    begin: str | float
    until: str | float | None
    pace: LearnerPace

    def times_s(self, seconds: float) -> tuple[float, float]:
        """When they join, and how long they stay."""
        begin_s = _time("from", self.begin, seconds)
        until_s = SECONDS_MAX if self.until is None else _time("until", self.until, seconds)
        if begin_s >= until_s:
            raise ConfigError(f"until ({self.until}) must come after from ({self.begin})")
        if begin_s > seconds:
            raise ConfigError(
                f"extra learners would come at {begin_s:g} s, and the run has {seconds:g} s; let them come earlier"
            )
        return begin_s, until_s - begin_s


@dataclass(frozen=True, slots=True)
class LabScenario:
    pace: LearnerPace = LearnerPace()
    changes: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...] = ()
    """(learners, what is different for them); later ones win."""
    listed: tuple[Mapping[str, Any], ...] = ()
    """[[fault]] tables, each checked by itself; moments and targets are checked when the run is known."""
    failures: Failures | None = None
    extras: tuple[Extra, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> LabScenario:
        return cls.from_values(read_toml(path, "scenario"), where=str(path))

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, where: str = "the scenario") -> LabScenario:
        """Build from what a file says. Unknown keys and impossible values are errors."""
        return _within(where, lambda: cls._parsed(values))

    @classmethod
    def _parsed(cls, values: Mapping[str, Any]) -> LabScenario:
        _known(values, (*PACE_KEYS, *_KEYS))
        pace = LearnerPace(**{key: values[key] for key in PACE_KEYS if key in values})
        return cls(
            pace=pace,
            changes=_tables(values, "learner", lambda entry: _change(entry, pace)),
            listed=_tables(values, "fault", _listed),
            failures=_within("[failures]", lambda: _failures(values["failures"])) if "failures" in values else None,
            extras=_tables(values, "extra", lambda entry: _extra(entry, pace)),
        )

    # ------------------------------------------------------------ for a run

    def learners(self, count: int, tokens: int) -> tuple[LearnerSpec, ...]:
        """Of a run of `count` learners that each process `tokens` in a step."""
        return tuple(pace.spec(tokens) for pace in self.paces(count))

    def paces(self, count: int) -> list[LearnerPace]:
        whole("learners", count, 1, LEARNERS_MAX)
        paces = [self.pace] * count
        for who, values in self.changes:
            for index in who:
                if index >= count:
                    raise ConfigError(
                        f"[[learner]] speaks of learner {index}, and the run has {count} learners, 0 to {count - 1}; "
                        "correct who, or run with more learners"
                    )
                paces[index] = replace(paces[index], **values)
        return paces

    def seconds(self, count: int, steps: int) -> float:
        """How long count * steps steps of all learners together take when nobody waits and nothing fails."""
        per_s = sum(1000.0 / pace.step_ms for pace in self.paces(count))
        return count * steps / per_s

    def faults(self, names: Sequence[str], seconds: float, seed: int) -> tuple[SimFault, ...]:
        """Everything that happens to a run of these learners and this nominal length, joins included, in order."""
        real("seconds", seconds, 0.0, SECONDS_MAX)
        found = [*self._faults_listed(names, seconds), *self._faults_drawn(names, seconds, seed)]
        joins = zip(self._guest_names(), self._guest_extras(), strict=True)
        found += [SimFault("join", name, *extra.times_s(seconds)) for name, extra in joins]
        if len(found) > FAULTS_MAX:
            raise ConfigError(f"{len(found)} faults in one run, and at most {FAULTS_MAX} are possible; use fewer")
        return tuple(sorted(found, key=lambda fault: (fault.at_s, fault.kind, fault.target)))

    def guests(self, tokens: int) -> dict[str, LearnerSpec]:
        """Whoever may join, by name."""
        named = dict(zip(self._guest_names(), (extra.pace for extra in self._guest_extras()), strict=True))
        named |= {entry["target"]: self.pace for entry in self.listed if entry["kind"] == "join"}
        return {name: pace.spec(tokens) for name, pace in named.items()}

    def check(self, count: int, steps: int) -> None:
        """Refuse what cannot be for a run of this size, before it starts."""
        self.faults(learner_names(count), self.seconds(count, steps), 0)

    def _faults_listed(self, names: Sequence[str], seconds: float) -> list[SimFault]:
        # A kill of a chaos plan is an instant; how long the learner stays down is the lab's own addition.
        entries = [dict(entry) for entry in self.listed]
        down = [entry.pop("lasts", 0.0) if entry["kind"] == "kill" else 0.0 for entry in entries]
        found = [SimFault.of_plan(fault, seconds) for fault in listed_faults(entries, names, seconds)]
        for number, lasts in enumerate(down):
            if lasts:
                where = f"[[fault]] number {number + 1}"
                down_s = _within(where, lambda lasts=lasts: seconds_of("lasts", lasts, seconds))  # type: ignore[misc]
                found[number] = replace(found[number], lasts_s=down_s)
        return found

    def _faults_drawn(self, names: Sequence[str], seconds: float, seed: int) -> list[SimFault]:
        if self.failures is None:
            return []
        every_s, down_s = _within("[failures]", lambda: self.failures.times_s(seconds))  # type: ignore[union-attr]
        horizon_s = HORIZON * seconds * (every_s + down_s) / every_s
        if len(names) * horizon_s / (every_s + down_s) > FAULTS_MAX / 2:
            raise ConfigError(
                f"[failures]: {len(names)} learners that fail every {every_s:g} s would fail more than "
                f"{FAULTS_MAX // 2} times; let them fail less often"
            )
        found: list[SimFault] = []
        for name in names:  # each from its own dice, so that another learner more does not change the others' failures
            dice = Random(f"lab-failures/{seed}/{name}")
            at_s = dice.expovariate(1.0 / every_s)
            while at_s < horizon_s:
                lasts_s = max(DOWN_S_MIN, dice.expovariate(1.0 / down_s))
                found.append(SimFault("kill", name, round(at_s, 3), round(lasts_s, 3)))
                at_s += lasts_s + dice.expovariate(1.0 / every_s)
        return found

    def _guest_extras(self) -> list[Extra]:
        return [extra for extra in self.extras for _ in range(extra.learners)]

    def _guest_names(self) -> list[str]:
        """One per extra learner, none of them taken by a [[fault]] of kind join."""
        taken = {entry["target"] for entry in self.listed if entry["kind"] == "join"}
        wanted = sum(extra.learners for extra in self.extras)
        free = (f"guest-{number}" for number in range(wanted + len(taken)))
        return [name for name in free if name not in taken][:wanted]


# ---------------------------------------------------------------- parsing


def _within(where: str, parse: Callable[[], Parsed]) -> Parsed:
    try:
        return parse()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _known(values: Any, known: Sequence[str]) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"it must be a table of settings; not {str(values)[:60]}")
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {str(key)[:60]!r}; {meant(str(key), known)}use {', '.join(known)}")


def _tables(values: Mapping[str, Any], key: str, parse: Callable[[Any], Parsed]) -> tuple[Parsed, ...]:
    entries = values.get(key, [])
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"begin each {key} with [[{key}]] in double brackets")
    if len(entries) > FAULTS_MAX:
        raise ConfigError(f"it has {len(entries)} [[{key}]] tables, and at most {FAULTS_MAX} are possible; use fewer")
    return tuple(
        _within(f"[[{key}]] number {number}", lambda entry=entry: parse(entry))  # type: ignore[misc]
        for number, entry in enumerate(entries, 1)
    )


def _change(entry: Any, pace: LearnerPace) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    _known(entry, ("who", *PACE_KEYS))
    if "who" not in entry:
        raise ConfigError('it does not say whom it is about; add a line such as who = 0, who = [4, 5] or who = "4-7"')
    values = {key: value for key, value in entry.items() if key != "who"}
    replace(pace, **values)  # refuses what cannot be
    return _who(entry["who"]), values


def _who(value: Any) -> tuple[int, ...]:
    """Numbers of learners: 3, [0, 2], "4-7" or "0, 2, 4-7"."""
    ranges: list[tuple[int, int]] = []
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    for part in parts:
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?\s*", str(part)) if part is not True else None
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if low > high or high >= LEARNERS_MAX:
            raise ConfigError(f'who must be a number, a list or a range such as "4-7"; not {str(value)[:60]!r}')
        ranges.append((low, high))
    return tuple(sorted({index for low, high in ranges for index in range(low, high + 1)}))


def _listed(entry: Any) -> Mapping[str, Any]:
    """Check one [[fault]] as far as that is possible without knowing the run."""
    plain = dict(entry) if isinstance(entry, Mapping) else entry
    if isinstance(plain, dict) and plain.get("kind") == "kill":
        if plain.get("target") == "syncer" and "lasts" in plain:
            raise ConfigError("a killed syncer is started again at once; leave out lasts")
        seconds_of("lasts", plain.pop("lasts", 0.0), SECONDS_MAX)
    try:
        listed_faults([plain], learner_names(LEARNERS_MAX), SECONDS_MAX)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("[[fault]] number 1: ")) from None
    return dict(entry)


def _failures(entry: Any) -> Failures:
    _known(entry, ("every", "down"))
    for key in ("every", "down"):
        if key not in entry:
            raise ConfigError(f'it has no {key}; add a line such as {key} = "60s"')
    failures = Failures(entry["every"], entry["down"])
    failures.times_s(SECONDS_MAX)
    return failures


def _extra(entry: Any, pace: LearnerPace) -> Extra:
    _known(entry, ("learners", "from", "until", *PACE_KEYS))
    whole("learners", entry.get("learners", 1), 1, GUESTS_MAX)
    own = replace(pace, **{key: entry[key] for key in PACE_KEYS if key in entry})
    extra = Extra(entry.get("learners", 1), entry.get("from", 0.0), entry.get("until"), own)
    for value in (extra.begin, extra.until):
        if value is not None:
            _time("from and until", value, SECONDS_MAX)
    return extra


def _time(key: str, value: Any, seconds: float) -> float:
    """Seconds, a text with a unit, or a share of the run; unlike a fault's moment it may lie beyond the run."""
    share = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{0,9})?)\s*%\s*", value) if isinstance(value, str) else None
    return float(share[1]) / 100.0 * seconds if share else seconds_of(key, value, SECONDS_MAX)
