"""The job that is planned: the model, the learners and where they are, their links, their failures. All checked.

A region is a place with a link to the rest of the world that its learners share. Learners of the job's plain form
(`learners`, `up_gbit`, `down_gbit`) have a link each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from atoll.core import PARAMETERS_MAX, meant, one_of
from atoll.errors import ConfigError
from atoll.instruments.fleet import MTBI_YEARS
from atoll.instruments.plan.units import parse_count
from atoll.instruments.sim import real, whole

PRECISIONS = {"fp32": 32, "bf16": 16, "fp16": 16}
"""Bits of a gradient or outer gradient in the methods that all-reduce."""
LEARNERS_MAX = 4096
"""As many as the goodput estimate takes; four times what one syncer was ever tried with."""
REGIONS_MAX = 256
SHARDS_MAX = 1024
CHIPS_MAX = 1_000_000_000
LAYERS_MAX = 2000
TOKENS_MAX = 10**18
GBIT_S_MIN, GBIT_S_MAX = 1e-6, 1e6
SECONDS_MIN, SECONDS_MAX = 1e-4, 1e6
RTT_MS_MAX = 60_000.0
YEARS_MIN, YEARS_MAX = 1e-6, 1e6
GBYTE_S_MIN, GBYTE_S_MAX = 1e-3, 1e5
NAME_CHARS_MAX = 64
TOKENS_PER_PARAMETER = 20
"""The usual compute-optimal budget, where the user names none."""
LAYERS_AT_1B, LAYERS_POWER = 24, 0.327
"""Depth grows with the cube root of the size: 24, 51 and 108 layers for 1B, 10B and 100B (published: PLAN.md)."""


@dataclass(frozen=True, slots=True)
class Region:
    """Learners in one place, and the link that they share."""

    name: str
    learners: int
    up_gbit: float
    down_gbit: float
    rtt_ms: float = 50.0
    """Round trip to the syncer."""
    step_s: float = 0.0
    """Time of a learner's step here; 0: the job's."""

    def __post_init__(self) -> None:
        where = f"region {self.name[:NAME_CHARS_MAX]!r}: "
        if not self.name or len(self.name) > NAME_CHARS_MAX:
            raise ConfigError(f"a region needs a name of 1 to {NAME_CHARS_MAX} characters; not {self.name!r}")
        whole(where + "learners", self.learners, 1, LEARNERS_MAX)
        real(where + "up_gbit", self.up_gbit, GBIT_S_MIN, GBIT_S_MAX)
        real(where + "down_gbit", self.down_gbit, GBIT_S_MIN, GBIT_S_MAX)
        real(where + "rtt_ms", self.rtt_ms, 0.0, RTT_MS_MAX)
        if self.step_s:
            real(where + "step_s", self.step_s, SECONDS_MIN, SECONDS_MAX)


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained, on what. Field names are those of the options and of the job file."""

    parameters: int
    learners: int
    step_s: float
    """Time of one inner step of one learner."""
    up_gbit: float = 0.0
    """Link of each learner toward the syncer, in Gbit/s, where no regions are given."""
    down_gbit: float = 0.0
    """Link of each learner from the syncer; 0: as up."""
    rtt_ms: float = 50.0
    """Round trip between a learner and the syncer."""
    regions: tuple[Region, ...] = ()
    precision: str = "bf16"
    """Of gradients in data-parallel training and of outer gradients in DiLoCo."""
    layers: int = 0
    """Depth of the model; 0: usual for its size."""
    tokens_per_step: int = 0
    """Tokens of one inner step of one learner; 0: unknown, so that no times are given."""
    tokens: int = 0
    """Tokens to train on; 0: 20 per parameter."""
    chips: int = 0
    """Chips of all learners together; 0: failures are left out."""
    mtbi_years: float = MTBI_YEARS
    """Mean time between interruptions of one chip."""
    slice_chips: int = 256
    """Chips that fail and return together: a pod slice, or the 8 of a GPU server."""
    sites: int = 0
    """Places of about equal size, each with a link of up_gbit and down_gbit that its learners share; 0: none."""
    shards: int | None = None
    """Processes that share the fragments, each on a host of its own; 0: the syncer alone; None: as many as needed
    where there are sites, else none."""
    relays: bool | None = None
    """A relay at each site; None: where one helps."""
    host_gbyte: float = 256.0
    """Memory of the host of the syncer, or of a shard."""
    syncer_gbit: float = 0.0
    """Link of the syncer, or of each shard, each way; 0: not known, and so not a limit."""
    disk_gbyte_s: float = 1.3
    """What the syncer's disk takes. The default is the slower figure of our own machine (docs/results/recovery.md)."""
    merge_gbyte_s: float = 24.2
    """Memory traffic of the merge kernels: 2 cores of our own machine (docs/results/merge.md)."""
    encode_gparam_s: float = 0.83
    """Parameters that a learner's host encodes per nanosecond: 2 cores, the same report."""

    def __post_init__(self) -> None:
        whole("parameters", self.parameters, 1, PARAMETERS_MAX)
        whole("learners", self.learners, 1, LEARNERS_MAX)
        real("step_s", self.step_s, SECONDS_MIN, SECONDS_MAX)
        one_of("precision", self.precision, tuple(PRECISIONS))
        whole("layers", self.layers, 0, LAYERS_MAX)
        whole("tokens_per_step", self.tokens_per_step, 0, TOKENS_MAX)
        whole("tokens", self.tokens, 0, TOKENS_MAX)
        whole("slice_chips", self.slice_chips, 1, CHIPS_MAX)
        real("mtbi_years", self.mtbi_years, YEARS_MIN, YEARS_MAX)
        whole("sites", self.sites, 0, min(REGIONS_MAX, self.learners))
        whole("shards", self.shards or 0, 0, SHARDS_MAX)
        if self.relays and not (self.sites or self.regions):
            raise ConfigError("relays stand at sites; give --sites, or --region for each place")
        for name in ("disk_gbyte_s", "merge_gbyte_s", "encode_gparam_s", "host_gbyte"):
            real(name, getattr(self, name), GBYTE_S_MIN, GBYTE_S_MAX)
        if self.syncer_gbit:
            real("syncer_gbit", self.syncer_gbit, GBIT_S_MIN, GBIT_S_MAX)
        whole("chips", self.chips, 0, CHIPS_MAX)
        if 0 < self.chips < self.learners:
            raise ConfigError(
                f"{self.learners} learners on {self.chips} chips: each needs at least one; give more chips, fewer "
                "learners, or chips 0 to leave failures out"
            )
        self._check_places()

    def _check_places(self) -> None:
        if self.sites and self.regions:
            raise ConfigError("places are given twice: by sites and by regions; leave one of them out")
        if not self.regions:
            if not self.up_gbit:
                raise ConfigError("the job has no links; give --up-gbit (of each learner), or --region for each place")
            real("up_gbit", self.up_gbit, GBIT_S_MIN, GBIT_S_MAX)
            if self.down_gbit:
                real("down_gbit", self.down_gbit, GBIT_S_MIN, GBIT_S_MAX)
            real("rtt_ms", self.rtt_ms, 0.0, RTT_MS_MAX)
            return
        if self.up_gbit or self.down_gbit:
            raise ConfigError("links are given twice: by regions and by up_gbit or down_gbit; leave one of them out")
        if len({region.name for region in self.regions}) < len(self.regions):
            raise ConfigError("two regions have the same name; give each its own")
        if sum(region.learners for region in self.regions) != self.learners:
            total = sum(region.learners for region in self.regions)
            raise ConfigError(f"the regions have {total} learners and the job {self.learners}; leave learners out")

    @property
    def places(self) -> tuple[Region, ...]:
        """The regions, or one of the kind "each learner a link of its own"."""
        if self.regions:
            return self.regions
        if self.sites:
            fewest, more = divmod(self.learners, self.sites)
            counts = [fewest + (number < more) for number in range(self.sites)]
            link = (self.up_gbit, self.down_gbit or self.up_gbit, self.rtt_ms)
            return tuple(Region(f"site {n + 1}", count, *link) for n, count in enumerate(counts))
        return (Region("each learner", 1, self.up_gbit, self.down_gbit or self.up_gbit, self.rtt_ms),)

    def learners_on_link(self, place: Region) -> int:
        """Whose bytes the place's link carries: of all its learners, or of its relay as of one."""
        return 1 if self.relays else place.learners

    @property
    def payloads_through(self) -> int:
        """Whose bytes the syncer, or all shards together, take in and give out."""
        return sum(count * self.learners_on_link(place) for place, count in self.groups)

    @property
    def groups(self) -> tuple[tuple[Region, int], ...]:
        """Each place, and how many like it there are."""
        return tuple((place, 1 if self.regions or self.sites else self.learners) for place in self.places)

    def step_at(self, place: Region) -> float:
        return place.step_s or self.step_s

    def step_s_of(self, rank: int) -> float:
        """The step time of the learner that is the `rank`-th fastest, counted from 1. The quorum's sets the clock."""
        return ranked([(self.step_at(place), count * place.learners) for place, count in self.groups], rank)

    @property
    def step_s_median(self) -> float:
        """As the syncer takes it for the grace window: the upper one of two."""
        return self.step_s_of(self.learners // 2 + 1)

    @property
    def step_s_fastest(self) -> float:
        return self.step_s_of(1)

    @property
    def step_s_slowest(self) -> float:
        return self.step_s_of(self.learners)

    @property
    def depth(self) -> int:
        return self.layers or max(1, round(LAYERS_AT_1B * (self.parameters / 1e9) ** LAYERS_POWER))

    @property
    def tokens_total(self) -> int:
        return self.tokens or TOKENS_PER_PARAMETER * self.parameters

    @property
    def steps_per_s(self) -> float:
        """Inner steps of all learners together, per second."""
        return sum(n * place.learners / self.step_at(place) for place, n in self.groups)


NEVER_ZERO = ("up_gbit", "down_gbit", "syncer_gbit", "tokens_per_step", "tokens", "layers")
"""Fields whose 0 stands for "not given". Who writes a 0 means something else, and is told so."""
COUNTS = ("parameters", "tokens", "tokens_per_step", "chips", "learners")
"""Fields that may be written with a letter, such as 12B."""


def job_names() -> tuple[str, ...]:
    """The names of everything that describes the job."""
    return tuple(f.name for f in fields(Job))


def job_from(values: Mapping[str, Any]) -> Job:
    """A Job from loose values (options, TOML). Regions are tables, or texts such as "oregon:2:4/10:60:1.5"."""
    known = {f.name: str(f.type) for f in fields(Job)}
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r} of a job; {meant(name, known)}known are {', '.join(known)}")
    said = {name: value for name, value in values.items() if value is not None}  # null in JSON: not given
    found = {name: parse_count(name, value) if name in COUNTS else value for name, value in said.items()}
    _refuse_zeros(found, NEVER_ZERO)
    found["regions"] = regions_from(found.get("regions", ()))
    if found["regions"] and "learners" not in found:
        found["learners"] = sum(region.learners for region in found["regions"])
    missing = [name for name in ("parameters", "learners", "step_s") if name not in found]
    if missing:
        options = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(f"a plan needs {options}; give them as options, or in a job file with --job")
    _check_texts(found, known)
    return Job(**found)


