"""The registry as a running syncer reads it: whose token is this, and which keys have ended since the last look."""

from __future__ import annotations

from pathlib import Path

from atoll.core import Identity, same_secret
from atoll.errors import ConfigError
from atoll.keys.registry import Key, read_keys, registry_path, secret_hash
from atoll.wire import split_key

UNKNOWN = (
    "wrong or missing key; use a token that `atoll keys issue` made for this run (ATOLL_TOKEN_FILE, or ATOLL_TOKEN)"
)


class KeyFile:
    """Implements `atoll.wire.KeyBook`. Raises ConfigError if there is no registry."""

    def __init__(self, place: str | Path) -> None:
        self.path = registry_path(place)
        self._stamp = self._look_at()
        self._keys = read_keys(self.path)
        self._ended: dict[str, str] = {}
        self._problem = ""

    def find(self, token: str) -> Identity | str:
        """The owner of this token, or why it is nobody's. Only who has the secret hears that it was revoked."""
        found = self._find(token)
        if isinstance(found, str):
            self._read_again()  # it may have been issued a moment ago
            found = self._find(token)
        return found

    def _find(self, token: str) -> Identity | str:
        name, secret = split_key(token)
        key = self._keys.get(name)
        right = same_secret(secret_hash(secret), key.sha256 if key is not None else secret_hash(""))
        if key is None or not right:
            return UNKNOWN
        return _revoked(name) if key.revoked else Identity(name, key.role, key.tokens_per_step)

    def look(self) -> dict[str, str]:
        """Read the registry again if it has changed. Returns the keys that are worth nothing any more since the last
        look, with why. A registry that cannot be read raises ConfigError, once, and what was read before stays."""
        self._read_again()
        ended, self._ended = self._ended, {}
        problem, self._problem = self._problem, ""
        if problem:
            raise ConfigError(problem)
        return ended

    def _read_again(self) -> None:
        stamp = self._look_at()
        if stamp == self._stamp:
            return
        self._stamp, before = stamp, self._keys
        try:
            self._keys = read_keys(self.path)
        except ConfigError as error:
            self._problem = str(error)
            return
        self._ended |= {name: why for name, key in before.items() if (why := _ended(name, key, self._keys.get(name)))}

    def _look_at(self) -> tuple[int, int, int]:
        """What tells one state of the file from another; it is replaced as a whole."""
        try:
            found = self.path.stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_mtime_ns, found.st_size, found.st_ino)


def _ended(name: str, before: Key, now: Key | None) -> str:
    """Why a key that was valid is not any more; empty if it is, or was not."""
    if before.revoked:
        return ""
    if now is None or now.revoked:
        return _revoked(name)
    if (now.sha256, now.role) != (before.sha256, before.role):
        return f"the key of {name!r} was replaced by a new one; start again with that"
    return ""


def _revoked(name: str) -> str:
    return f"the key of {name!r} was revoked; ask whoever runs the syncer for a new one"
