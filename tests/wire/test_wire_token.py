"""Where a token comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.wire import read_token


def test_a_token_file_holds_one_line(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("from the file\n")
    path.chmod(0o600)
    assert read_token("", str(path)) == "from the file"
    assert read_token("given", str(path)) == "given"
    assert read_token() == ""


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 201, b"two\nlines", b"\xff\xfe"])
def test_a_file_that_holds_no_token_is_refused_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError):
        read_token("", str(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ATOLL_TOKEN_FILE"):
        read_token("", str(tmp_path / "none"))


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620])
def test_a_file_that_others_can_open_is_refused_as_ssh_does(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("no secret any more")
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token("", str(path))
    assert read_token("given", str(path)) == "given"  # nobody looks at it
