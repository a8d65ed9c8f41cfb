"""The keys of a run, as the operator wrote them down: `keys.json`, which holds no secret.

    {"keys": {"paris": {"role": "learner", "sha256": "...", "tokens_per_step": 0, "created": "...", "revoked": ""}}}

A token is `atoll.NAME.SECRET`. Its secret has 256 bits and is kept by its owner alone; the registry has the SHA-256.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from atoll.core import Role
from atoll.errors import ConfigError
from atoll.wire import KEY_PREFIX, LEARNER_CHARS_MAX

KEYS_FILE = "keys.json"
CERTIFICATE_FILE = "cert.pem"
KEY_FILE = "key.pem"
SECRET_BYTES = 32
REGISTRY_BYTES_MAX = 32 * 1024 * 1024
"""A hundred thousand keys (MEMBERS_MAX) of some 250 bytes each."""
TOKENS_PER_STEP_MAX = 2**40
"""Declared size of a learner: a million sequences of a million tokens."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of the registry."""

    role: Role
    sha256: str
    """Of the secret, in hexadecimal."""
    tokens_per_step: int = 0
    """What a step of this learner processes, by the operator's word; 0: not declared."""
    created: str = ""
    revoked: str = ""
    """When; empty: it is valid."""


def registry_path(place: str | Path) -> Path:
    """The registry in a folder, or the file itself."""
    path = Path(place)
    return path / KEYS_FILE if path.is_dir() else path


def secret_hash(secret: str) -> str:
    """A secret has 256 bits of entropy, so one round of SHA-256 cannot be turned back by trying."""
    return hashlib.sha256(secret.encode()).hexdigest()


def issue(folder: Path, name: str, role: Role, *, tokens_per_step: int = 0, again: bool = False) -> str:
    """Write down a new key; returns its token, which is nowhere else. `again`: in place of one that is valid."""
    if len(name) > LEARNER_CHARS_MAX or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a key: use 1 to {LEARNER_CHARS_MAX} letters, digits, '.', '_' and '-', beginning "
            "with a letter or digit"
        )
    if not 0 <= tokens_per_step <= TOKENS_PER_STEP_MAX or (tokens_per_step and role is not Role.LEARNER):
        raise ConfigError(
            f"--tokens-per-step is a learner's, from 0 to {TOKENS_PER_STEP_MAX}; mend it or leave it away"
        )
    secret = secrets.token_urlsafe(SECRET_BYTES)

    def add(keys: dict[str, Key]) -> None:
        if name in keys and not keys[name].revoked and not again:
            raise ConfigError(f"{name!r} has a key; give --again for a new one, which ends the old one at once")
        keys[name] = Key(role, secret_hash(secret), tokens_per_step, _now())

    _change(registry_path(folder), add)
    return f"{KEY_PREFIX}{name}.{secret}"


def revoke(folder: Path, name: str) -> None:
    """From here on this key is worth nothing."""

    def end(keys: dict[str, Key]) -> None:
        if name not in keys:
            raise ConfigError(f"there is no key {name!r}; `atoll keys list` shows all of them")
        if not keys[name].revoked:
            keys[name] = replace(keys[name], revoked=_now())

    _change(registry_path(folder), end)


def read_keys(path: Path) -> dict[str, Key]:
    """By name. Raises ConfigError for a file that is not there or holds anything else."""
    try:
        with path.open("rb") as file:
            data = file.read(REGISTRY_BYTES_MAX + 1)
        if len(data) > REGISTRY_BYTES_MAX:
            raise ValueError(f"it has more than {REGISTRY_BYTES_MAX} bytes")
        return {str(name): _key(entry) for name, entry in json.loads(data)["keys"].items()}
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}; make it with `atoll keys init`") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} holds no keys ({error}); make them with `atoll keys`") from None


def write_private(path: Path, data: bytes, mode: int = 0o600) -> None:
    """In one piece, for its owner's eyes only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    temporary.replace(path)


def write_keys(path: Path, keys: dict[str, Key]) -> None:
    document = {"keys": {name: asdict(key) for name, key in sorted(keys.items())}}
    write_private(path, json.dumps(document, indent=1).encode() + b"\n")


def _change(path: Path, change: Callable[[dict[str, Key]], None]) -> None:
    with _alone(path.parent):
        keys = read_keys(path)
        change(keys)
        write_keys(path, keys)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two commands at a time would lose one's change."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot open {folder} ({error.strerror}); make it with `atoll keys init`") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _key(entry: dict[str, Any]) -> Key:
    size = entry.get("tokens_per_step", 0)
    if not isinstance(size, int) or not 0 <= size <= TOKENS_PER_STEP_MAX:
        raise ValueError(f"tokens_per_step is {size!r}")
    created, revoked = str(entry.get("created", "")), str(entry.get("revoked", ""))
    return Key(Role(entry["role"]), str(entry["sha256"]), size, created, revoked)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
