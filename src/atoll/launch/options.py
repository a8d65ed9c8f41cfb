"""From loose values (command line, TOML) to checked settings: names, types, who wins, and errors that name the remedy.

The names are those of the command line with underscores. Every field of SyncConfig can be set except the two that the
launcher derives; `grace_cap` is short for `grace_cap_steps`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from atoll.core import SyncConfig, meant, sync_preset
from atoll.errors import ConfigError

DERIVED = ("learners_expected", "tokens_budget")
"""SyncConfig fields that follow from the number of learners and steps, and are therefore not options of a run."""
_SHORT = {"grace_cap": "grace_cap_steps"}
_OPTION_OF_FIELD = {field: option for option, field in _SHORT.items()}

CONFIG_FILE_BYTES_MAX = 1 << 20
"""A settings file has a few hundred bytes; anything near this is some other file."""


def sync_option_names() -> tuple[str, ...]:
    """The names under which SyncConfig's fields can be set, in its order."""
    return tuple(_OPTION_OF_FIELD.get(f.name, f.name) for f in fields(SyncConfig) if f.name not in DERIVED)


def sync_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values by the names of SyncConfig's fields; a quorum may be given as a number."""
    named = {_SHORT.get(name, name): value for name, value in values.items()}
    if "quorum" in named and isinstance(named["quorum"], int) and not isinstance(named["quorum"], bool):
        named["quorum"] = str(named["quorum"])
    return named


def take_preset(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values without `preset`, and what the preset stands for, by option names. It lies under everything else."""
    rest = dict(values)
    named = sync_preset(str(rest.pop("preset"))) if "preset" in rest else {}
    return rest, {_OPTION_OF_FIELD.get(name, name): value for name, value in named.items()}


def sync_config(values: Mapping[str, Any], *, learners: int, tokens_budget: int = 0) -> SyncConfig:
    """A SyncConfig from option names."""
    return SyncConfig.from_dict({**sync_values(values), "learners_expected": learners, "tokens_budget": tokens_budget})


def sync_options(config: SyncConfig) -> dict[str, Any]:
    """The reverse of `sync_config`: every option's name and value, without the derived fields."""
    return {_OPTION_OF_FIELD.get(n, n): v for n, v in asdict(config).items() if n not in DERIVED}


def split_values(values: Mapping[str, Any], own: Iterable[str], *, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split into (own settings, sync settings). A name that is neither is an error that lists the known ones."""
    own_names, sync_names = tuple(own), sync_option_names()
    for name in values:
        if name not in own_names and name not in sync_names:
            known = (*own_names, *sync_names, "preset")
            raise ConfigError(
                f"unknown setting {name!r} in {where}; {meant(name, known)}known settings are {', '.join(known)}"
            )
    mine = {n: v for n, v in values.items() if n in own_names}
    return mine, {n: v for n, v in values.items() if n in sync_names}


def check_types(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse values of the wrong type; whole numbers are taken for fractions too."""
    types = {f.name: str(f.type) for f in fields(cls)}
    checked: dict[str, Any] = {}
    for name, value in values.items():
        wanted = {"int": int, "float": (int, float), "str": str, "bool": bool, "int | str": (int, str)}[types[name]]
        if isinstance(value, bool) != (wanted is bool) or not isinstance(value, wanted):  # type: ignore[arg-type]
            raise ConfigError(f"setting {name} must be {types[name]}, not {value!r}")
        try:
            checked[name] = float(value) if types[name] == "float" else value
        except OverflowError:
            raise ConfigError(f"setting {name} is too large; use a number in its range") from None
    return checked


def read_config_file(path: Path) -> dict[str, Any]:
    """Settings from a TOML (or, by its suffix, JSON) file: one flat table. Dashes and underscores are the same."""
    try:
        if path.stat().st_size > CONFIG_FILE_BYTES_MAX:
            raise ConfigError(f"{path} is too large for a settings file; give a TOML file of settings to --config")
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        repr(values)  # TOML takes hexadecimal numbers of any length, which no message could show: a ValueError here
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path} ({error.strerror}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold one table of settings, such as learners = 4")
    names = {name: str(name).replace("-", "_") for name in values}
    return {_OPTION_OF_FIELD.get(names[name], names[name]): value for name, value in values.items()}


def to_toml(values: Mapping[str, str | int | float], *, comment: str) -> str:
    """Flat TOML. JSON's strings and truth values are valid TOML, and so are Python's numbers."""
    lines = [f"# {comment}"]
    lines += [
        f"{name} = {json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)}"
        for name, value in values.items()
    ]
    return "\n".join(lines) + "\n"
