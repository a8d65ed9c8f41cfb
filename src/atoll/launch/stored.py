"""A run folder read back: what the run in it was told, for those who continue it or join it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.core import LATER_SETTINGS
from atoll.errors import ConfigError, LaunchError
from atoll.launch.config import RunConfig, TrainConfig, run_config, train_config
from atoll.launch.folder import RunFolder
from atoll.launch.options import read_config_file
from atoll.observe import InjectedFault

NO_SETTINGS = ("derived", "command", "started_in")
"""What RUN/config.json holds besides settings."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One launch of a run: its first, or one that resumes it."""

    folder: RunFolder
    token: str = field(repr=False)
    number: int = 0
    """How many times the run was resumed, this time included."""
    taken: frozenset[str] = frozenset()
    """Learners that run already, because an `atoll join` has outlived the launcher."""
    faults: tuple[InjectedFault, ...] = ()
    """What went wrong on purpose in earlier attempts."""

    @property
    def events_file(self) -> Path:
        name = f"launcher-{self.number}" if self.number else "launcher"
        return self.folder.events / f"{name}.jsonl"


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The settings of a run that was started before."""

    folder: RunFolder
    config: TrainConfig | RunConfig
    command: tuple[str, ...]
    """Of `atoll run`; empty for `atoll train`."""
    started_in: str
    """The folder in which it was started: relative paths in the command and the corpus count from there."""

    @contextlib.contextmanager
    def where_it_began(self, say: Callable[[str], None]) -> Iterator[None]:
        """Work in the folder in which the run was started, so that its processes do."""
        if not self.started_in or Path(self.started_in) == Path.cwd():
            yield
        elif not Path(self.started_in).is_dir():
            say(f"the run was started in {self.started_in}, which is gone; going on in {Path.cwd()}")
            yield
        else:
            with contextlib.chdir(self.started_in):
                yield


def read_run(path: Path) -> StoredRun:
    """Raises LaunchError for a folder that holds no run of `atoll train` or `atoll run` with a syncer."""
    folder = RunFolder(path.expanduser().resolve())
    if not folder.config_file.exists():
        by_hand = folder.syncer_file.exists()
        hint = (
            "its syncer was started by hand, so start it again with the same command; learners join it by environment "
            "(ATOLL_SYNCER, ATOLL_TOKEN_FILE)"
            if by_hand
            else "give the folder that the run named when it started, such as runs/..."
        )
        raise LaunchError(f"{path} holds no run of `atoll train` or `atoll run` (no config.json); {hint}")
    values = read_config_file(folder.config_file)
    settings = {name: value for name, value in values.items() if name not in NO_SETTINGS}
    for name in ("partial", "sizes"):  # a run of a version that had no choice
        settings.setdefault(name, LATER_SETTINGS[name])
    settings["out"] = str(folder.path)
    where = str(folder.config_file)
    if "command" in values:
        return StoredRun(folder, run_config(settings, where=where), _command(values, where), _started_in(values))
    config, _ = train_config(settings, where=where)
    if not config.synchronises:
        raise LaunchError(
            f"the run in {path} has method {config.method}, which has no syncer that learners could join and keeps no "
            f"state to go on from; start it again: atoll train --config {folder.path / 'config.toml'}"
        )
    return StoredRun(folder, config, (), _started_in(values))


def started_in() -> dict[str, str]:
    """What `StoredRun.started_in` is read from."""
    return {"started_in": str(Path.cwd())}


def _started_in(values: dict[str, Any]) -> str:
    return str(values.get("started_in", ""))


def _command(values: dict[str, Any], where: str) -> tuple[str, ...]:
    command = values["command"]
    if not isinstance(command, list) or not command or not all(isinstance(part, str) for part in command):
        raise ConfigError(f"the command in {where} is {json.dumps(command)}, not a list of words; mend that file")
    return tuple(command)
