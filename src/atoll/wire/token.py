"""Tokens: the secret that every call carries, from a string or a file."""

from __future__ import annotations

from pathlib import Path

from atoll.errors import ConfigError
from atoll.private import check_private
from atoll.wire.limits import ID_CHARS_MAX

KEY_PREFIX = "atoll."
"""What the token of a key begins with: `atoll.NAME.SECRET`."""


def split_key(token: str) -> tuple[str, str]:
    """Name and secret of a key's token; both empty for any other token."""
    name, _, secret = token.removeprefix(KEY_PREFIX).rpartition(".")
    return (name, secret) if token.startswith(KEY_PREFIX) and name and secret else ("", "")


def read_token(token: str = "", token_file: str = "") -> str:
    """The token that was given, or what the file holds (ATOLL_TOKEN wins over ATOLL_TOKEN_FILE); empty without both.
    ConfigError for a file that other users can read."""
    if not token and token_file:
        try:
            with Path(token_file).expanduser().open() as file:
                check_private(Path(token_file), file.fileno())
                token = file.read(ID_CHARS_MAX + 2).strip()  # with an end of line, and one more to see that it is more
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read a token from {token_file}: {error}; mend ATOLL_TOKEN_FILE (--token-file)"
            ) from None
        if not token:
            raise ConfigError(f"the token file {token_file} is empty; put the token into it, on one line")
    check_token(token)
    return token


def check_token(token: str) -> None:
    """Tokens travel as gRPC metadata, which is printable ASCII."""
    if token and (
        len(token) > ID_CHARS_MAX or not token.isascii() or not token.isprintable() or token.strip() != token
    ):
        raise ConfigError(
            f"a run token must be at most {ID_CHARS_MAX} printable ASCII characters without spaces around; make one "
            f"with: python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
