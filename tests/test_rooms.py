"""What the product's rooms may do besides what the import contracts in pyproject.toml say."""

from __future__ import annotations

from pathlib import Path

import atoll

PRODUCT = (
    "core",
    "codec",
    "kernels",
    "wire",
    "store",
    "observe",
    "syncer",
    "learner",
    "data",
    "zoo",
    "launch",
    "dash",
    "cli",
)
FRONT_DOORS = {
    "launch/commands.py",  # PATH of the processes that are started
    "launch/process.py",  # their environment
    "learner/environment.py",  # who a learner is
    "zoo/worker.py",  # the same for the process of `atoll train`
    "store/remote_folder.py",  # where a cloud's own library would look, for an error message
    "wire/transport.py",  # sets two variables of gRPC's before it is imported
}


def test_only_front_doors_look_at_the_environment() -> None:
    home = Path(atoll.__file__).parent
    files = [path for room in PRODUCT for path in (home / room).rglob("*.py")]
    looking = {path for path in files if any(word in path.read_text() for word in ("os.environ", "getenv"))}
    assert {path.relative_to(home).as_posix() for path in looking} == FRONT_DOORS
