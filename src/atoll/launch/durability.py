"""What a run keeps on disk while it goes on, as options: how soon a commit is durable, and where snapshots go."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from atoll.core import one_of
from atoll.errors import ConfigError
from atoll.launch.options import check_types
from atoll.private import redacted

LEVELS = ("commit", "interval", "none")
DURATION_S_MIN = 0.1
DURATION_S_MAX = 30 * 24 * 3600.0
"""A month: whoever wants it rarer than that wants it not at all."""
KEEP_MAX = 10_000
OPTIONS_CHARS_MAX = 65_536
"""Options of a file system are a few names and an address."""
PLAIN_OPTIONS = frozenset(
    {
        *("account_name", "addressing_style", "bucket", "endpoint", "endpoint_override", "endpoint_url", "host"),
        *("hostname", "location", "profile", "project", "protocol", "region", "region_name", "scheme"),
        *("signature_version", "username"),
    }
)
"""Texts that are no secrets, of the file systems that snapshots commonly go to. Any other text may be one."""
_DURATIONS = ("durability_interval", "snapshot_every")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([smh]?)")


@dataclass(frozen=True, slots=True)
class DurabilityConfig:
    """Names and units are those of the options; durations are in seconds."""

    durability: str = "commit"
    """commit (on disk before it is published), interval (every so often), or none (in memory only)."""
    durability_interval: float = 30.0
    """Seconds between two writes at level interval."""
    snapshots: str = ""
    """fsspec URL that whole snapshots of the run go to, such as s3://bucket/run; empty: none."""
    snapshot_every: float = 300.0
    """Seconds between two snapshots."""
    keep: int = 3
    """Newest snapshots that are kept."""
    snapshot_options: str = ""
    """JSON object of options for the URL's file system, such as an endpoint. It is kept in the run folder: credentials
    belong in the environment (ATOLL_SNAPSHOT_OPTIONS, another such object, or what the file system itself reads)."""
    record: bool = False
    """Record what every merge is made from, for `atoll replay`: about as many bytes as the learners send."""

    def __post_init__(self) -> None:
        one_of("durability", self.durability, LEVELS)
        if self.record and self.durability == "none":
            raise ConfigError(
                "record needs the syncer's state on disk, and durability none keeps none; use --durability commit or "
                "interval, or --no-record"
            )
        for name in _DURATIONS:
            value = getattr(self, name)
            if not (math.isfinite(value) and DURATION_S_MIN <= value <= DURATION_S_MAX):
                raise ConfigError(
                    f"{name} must be from {DURATION_S_MIN:g} s to {DURATION_S_MAX / 3600:g} h; not {value!r}"
                )
        if not 1 <= self.keep <= KEEP_MAX:
            raise ConfigError(f"keep must be a whole number from 1 to {KEEP_MAX}; not {self.keep!r}")
        self.file_system_options()

    def file_system_options(self) -> dict[str, Any]:
        """`snapshot_options` as the object that it stands for."""
        return parse_options(self.snapshot_options)

    def options(self) -> dict[str, Any]:
        return asdict(self)


def durability_names() -> tuple[str, ...]:
    """The names under which these settings are given."""
    return tuple(f.name for f in fields(DurabilityConfig))


def durability_config(values: Mapping[str, Any]) -> DurabilityConfig:
    """From loose values: durations may be numbers (of seconds) or text such as 90, 90s, 5m or 1h."""
    parsed = {name: parse_duration(name, value) if name in _DURATIONS else value for name, value in values.items()}
    return DurabilityConfig(**check_types(DurabilityConfig, parsed))


def parse_duration(name: str, value: Any) -> Any:
    """Seconds from "90", "90s", "5m" or "1h". What is no text is left as it is, for the check of types."""
    if not isinstance(value, str):
        return value
    found = _DURATION.fullmatch(value.strip())
    if found is None:
        raise ConfigError(f"{name} must be a time such as 90, 90s, 5m or 1h; not {value!r}")
    return float(found[1]) * _SECONDS[found[2]]


def parse_options(text: str, *, name: str = "snapshot_options") -> dict[str, Any]:
    """A JSON object from the command line or the environment; empty text is the empty object."""
    if not text:
        return {}
    try:
        value = json.loads(text) if len(text) <= OPTIONS_CHARS_MAX else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(  # not shown: it may hold a key
            f'{name} must be one JSON object, such as {{"endpoint_url": "https://storage.example"}}; mend it'
        )
    return value


def check_keepable(config: DurabilityConfig) -> None:
    """Refuse credentials among settings that the run folder will keep."""
    if secret := holds_credentials(config.snapshot_options):
        raise ConfigError(
            f"snapshot_options would keep {', '.join(secret)} in the run folder, which may be a credential; put "
            "it as JSON into the environment (ATOLL_SNAPSHOT_OPTIONS), which is not kept, or use what the file system "
            "reads itself (AWS_SECRET_ACCESS_KEY)"
        )
    if any(redacted(text) != text for text in (config.snapshots, config.snapshot_options)):
        raise ConfigError(
            "an address for snapshots holds a user or a password, which the run folder would keep; leave them out of "
            'it, and give them by environment: ATOLL_SNAPSHOT_OPTIONS=\'{"username": "...", "password": "..."}\''
        )


def holds_credentials(options: str) -> list[str]:
    """The names in a JSON object of options whose texts may be credentials."""
    return sorted({name for name, _ in _strings(parse_options(options)) if name not in PLAIN_OPTIONS})


def _strings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a JSON value, with the name that stands before it."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _strings(item, inner)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, name)


def describe_durability(config: DurabilityConfig) -> str:
    """One line for people."""
    level = {
        "commit": "every commit is on disk before it is published",
        "interval": f"state goes to disk every {duration_text(config.durability_interval)}",
        "none": "state is in memory only, so a dead syncer loses its momentum and ledger",
    }[config.durability]
    if config.record:
        level += ", and what merges are made from is recorded (atoll replay)"
    if not config.snapshots:
        return f"durability {config.durability}: {level}"
    every = duration_text(config.snapshot_every)
    where = redacted(config.snapshots)
    return f"durability {config.durability}: {level}; snapshot every {every} to {where}, {config.keep} kept"


def duration_text(seconds: float) -> str:
    """300 -> "5m": the form in which it can be given again."""
    for unit, size in (("h", 3600.0), ("m", 60.0)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"
