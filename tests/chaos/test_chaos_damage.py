"""Bits that flip between a learner and the syncer: no damaged message is acted upon, and no stream stays dumb.

Wherever a bit flips, the learner trains on, is soon in the run again, and every token is accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from chaos_run import Run

from atoll.instruments.chaos import PERFECT, Way, Weather
from atoll.instruments.chaos.link import Flipper

FRAME_HEADER_BYTES = 9
"""Of HTTP/2: length (3), type (1), flags (1), stream (4)."""
PREFIX_BYTES = 5
"""Of gRPC, in front of each message: compressed (1), length (4)."""
DATA_FRAME = 0
PROGRESS_TAG = 0x1A
"""Field 3 of LearnerMessage. Its length follows, then the tag and the value of `step`."""

Damage = Callable[[bytearray, int], bool]
"""Damages the message whose DATA frame begins at that place, if it is one that is meant; says if it did."""


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    run.stop()


def damage_one(run: Run, direction: str, damage: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage one message that passes in that direction, and wait until it has passed."""
    done: list[int] = []

    def apply(flipper: Flipper, data: memoryview) -> memoryview:
        if done or flipper is not run.proxy._ports["far"].link.flippers[direction]:
            return data
        changed = bytearray(data)
        start = 0
        while start + FRAME_HEADER_BYTES + PREFIX_BYTES < len(changed):
            length = int.from_bytes(changed[start : start + 3], "big")
            message_at = start + FRAME_HEADER_BYTES + PREFIX_BYTES
            told = int.from_bytes(changed[message_at - 4 : message_at], "big")
            # One message in one frame: what small control messages look like.
            if changed[start + 3] == DATA_FRAME and told == length - PREFIX_BYTES and damage(changed, start):
                done.append(start)
                return memoryview(changed)
            start += FRAME_HEADER_BYTES + length
        return data

    monkeypatch.setattr(Flipper, "apply", apply)
    run.wait(lambda: bool(done), "a message to damage")


def lengthen(frame: bytearray, start: int) -> bool:
    """The message claims 4 MiB more: all that follows looks like a part of it, while the connection is fine."""
    frame[start + FRAME_HEADER_BYTES + 2] ^= 0x40
    return True


def raise_step(frame: bytearray, start: int) -> bool:
    """A Progress claims another step: it parses well, and contradicts what follows."""
    message_at = start + FRAME_HEADER_BYTES + PREFIX_BYTES
    if frame[message_at] != PROGRESS_TAG or frame[message_at + 2] != 0x08:
        return False
    frame[message_at + 3] ^= 0x40
    return True


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_stream_that_one_bit_made_dumb_is_replaced(run: Run, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run.go_on()
    session = _session(run)
    damage_one(run, direction, lengthen, monkeypatch)
    run.wait(lambda: _session(run) > session, "the learner says hello again")
    run.go_on()
    run.finish()


def _session(run: Run) -> int:
    return int(run.syncer.ask(lambda shell: shell.machine.membership.members["far"].session))


def test_a_damaged_progress_is_not_believed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.go_on()
    for _ in range(3):
        damage_one(run, "up", raise_step, monkeypatch)
        run.go_on()
    run.finish()


@pytest.mark.soak
@pytest.mark.parametrize("direction", ["up", "down"])
def test_random_flips_do_no_harm(run: Run, direction: str) -> None:
    run.go_on()
    for flips in (1, 3, 6, 10):
        run.proxy.set("far", Weather(**{direction: Way(flips_per_mb=50.0)}))
        run.wait(partial(_has_flips, run, direction, flips), f"{flips} flips")
        run.proxy.set("far", PERFECT)
    run.go_on()
    run.finish()


def _has_flips(run: Run, direction: str, count: int) -> bool:
    return bool(getattr(run.proxy.stats("far"), f"flips_{direction}") >= count)
