"""`atoll export` without the terminal: the published model out of what is on disk, with no process of the run alive.

A source is the folder of a run, the URL (or folder) of one snapshot, or of a place where snapshots are kept. Of a run,
its state comes first; where that is missing or damaged, the newest good snapshot of the same run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.config import one_of
from atoll.errors import AtollError, LaunchError, StoreError
from atoll.launch.folder import RunFolder
from atoll.launch.stored import read_run

if TYPE_CHECKING:
    from atoll.store import Loaded

DTYPES = ("float32", "bfloat16", "float16", "own")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    to: Path
    source: str
    """Where it came from: a state folder or the URL of a snapshot."""
    tensors: int
    parameters: int
    versions: tuple[int, ...]
    """The version of each fragment."""
    bytes: int
    problems: tuple[str, ...] = field(default=())
    """What was damaged or missing on the way to it, in words."""


def export_run(source: str, to: Path, *, dtype: str = "float32", options: Mapping[str, Any] | None = None) -> Exported:
    """Write the published parameters that `source` holds as safetensors, by parameter name.

    `options` are for the file system of a snapshot's URL. Raises StoreError when there is nothing good, LaunchError
    when `to` cannot be written."""
    one_of("dtype", dtype, DTYPES)
    path = Path(source).expanduser()
    if "://" not in source and not path.is_dir():
        raise LaunchError(f"there is no folder {source}; give the folder of a run, or the folder or URL of snapshots")
    if "://" in source:
        return _from_snapshots(source, options, to, dtype)
    folder = RunFolder(path.resolve())
    if folder.state.is_dir() or folder.config_file.exists():
        return _from_run(folder, options, to, dtype)
    if (path / "epoch.json").exists():
        return _from_state(path, to, dtype)
    return _from_snapshots(str(path), options, to, dtype)


def _from_run(folder: RunFolder, options: Mapping[str, Any] | None, to: Path, dtype: str) -> Exported:
    try:
        if folder.state.is_dir():
            return _from_state(folder.state, to, dtype)
        raise StoreError(f"{folder.path} holds no state{_model_hint(folder)}")
    except StoreError as error:
        url, given = _snapshots_of(folder)
        if not url:
            raise
        return _from_snapshots(url, {**given, **(options or {})}, to, dtype, (f"state: {error}",))


def _snapshots_of(folder: RunFolder) -> tuple[str, dict[str, Any]]:
    """Where the run's snapshots went, if it made any."""
    try:
        durability = read_run(folder.path).config.durability
    except AtollError:
        return "", {}
    return durability.snapshots, durability.file_system_options()


def _model_hint(folder: RunFolder) -> str:
    if folder.model_file.exists():
        return f"; its model is in {folder.model_file} already"
    return "; it ran with --durability none, or ended before its first commit"


def _from_state(state: Path, to: Path, dtype: str) -> Exported:
    from atoll.store import read_state

    return _write(read_state(state, only=("theta",)), str(state), to, dtype)


def _from_snapshots(
    url: str, options: Mapping[str, Any] | None, to: Path, dtype: str, problems: tuple[str, ...] = ()
) -> Exported:
    from atoll.store import load_snapshot

    try:
        loaded = load_snapshot(url, options)
    except OSError as error:
        raise StoreError(
            f"cannot read snapshots at {url} ({error}); check the URL and its --snapshot-options"
        ) from error
    return _write(loaded, loaded.url, to, dtype, problems)


def _write(loaded: Loaded, source: str, to: Path, dtype: str, problems: tuple[str, ...] = ()) -> Exported:
    from safetensors import safe_open

    from atoll.store import export_model

    try:
        export_model(loaded.rows, loaded.fragments, to, dtype=dtype)
        with safe_open(to, framework="numpy") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 (it is no mapping)
        size = to.stat().st_size
    except OSError as error:
        raise LaunchError(f"cannot write {to} ({error.strerror or error}); give another --to, or make room") from error
    return Exported(
        to=to,
        source=source,
        tensors=len(shapes),
        parameters=sum(math.prod(shape) for shape in shapes),
        versions=tuple(fragment.version for _, fragment in sorted(loaded.fragments.items())),
        bytes=size,
        problems=(*problems, *loaded.problems),
    )
