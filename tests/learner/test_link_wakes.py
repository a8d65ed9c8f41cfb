"""The link's own thread does not wake itself: each wake is a write to a socket and a read, three in a step."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from atoll.core import LearnerMachine
from atoll.learner.shell import LearnerShell
from atoll.observe import NullWriter
from atoll.wire import ClientOptions


def test_only_other_threads_wake_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = LearnerShell(None, LearnerMachine("x", "i", ()), ClientOptions("127.0.0.1:1"), NullWriter())  # type: ignore[arg-type]
    woken, done = list[str](), list[str]()
    threadsafe = shell._loop.call_soon_threadsafe

    def wake(*what: Any) -> None:
        woken.append(threading.current_thread().name)
        threadsafe(*what)

    monkeypatch.setattr(shell._loop, "call_soon_threadsafe", wake)
    ended = threading.Event()

    def inside() -> None:
        for number in range(3):
            shell._post(done.append, f"own {number}")
        shell._post(shell._loop.stop)

    def run() -> None:
        shell._loop.run_forever()
        ended.set()

    shell._thread = threading.Thread(target=run, name="atoll-link")
    shell._thread.start()
    shell._post(inside)
    assert ended.wait(60)
    shell._thread.join()
    shell._loop.close()
    assert done == ["own 0", "own 1", "own 2"]
    assert woken == [threading.main_thread().name]
