"""The `atoll` command in this process, as a user meets it: what it says, and how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from atoll.app import main


class Said(NamedTuple):
    code: int
    stdout: str
    stderr: str

    @property
    def last(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return values


Command = Callable[..., Said]


def command(*words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `atoll WORDS ...` on a wide terminal without colours."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["atoll", *words, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Said(int(ended.value.code or 0), out, err)

    return run
