"""A study as a file: settings that are swept, over seeds, each arm compared with a baseline.

name = "quorum"
extends = "base.toml"               # another file's [base], which the [base] here is laid over
baseline = "dp"                     # the label of the arm that the others are compared with
seeds = [0, 1, 2]
time_to = 1.8                       # if given: the table shows when runs have come down to this loss

[base]                              # of every arm: the fields of LabSpec
model = "small"
tokens = 40_000_000
world = "worlds/unequal.toml"       # a scenario file beside this one, or a table

[base.sync]
codec_up = "int4"

[[arm]]
label = "dp"
method = "dp"

[[arm]]
label = "decoupled"
learners = [4, 8]                   # a list is a sweep; several are all their combinations
sync.quorum = ["1", "50%", "all"]

Nothing here is trusted: whatever cannot be is a ConfigError that names the file and the arm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from atoll.core import SyncConfig, meant
from atoll.errors import ConfigError
from atoll.instruments.lab.scenario import LabScenario, plain_world
from atoll.instruments.lab.spec import BUILT_IN, LOCAL_METHODS, LabSpec
from atoll.instruments.lab.toml import read_toml
from atoll.instruments.sim import real
from atoll.zoo import model_config

RUNS_MAX = 10_000
"""Of one study: more is a slip of the pen in a sweep."""
ARMS_MAX = 1000
NAME_CHARS_MAX = 60
"""Of names and labels: they head the lines of tables."""
COLUMNS_MAX = 20
STORE_NAME = "results.jsonl"
"""Studies of one folder share a store, so that a baseline that several have in common runs once."""

_STUDY_KEYS = ("name", "description", "extends", "baseline", "seeds", "columns", "time_to", "store", "base", "arm")
_ARM_KEYS = ("label", "baseline", "seeds", "published")
_DERIVED = ("learners_expected", "tokens_budget")
"""Settings of the synchronisation that follow from the rest of a spec."""
_ALWAYS = (
    "sync_every",
    "fragments",
    "overlap",
    "quorum",
    "grace_cap_steps",
    "grace_gamma",
    "weights",
    "age_discount",
    "merge",
    "outer_lr",
    "outer_momentum",
    "codec_up",
    "codec_down",
    "adopt",
    "carry_versions_max",
    "ring_versions",
    "norm_outlier_factor",
    "quorum_timeout_ns",
    "lease_ns",
    "lost_after_ns",
    "feedback_up",
    "feedback_down",
    "correction",
    "outer_schedule",
    "momentum_restart",
    "partial",
)
"""Settings that a spec always spells out. One that SyncConfig gained later is spelled out only where it differs from
its default, so that older results keep their keys; its default must then stay what it was."""
_SPEC_TYPES = {entry.name: str(entry.type) for entry in fields(LabSpec)}
_SYNC_TYPES = {entry.name: str(entry.type) for entry in fields(SyncConfig)}

Setting = tuple[str, Any]
"""A name such as learners or sync.quorum, and its value."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One run of a study."""

    label: str
    """Of its arm."""
    settings: Mapping[str, Any]
    """Those that its arm or the base sweeps, the seed left out: they tell an arm's lines of a table apart."""
    spec: LabSpec

    @property
    def title(self) -> str:
        return title_of(self.label, self.settings)


@dataclass(frozen=True, slots=True)
class Study:
    name: str
    planned: tuple[Planned, ...]
    """Seed by seed, so that a study that is stopped early has something of every arm."""
    store: Path
    """Where its results go unless somebody says otherwise."""
    description: str = ""
    baselines: Mapping[str, str] = field(default_factory=dict)
    """Label of an arm -> label of the arm that it is compared with."""
    columns: tuple[str, ...] = ()
    """Facts of the results that its table shows besides."""
    time_to: float = 0.0
    """A loss: the table shows when runs have come down to it; 0: it does not."""
    published: Mapping[str, float] = field(default_factory=dict)
    """Label of an arm -> what others have published for it, in percent against their baseline."""

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(planned.label for planned in self.planned))

    def only(self, labels: Iterable[str]) -> tuple[Planned, ...]:
        """The runs of these arms; of all when none are named."""
        wanted = tuple(labels)
        for label in wanted:
            if label not in self.labels:
                hint = meant(label, self.labels)
                names = ", ".join(repr(one) if "," in one else one for one in self.labels)
                raise ConfigError(f"study {self.name} has no arm {label!r}; {hint}it has {names}")
        return tuple(planned for planned in self.planned if not wanted or planned.label in wanted)


def load_study(path: str | Path) -> Study:
    """Read a study file and everything it refers to."""
    file = Path(path)
    values = read_toml(file, "study")
    try:
        return _study(values, file)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def title_of(label: str, settings: Mapping[str, Any]) -> str:
    return " ".join([label, *(f"{short(name)}={value}" for name, value in settings.items())])


