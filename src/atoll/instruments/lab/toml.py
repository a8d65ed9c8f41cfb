"""Reading the lab's TOML files: bounded, and with one message that says what is wrong with which file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError

TOML_BYTES_MAX = 4_000_000
"""As for a plan of `atoll chaos`: room for ten thousand tables."""


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """The tables of a file; `what` it is meant to be appears in the message."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(TOML_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the {what} {path} cannot be read ({reason}); name a TOML file, see docs/LAB.md") from None
    if len(data) > TOML_BYTES_MAX:
        raise ConfigError(f"{path}: a {what} has at most {TOML_BYTES_MAX} bytes; this is some other file")
    try:
        values = tomllib.loads(data.decode("utf-8"))
        repr(values)  # TOML takes hexadecimal numbers of any length, which no message could show: a ValueError here
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML ({error}); docs/LAB.md shows what a {what} looks like") from None
    return values