def _refuse_zeros(values: Mapping[str, Any], names: Iterable[str], where: str = "") -> None:
    for name in names:
        if values.get(name) == 0:
            raise ConfigError(f"{where}{name} must be positive; give more than {values[name]!r}, or leave it out")


def _check_texts(found: Mapping[str, Any], known: Mapping[str, str]) -> None:
    for name, value in found.items():
        if known[name] == "str" and not isinstance(value, str):
            raise ConfigError(f"{name} must be text; not {value!r}")


def regions_from(values: Any) -> tuple[Region, ...]:
    """Regions from tables or texts."""
    if not isinstance(values, (list, tuple)) or len(values) > REGIONS_MAX:
        raise ConfigError(f"regions must be a list of at most {REGIONS_MAX} tables, [[regions]] in a job file")
    return tuple(_region(value) for value in values)


def _region(value: Any) -> Region:
    if isinstance(value, str):
        value = _region_text(value)
    names = [f.name for f in fields(Region)]
    if not isinstance(value, Mapping) or any(name not in (*names, "gbit") for name in value):
        raise ConfigError(f"a region is a table with {', '.join(names)} (or gbit for both ways); not {value!r}")
    table = dict(value)
    both = table.pop("gbit", None)
    if both is not None:
        table = {"up_gbit": both, "down_gbit": both, **table}
    table.setdefault("down_gbit", table.get("up_gbit"))
    missing = [name for name in ("name", "learners", "up_gbit") if table.get(name) is None]
    if missing or not isinstance(table["name"], str):
        raise ConfigError(f"a region needs a name (text), learners and gbit (or up_gbit and down_gbit); not {value!r}")
    _refuse_zeros(table, ("step_s",), where=f"region {table['name'][:NAME_CHARS_MAX]!r}: ")
    return Region(**table)


def _region_text(text: str) -> dict[str, Any]:
    """NAME:LEARNERS:UP[/DOWN][:RTT_MS[:STEP_S]]"""
    parts = text.split(":")
    try:
        if not 3 <= len(parts) <= 5:
            raise ValueError
        up, _, down = parts[2].partition("/")
        table: dict[str, Any] = {"name": parts[0], "learners": int(parts[1]), "up_gbit": float(up)}
        table["down_gbit"] = float(down or up)
        table.update(zip(("rtt_ms", "step_s"), map(float, parts[3:]), strict=False))
    except ValueError:
        raise ConfigError(
            f"a region is NAME:LEARNERS:UP_GBIT[/DOWN_GBIT][:RTT_MS[:STEP_S]], such as oregon:2:4/10:60; not {text!r}"
        ) from None
    return table


def ranked(values: Iterable[tuple[float, int]], rank: int) -> float:
    """The `rank`-th smallest (from 1) of values that each come so many times."""
    seen, largest = 0, 0.0
    for value, count in sorted(values):
        seen, largest = seen + count, value
        if seen >= rank:
            break
    return largest
