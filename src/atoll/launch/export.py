"""`atoll export` without the terminal: the published model out of what is on disk, with no process of the run alive.

A source is the folder of a run, the URL (or folder) of one snapshot, or of a place where snapshots are kept. Of a run,
its state comes first; where that is missing or damaged, the newest good snapshot of the same run. Buffers are no part
of the run's model: they come from the checkpoints of its learners, which are in the run's folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from atoll.core import one_of
from atoll.errors import AtollError, LaunchError, StoreError
from atoll.launch.folder import RunFolder
from atoll.launch.stored import read_run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from atoll.store import Loaded

Write: TypeAlias = Callable[..., "Exported"]
"""Takes a run's state or snapshot, where it was, and what was wrong before it was found."""
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
    """What was damaged or missing on the way to it, and whose buffers there are, in words."""
    buffers: int = 0
    """How many of the tensors are buffers."""


def export_run(
    source: str,
    to: Path,
    *,
    dtype: str = "float32",
    options: Mapping[str, Any] | None = None,
    buffers: str = "",
    force: bool = False,
) -> Exported:
    """Write the published parameters that `source` holds as safetensors, by parameter name.

    `options` are for the file system of a snapshot's URL. `buffers` adds those of the learner of this id, or the mean
    of all learners' ("mean"). Raises StoreError when there is nothing good, LaunchError when `to` cannot be written,
    or is there already and may not be replaced (`force`)."""
    one_of("dtype", dtype, DTYPES)
    if to.is_file() and not force:
        raise LaunchError(f"{to} exists and would be replaced; add --force to replace it, or give another --to")

    def write(loaded: Loaded, found: str, problems: tuple[str, ...] = ()) -> Exported:
        kept, told = _buffers(source, buffers, loaded) if buffers else ({}, [])
        return _write(loaded, found, to, dtype, (*problems, *loaded.problems, *told), kept)

    path = Path(source).expanduser()
    if "://" not in source and not path.is_dir():
        raise LaunchError(f"there is no folder {source}; give the folder of a run, or the folder or URL of snapshots")
    if "://" in source:
        return _from_snapshots(source, options, write)
    folder = RunFolder(path.resolve())
    if folder.state.is_dir() or folder.config_file.exists():
        return _from_run(folder, options, write)
    if (path / "epoch.json").exists():
        return _from_state(path, write)
    return _from_snapshots(str(path), options, write)


def _from_run(folder: RunFolder, options: Mapping[str, Any] | None, write: Write) -> Exported:
    try:
        if folder.state.is_dir():
            shards = sorted((folder.path / "shards").glob("*/state"))
            return _from_shards(folder.state, shards, write) if shards else _from_state(folder.state, write)
        raise StoreError(f"{folder.path} holds no state{_model_hint(folder)}")
    except StoreError as error:
        url, given = _snapshots_of(folder)
        if not url:
            raise
        return _from_snapshots(url, {**given, **(options or {})}, write, (f"state: {error}",))


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


def _from_state(state: Path, write: Write) -> Exported:
    from atoll.syncer import read_committed

    return write(read_committed(state, only=("theta",)), str(state))


def _from_shards(state: Path, shards: Sequence[Path], write: Write) -> Exported:
    """The facts are the syncer's, the fragments its shards'. Of one that has moved a copy may be left where it was: the
    syncer's record says whose counts."""
    from atoll.syncer import SHARD_ROW, SHARDS_ROW, read_committed

    loaded = read_committed(state, only=("theta",))
    owners = dict(enumerate(loaded.rows.get(SHARDS_ROW) or ()))
    for shard in shards:
        found = read_committed(shard, only=("theta",))
        name = (found.rows.get(SHARD_ROW) or {}).get("name")
        own = {f: one for f, one in found.fragments.items() if owners.get(f) == name or f not in loaded.fragments}
        loaded.fragments |= own
        loaded.problems += found.problems
    return write(loaded, f"{state} and {len(shards)} shards")


def _from_snapshots(
    url: str, options: Mapping[str, Any] | None, write: Write, problems: tuple[str, ...] = ()
) -> Exported:
    from atoll.store import load_snapshot, unreachable

    try:
        loaded = load_snapshot(url, options)
    except OSError as error:
        raise unreachable(url, options, error) from error
    return write(loaded, loaded.url, problems)


def _buffers(source: str, whose: str, loaded: Loaded) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """What the learners keep of their own beside the parameters, such as BatchNorm's running statistics."""
    folder = Path(source).expanduser().resolve()
    if "://" in source or not (folder / "learners").is_dir():
        raise LaunchError(
            f"{source} has no folder `learners`, where each learner of a run keeps its buffers; give the folder of the "
            "run itself, or leave --buffers out"
        )
    try:
        from atoll.learner import read_buffers
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise LaunchError("--buffers reads learners' checkpoints with PyTorch: pip install 'atoll[torch]'") from error
    row = loaded.rows.get("run") or {}
    return read_buffers(folder, whose, row.get("run"))


def _write(
    loaded: Loaded, source: str, to: Path, dtype: str, problems: tuple[str, ...], buffers: Mapping[str, NDArray[Any]]
) -> Exported:
    from safetensors import safe_open

    from atoll.store import export_model

    try:
        export_model(loaded.rows, loaded.fragments, to, dtype=dtype, buffers=buffers)
        with safe_open(to, framework="numpy") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 (it is no mapping)
        size = to.stat().st_size
    except OSError as error:
        raise LaunchError(f"cannot write {to} ({error.strerror or error}); give another --to, or make room") from error
    return Exported(
        to=to,
        source=source,
        tensors=len(shapes),
        parameters=sum(math.prod(shape) for shape in shapes) - sum(buffer.size for buffer in buffers.values()),
        versions=tuple(fragment.version for _, fragment in sorted(loaded.fragments.items())),
        bytes=size,
        problems=problems,
        buffers=len(buffers),
    )