def short(name: str) -> str:
    """A setting's name without the table it is in."""
    return name.rpartition(".")[2]


def make_spec(values: Mapping[str, Any]) -> LabSpec:
    """A spec in the one form in which equal runs have equal keys, however they were written; its world is checked too.

    Its `sync` spells out what the run will use: a default that changes must not make old results pass for new ones.
    """
    own = {name: _typed(_SPEC_TYPES.get(name, ""), value) for name, value in values.items()}
    if isinstance(own.get("sync"), Mapping):
        own["sync"] = {name: _typed(_SYNC_TYPES.get(name, ""), value) for name, value in own["sync"].items()}
    spec = LabSpec.from_dict(own)
    if spec.task in BUILT_IN:
        model_config(spec.model)
    LabScenario.from_values(spec.world, where="world").check(spec.learners, spec.steps)
    sync = {} if spec.method in LOCAL_METHODS else _spelled_out(spec.config())
    return replace(spec, sync=sync, world=plain_world(spec.world))


def _spelled_out(config: SyncConfig) -> dict[str, Any]:
    usual = {entry.name: entry.default for entry in fields(SyncConfig)}
    return {
        name: value
        for name, value in asdict(config).items()
        if name not in _DERIVED and (name in _ALWAYS or value != usual[name])
    }


# ---------------------------------------------------------------- parsing


def _study(values: Mapping[str, Any], file: Path) -> Study:
    _known(values, _STUDY_KEYS)
    base = _base(values, file)
    arms = _arms(values.get("arm", []))
    planned = [run for arm in arms for run in _expand(arm, base, _seeds(values, arm, base), file.parent)]
    if len(planned) > RUNS_MAX:
        raise ConfigError(f"it has {len(planned)} runs, and a study has at most {RUNS_MAX}; sweep less, or split it")
    order = {seed: place for place, seed in enumerate(dict.fromkeys(run.spec.seed for run in planned))}
    return Study(
        name=_text(values, "name", file.stem),
        planned=tuple(sorted(planned, key=lambda run: order[run.spec.seed])),
        store=file.parent / _text(values, "store", STORE_NAME),
        description=_text(values, "description", "", chars=2000),
        baselines=_baselines(values, arms),
        columns=_columns(values.get("columns", [])),
        time_to=_time_to(values.get("time_to", 0.0)),
        published={arm["label"]: _published(arm) for arm in arms if "published" in arm},
    )


