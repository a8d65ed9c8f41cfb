"""ATOLL_SYNCER=@FILE: a syncer that an engine starts anywhere says in a file where it is."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import pytest

from atoll.errors import UnreachableError
from atoll.wire import ClientOptions, find_cause
from atoll.wire.control import _told_anew


def told(path: Path, address: str, host: str = "node-7") -> None:
    path.write_text(json.dumps({"address": address, "host": host, "pid": 1}))


def test_the_file_is_read_again_when_the_syncer_does_not_answer(tmp_path: Path) -> None:
    file = tmp_path / "syncer.json"
    told(file, "127.0.0.1:7077")
    options = ClientOptions(f"@{file}")
    places = deque(options.places())
    assert [place.address for place in places] == ["127.0.0.1:7077"]
    told(file, "0.0.0.0:7078")  # it listens everywhere on its host, and is reached by the host's name
    assert [place.address for place in _told_anew(options, places)] == ["node-7:7078"]
    file.write_text("a:1, b:2\n")
    assert [place.address for place in options.places()] == ["a:1", "b:2"]
    file.write_text("{half a fi")
    assert _told_anew(options, places) is places  # what it said before holds
    found = find_cause(options)
    assert found is not None and not found.final and "does not say where the syncer is" in found.text


def test_a_relay_may_come_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "syncer.json"
    told(file, "127.0.0.1:7077")
    options = ClientOptions(f"relay:7079,@{file}")
    places = deque(options.places())
    assert [place.address for place in places] == ["relay:7079", "127.0.0.1:7077"]
    told(file, "127.0.0.1:7078")
    assert [place.address for place in _told_anew(options, places)] == ["relay:7079", "127.0.0.1:7078"]


def test_a_token_in_clear_is_refused_wherever_the_file_leads(tmp_path: Path) -> None:
    file = tmp_path / "syncer.json"
    told(file, "127.0.0.1:7077")
    options = ClientOptions(f"@{file}", token="t")
    places = deque(options.places())
    told(file, "elsewhere.example:7077")
    assert _told_anew(options, places) is places


def test_a_file_that_is_not_there_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="check that the syncer has started"):
        ClientOptions(f"@{tmp_path}/syncer.json")
