"""Asking a learner of another machine to leave: what whoever asked is told of how it went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from atoll.launch import leave, leave_from_afar
from atoll.wire import ClientOptions

OPTIONS = ClientOptions(address="127.0.0.1:1")


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the syncer says of the learner, look by look, from the request on."""
    said: list[str] = []
    looks: Iterator[str] = iter(said)

    async def asked(options: ClientOptions, learner: str) -> str:
        return next(looks)

    async def status(options: ClientOptions) -> dict[str, Any]:
        return {"members": [{"learner": "paris", "state": next(looks)}]}

    monkeypatch.setattr(leave, "ask_to_leave", asked)
    monkeypatch.setattr(leave, "fetch_status", status)
    monkeypatch.setattr(leave, "POLL_S", 0.0)
    return said


def test_one_whose_link_ended_before_it_had_handed_over_has_not_left_in_order(states: list[str]) -> None:
    states += ["active", "active", "away", "lost"]
    how, handed_over = leave_from_afar(OPTIONS, "paris")
    assert not handed_over and "without handing over everything" in how


def test_one_that_comes_back_and_says_goodbye_has_left(states: list[str]) -> None:
    states += ["active", "away", "active", "left"]
    assert leave_from_afar(OPTIONS, "paris") == ("has left", True)


def test_on_a_thin_link_it_is_waited_for_as_long_as_it_may_hand_over() -> None:
    from atoll.learner.leave_deadline import LEAVE_S_MAX

    assert leave.AFAR_WAIT_S > LEAVE_S_MAX