def _base(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    base = _table("[base]", values.get("base", {}))
    if "extends" in values:
        other = file.parent / _text(values, "extends", "")
        lent = read_toml(other, "study")
        if "extends" in lent:
            raise ConfigError(f"it extends {other.name}, which extends another file; name that one, or join them")
        base = _over(_world_of(_table("[base]", lent.get("base", {})), other.parent), _world_of(base, file.parent))
    return _world_of(base, file.parent)


def _arms(entries: Any) -> list[dict[str, Any]]:
    if not isinstance(entries, list) or not entries:
        raise ConfigError("it has no arm; begin each with [[arm]] in double brackets and give it a label")
    if len(entries) > ARMS_MAX:
        raise ConfigError(f"it has {len(entries)} arms, and a study has at most {ARMS_MAX}; split it")
    arms = [_table(f"[[arm]] number {number}", entry) for number, entry in enumerate(entries, 1)]
    labels: set[str] = set()
    for number, arm in enumerate(arms, 1):
        if "label" not in arm:
            raise ConfigError(f'[[arm]] number {number} has no label; add a line such as label = "dp"')
        label = _text(arm, "label", "")
        if label in labels:
            raise ConfigError(f"two arms are labelled {label!r}; give each a label of its own")
        labels.add(label)
    return arms


def _baselines(values: Mapping[str, Any], arms: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    labels = [arm["label"] for arm in arms]
    found = {}
    for arm in arms:
        baseline = _text(arm, "baseline", _text(values, "baseline", ""))
        if baseline and baseline not in labels:
            raise ConfigError(f"baseline {baseline!r} is no arm's label; use one of {', '.join(labels)}")
        if baseline and baseline != arm["label"]:
            found[arm["label"]] = baseline
    return found


def _seeds(values: Mapping[str, Any], arm: Mapping[str, Any], base: Mapping[str, Any]) -> list[Any]:
    if "seed" in base or "seed" in arm:
        raise ConfigError("a study names its seeds in one list; write seeds = [0] instead of seed = 0")
    seeds = arm.get("seeds", values.get("seeds", [0]))
    if not isinstance(seeds, list) or not seeds or len(set(map(str, seeds))) < len(seeds):
        raise ConfigError(f"seeds must be a list of different numbers such as [0, 1, 2]; not {str(seeds)[:60]}")
    return seeds


def _columns(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > COLUMNS_MAX or not all(isinstance(name, str) for name in value):
        raise ConfigError(
            f'columns must be a list of at most {COLUMNS_MAX} facts such as ["rho"]; not {str(value)[:60]}'
        )
    return tuple(value)


def _time_to(value: Any) -> float:
    real("time_to (a loss in nats per token)", value, 0.0, 1000.0)
    return float(value)


def _published(arm: Mapping[str, Any]) -> float:
    real(f"arm {arm['label']}: published (percent)", arm["published"], -1000.0, 1000.0)
    return float(arm["published"])


def _expand(arm: Mapping[str, Any], base: Mapping[str, Any], seeds: Sequence[Any], folder: Path) -> Iterator[Planned]:
    label = arm["label"]
    own = {name: value for name, value in arm.items() if name not in _ARM_KEYS}
    try:
        for settings in _combinations(base, own):
            swept = {name: _shown(value) for name, value in settings if _is_sweep(name, base, own)}
            for seed in seeds:
                yield Planned(label, swept, make_spec({**_values(settings, base, own, folder), "seed": seed}))
    except ConfigError as error:
        raise ConfigError(f"arm {label}: {error}") from None


def _combinations(base: Mapping[str, Any], own: Mapping[str, Any]) -> list[tuple[Setting, ...]]:
    """All combinations of what an arm or its base sweeps, and with them the settings that are not swept."""
    merged = _over(base, own)
    choices: list[list[Setting]] = []
    for name, value in _flat(merged):
        options = value if isinstance(value, list) else [value]
        if not options or any(isinstance(option, list) for option in options):
            raise ConfigError(f"{name}: a sweep is a list of at least one plain value; not {str(value)[:60]}")
        if len({repr(option) for option in options}) < len(options):
            raise ConfigError(f"{name}: the sweep {str(value)[:60]} has a value twice; leave one out")
        choices.append([(name, option) for option in options])
    count = 1
    for options in choices:
        count *= len(options)
        if count > RUNS_MAX:
            raise ConfigError(f"its sweeps have more than {RUNS_MAX} combinations; sweep less, or split the study")
    return list(itertools.product(*choices))


def _flat(values: Mapping[str, Any]) -> Iterator[Setting]:
    """The settings of a run one by one. A world is one setting: it has lists of its own."""
    for name, value in values.items():
        if name == "sync":
            yield from ((f"sync.{inner}", item) for inner, item in _table("sync", value).items())
        else:
            yield name, value


def _is_sweep(name: str, base: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    return any(isinstance(value, list) for other, value in _flat(_over(base, own)) if other == name)


def _values(
    settings: Iterable[Setting], base: Mapping[str, Any], own: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """What a spec is built from. Methods without synchronisation do not see the base's settings of it."""
    values: dict[str, Any] = {name: value for name, value in settings if not name.startswith("sync.")}
    sync = {short(name): value for name, value in settings if name.startswith("sync.")}
    if values.get("method") in LOCAL_METHODS:
        sync = {name: value for name, value in sync.items() if name in own.get("sync", {})}
    values["sync"] = sync
    values["world"] = _world(values.get("world", {}), folder)
    return values


def _over(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` laid over `base`: tables entry by entry, everything else as a whole."""
    merged = {**base, **own}
    for name in ("sync", "world"):
        if isinstance(base.get(name), Mapping) and isinstance(own.get(name), Mapping):
            merged[name] = {**base[name], **own[name]}
    return merged


def _world_of(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """With the world's file read, so that an arm can change parts of it."""
    if isinstance(values.get("world"), str):
        return {**values, "world": _world(values["world"], folder)}
    return values


def _world(value: Any, folder: Path) -> Mapping[str, Any]:
    if isinstance(value, str):
        LabScenario.load(folder / value)
        return read_toml(folder / value, "scenario")
    return _table("world", value)


def _shown(value: Any) -> Any:
    """A swept value as a table shows it: of a world's file, its name."""
    return value.removesuffix(".toml").rpartition("/")[2] if isinstance(value, str) else value


def _typed(wanted: str, value: Any) -> Any:
    if wanted == "float" and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    if wanted == "str" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


def _known(values: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown key {name[:60]!r}; {meant(name, known)}a study has {', '.join(known)}")


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a table of settings; not {str(value)[:60]!r}")
    return dict(value)


def _text(values: Mapping[str, Any], key: str, otherwise: str, *, chars: int = NAME_CHARS_MAX) -> str:
    value = values.get(key, otherwise)
    if not isinstance(value, str) or len(value) > chars or (key in values and not value):
        raise ConfigError(f"{key} must be a text of 1 to {chars} characters; not {str(value)[:60]!r}")
    return value
