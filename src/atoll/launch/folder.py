"""The run folder: where one run, and only one, keeps everything that it leaves behind.

RUN/config.json     what the run was told and what was derived     RUN/config.toml  the same, for --config
RUN/processes.json  role, id and pid of every process              RUN/syncer.json  address of the syncer
RUN/events/*.jsonl  what happened, one file per process            RUN/logs/*.log   what the processes printed
RUN/state           what the syncer needs to go on (atoll resume)  RUN/learners/ID  the same for each learner
RUN/model.safetensors, RUN/sample.txt, RUN/result.json, RUN/report.html   the outcome

Besides: launcher.lock and join.lock (held, not only there, while they are in use), processes-PID.json (one per
`atoll join`) and leave-ID (that learner was asked to leave). A storm adds files of its own (`storms/files.py`).
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError, LaunchError
from atoll.launch.options import to_toml
from atoll.private import FILE_MODE, FOLDER_MODE, is_open_to_others, make_private_folder

DEFAULT_PARENT = Path("runs")
SUFFIX_MAX = 10_000
"""Default folders of one day and method; the bound only ends a loop on a file system that lies."""
SMALL_FILE_BYTES_MAX = 64 << 10
"""syncer.json holds a hundred bytes."""
MARKERS = ("config.json", "processes.json", "syncer.json", "events", "result.json")
"""What tells that a folder already holds a run."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Ids of learners that are started here become parts of file names."""


class RunFolder:
    """Paths of a run and the small files that the launcher writes; every file appears whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = path / "events"
        self.logs = path / "logs"
        self.syncer_file = path / "syncer.json"
        self.token_file = path / "token"
        self.processes_file = path / "processes.json"
        self.joined_file = path / f"processes-{os.getpid()}.json"
        self.lock_file = path / "launcher.lock"
        self.config_file = path / "config.json"
        self.state = path / "state"
        self.model_file = path / "model.safetensors"
        self.sample_file = path / "sample.txt"
        self.result_file = path / "result.json"

    def log_file(self, role: str, id: str) -> Path:
        return self.logs / f"{role}-{id}.log"

    def log_of(self, id: str) -> Path | None:
        """What a process of this run printed, whoever started it: an engine of `atoll launch` names a log by the id
        alone. None if there is no such plain file in this folder."""
        if _ID.fullmatch(id) is None:
            return None
        there = [self.log_file(role, id) for role in ("learner", "syncer", "shard", "relay")]
        return next(
            (path for path in (*there, self.logs / f"{id}.log") if path.is_file() and not path.is_symlink()), None
        )

    def logged(self) -> list[str]:
        """The ids of which there is a log."""
        stems = (path.stem for path in self.logs.glob("*.log"))
        return sorted(re.sub(r"^(learner|syncer|shard|relay)-(?=.*[^0-9])", "", stem) for stem in stems)

    def shard_folder(self, number: int) -> Path:
        """Where a shard of this run has its fragments and its address."""
        return self.path / "shards" / str(number)

    def relay_folder(self, number: int) -> Path:
        """Where a relay of this run has its address."""
        return self.path / "relays" / str(number)

    def leave_file(self, learner: str) -> Path:
        """Holds the pid of a process that `atoll leave` has told to go: its end is no failure and not the run's end."""
        return self.path / f"leave-{learner}"

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other launchers out. The kernel takes the lock back when this process ends, however it ends."""
        with _locked(self.lock_file, wait=False) as descriptor:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield

    @contextlib.contextmanager
    def hold_joining(self) -> Iterator[None]:
        """One `atoll join` at a time chooses its ids; that takes milliseconds."""
        with _locked(self.path / "join.lock", wait=True):
            yield

    def write_config(self, options: Mapping[str, Any], resolved: Mapping[str, Any]) -> None:
        """RUN/config.json is complete; RUN/config.toml holds the options alone, without the folder, to run it again."""
        write_json(self.config_file, resolved)
        again = {name: value for name, value in options.items() if name != "out"}
        write_text(self.path / "config.toml", to_toml(again, comment="Run this again with: --config THIS_FILE"))

    def write_token(self, token: str) -> None:
        """For `atoll status RUN_FOLDER`; readable by its owner alone, whatever lay there before."""
        self.token_file.unlink(missing_ok=True)
        with os.fdopen(os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "w") as file:
            file.write(token)

    def read_token(self) -> str:
        """The token of this run; empty if it has none."""
        return self.token_file.read_text() if self.token_file.exists() else ""

    def warn_of_open_token(self, say: Callable[[str], None]) -> None:
        """A copy of the folder may have left its token open to others."""
        if self.token_file.exists() and is_open_to_others(self.token_file.stat()):
            say(
                f"warning: other users of this machine could read this run's token; use: chmod 600 {self.token_file}, "
                "and start a new run if you do not trust them"
            )

    def write_processes(self, processes: Sequence[Mapping[str, Any]], path: Path | None = None) -> None:
        write_json(path or self.processes_file, list(processes))


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[int]:
    """Hold an exclusive lock on a file of the run folder. The file stays: removing it would let two hold "it"."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            pid = os.read(descriptor, 32).decode("ascii", errors="replace").strip()
            raise still_running(path.parent, f"its launcher has pid {pid}", pid) from None
        except OSError:
            pass  # A file system without locks: the list of processes is the only guard.
        yield descriptor
    finally:
        os.close(descriptor)


