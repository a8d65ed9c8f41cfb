"""Under which id a learner comes: the one that was given, its key's name, or one that nobody else has."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from atoll import ConfigError
from atoll.learner.environment import find_place

KEY = f"atoll.paris-3.{'s' * 43}"


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_LEARNER", "ATOLL_TOKEN", "ATOLL_TOKEN_FILE", "ATOLL_RUN_FOLDER"):
        monkeypatch.delenv(name, raising=False)


def id_of(**given: Any) -> str:
    place = {"address": "127.0.0.1:1", "learner": None, "token": None, "tls_ca": None, "run_folder": None}
    return find_place(**{**place, **given}).learner


def test_a_learner_with_a_key_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert id_of(token=KEY) == "paris-3" and id_of(token=KEY, learner="tokyo") == "tokyo"
    monkeypatch.setenv("ATOLL_TOKEN", KEY)
    assert id_of() == "paris-3"
    monkeypatch.setenv("ATOLL_TOKEN", "one.token.for-all")
    assert id_of() != id_of(), "any other token names nobody"


def test_ids_have_at_most_64_ascii_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 63)
    assert len(id_of()) == 64 and id_of() != id_of()
    assert id_of(learner="x" * 64) == "x" * 64
    for wrong in ("x" * 65, "münchen", "a\nb"):
        with pytest.raises(ConfigError, match="ATOLL_LEARNER"):
            id_of(learner=wrong)
