"""Every message of protocol 1, as bytes: the current code reads what the old one wrote, and the other way round."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compat_old import OldCode
from compat_samples import LEARNER, SYNCER, encoded, misread

from atoll.core import messages as m
from atoll.wire.convert import encode_learner_message, encode_syncer_message
from atoll.wire.versions import CAUSES_1, SETTINGS_1, SINCE, hello_in, learner_message_in

RECORDED: dict[str, str] = json.loads((Path(__file__).parent / "protocol-1-bytes.json").read_text())


@pytest.fixture(scope="module")
def old_report(old_code: OldCode) -> dict[str, Any]:
    return old_code.report(encoded())


def test_recorded_messages_of_protocol_1_mean_what_they_meant() -> None:
    assert RECORDED.keys() == encoded().keys()
    assert misread(RECORDED) == []


@pytest.mark.parametrize("old_code", [1], indirect=True)
def test_the_recording_is_of_the_old_code_and_complete(old_report: dict[str, Any]) -> None:
    assert old_report["protocol"] == 1
    assert old_report["encoded"] == RECORDED
    assert old_report["kinds without a sample"] == []
    assert old_report["push kinds"] == ["contribution", "seed"]
    assert old_report["fetch kinds"] == ["theta", "update"]


def test_the_old_code_reads_what_the_current_one_says_in_protocol_1(old_report: dict[str, Any]) -> None:
    assert old_report["misread"] == []
    assert encoded() == old_report["encoded"]  # to the byte


@pytest.mark.parametrize("old_code", [1], indirect=True)
def test_what_protocol_1_knows_is_written_down_right(old_report: dict[str, Any]) -> None:
    assert old_report["settings"] == sorted(SETTINGS_1)
    assert old_report["causes"] == sorted(CAUSES_1)
    spoken_first_in_1 = {type(message) for message in (*LEARNER.values(), *SYNCER.values())}
    assert not spoken_first_in_1 & SINCE.keys()


@pytest.mark.parametrize("old_code", [1], indirect=True)
def test_what_came_later_is_left_out_in_a_session_of_protocol_1(old_code: OldCode) -> None:
    """Messages with everything that protocol 2 can say, brought to protocol 1 as sessions do."""
    given = encoded()
    hello, progress, welcome = LEARNER["hello again"], LEARNER["progress"], SYNCER["welcome"]
    assert isinstance(hello, m.Hello) and isinstance(progress, m.Progress) and isinstance(welcome, m.Welcome)
    rich = replace(hello, protocol=2, epoch=9, checksums=(1, 2, 3), wants_inner=True, frozen=7, fingerprint="f")
    given["hello again"] = encode_learner_message(hello_in(rich, 1)).hex()
    told = learner_message_in(replace(progress, pending=(5, 6)), 1)
    given["progress"] = encode_learner_message(told).hex()
    given["welcome"] = encode_syncer_message(replace(welcome, protocol=1, rank=5)).hex()
    assert old_code.report(given)["misread"] == []