def is_finished(folder: RunFolder) -> bool:
    """Whether RUN/result.json says that the run came to its end. One that was stopped has a result as well, as far as
    it got; one of a version before that was only written at the end."""
    if not folder.result_file.exists():
        return False
    try:
        return bool(json.loads(folder.result_file.read_text()).get("finished", True))
    except (OSError, ValueError, AttributeError, RecursionError):
        return True  # damaged or empty: nobody should train on over a result


def still_running(path: Path, who: str, pid: str | int) -> LaunchError:
    """The error of a command that needs a run at rest."""
    return LaunchError(
        f"the run in {path} is still going on ({who}); `atoll status {path}` shows it, `kill {pid}` stops it"
    )


def checked_id(learner: str) -> str:
    """The id of a learner that is started on this machine. Raises ConfigError if no file could be named after it."""
    if _ID.fullmatch(learner) is None:
        raise ConfigError(
            f"learner id {learner!r} cannot be part of a file name; use up to 100 letters, digits, dots, dashes and "
            f"underscores, beginning with a letter or digit"
        )
    return learner


def syncer_of(path: Path) -> tuple[str, str]:
    """Address and token of the syncer of a local run."""
    folder = RunFolder(path)
    try:
        if folder.syncer_file.stat().st_size > SMALL_FILE_BYTES_MAX:
            raise ValueError(f"{folder.syncer_file.name} is too large")
        address = str(json.loads(folder.syncer_file.read_text())["address"])
        token = folder.read_token()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LaunchError(f"{path} holds no running syncer ({error}); give HOST:PORT or another run folder") from error
    return address, token


def create_run_folder(out: str, *, name: str) -> RunFolder:
    """Make `out`, or a new folder runs/<date>-<name>-<n>. A folder that holds a run is never written into again."""
    try:
        path = Path(out).expanduser() if out else _new_default(name)
        make_private_folder(path)
        old = [marker for marker in MARKERS if (path / marker).exists()]
        if old:
            raise LaunchError(
                f"{path} already holds a run ({old[0]} is there), and two runs in one folder could not be told apart; "
                f"give another --out, leave --out away for a new folder under runs/, or delete {path} first"
            )
        folder = RunFolder(path.resolve())
        folder.events.mkdir()
        folder.logs.mkdir(exist_ok=True)
    except OSError as error:
        where = out or str(DEFAULT_PARENT)
        raise LaunchError(
            f"the run folder {where} cannot be written ({error.strerror}); give one that you may write to with --out"
        ) from error
    return folder


def create_parent(out: str, *, name: str) -> Path:
    """Make `out`, or a new folder runs/<date>-<name>-<n>, for several runs that belong together."""
    try:
        path = Path(out).expanduser() if out else _new_default(name)
        make_private_folder(path)
    except OSError as error:
        where = out or str(DEFAULT_PARENT)
        raise LaunchError(
            f"the folder {where} cannot be written ({error.strerror}); give one that you may write to with --out"
        ) from error
    return path.resolve()


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(without_nan(value), indent=2, allow_nan=False) + "\n")


def without_nan(value: Any) -> Any:
    """The same value with every NaN and infinity replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def write_text(path: Path, text: str) -> None:
    """Write beside and rename, so that a reader sees the old file or the new one and never half of it."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _new_default(name: str) -> Path:
    day = datetime.date.today().strftime("%Y%m%d")
    for number in range(1, SUFFIX_MAX):
        path = DEFAULT_PARENT / f"{day}-{name}-{number}"
        try:
            path.mkdir(FOLDER_MODE, parents=True)
        except FileExistsError:
            continue
        return path
    raise LaunchError(f"{DEFAULT_PARENT} holds {SUFFIX_MAX} runs of today; delete some or give --out")
