"""The files that a job takes along: read here, put side by side there."""

from __future__ import annotations

from pathlib import Path

from atoll.engines.job import LaunchJob
from atoll.errors import ConfigError
from atoll.private import make_private_folder

FILES_BYTES_MAX = 16 << 20
"""Scripts, not data: an image or a shared file system is the place for more. (A ConfigMap takes 1 MiB.)"""


def job_files(job: LaunchJob) -> dict[str, bytes]:
    """By name. Raises ConfigError for what cannot be read, is too much, or has the name of another."""
    found: dict[str, bytes] = {}
    for text in job.run.files:
        path = Path(text).expanduser()
        if path.name in found:
            raise ConfigError(f"two of the job's files are called {path.name}; they lie side by side, so rename one")
        try:
            found[path.name] = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read the job's file {path} ({error.strerror}); mend files in [run]") from error
    if sum(map(len, found.values())) > FILES_BYTES_MAX:
        raise ConfigError(f"the job's files have more than {FILES_BYTES_MAX >> 20} MiB; put them into an image")
    return found


def put_files(job: LaunchJob, folder: Path) -> None:
    """On this machine, or on a file system that all machines share."""
    found = job_files(job)
    if found:
        make_private_folder(folder)
    for name, data in found.items():
        (folder / name).write_bytes(data)
