"""Learners on threads of their own, over links that lose messages both ways, with a syncer that is killed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from data_fakes import FakeRun, Files, Numbers, SlowLink, train

import atoll.data
from atoll.data import dry_wait


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_every_sample_once_whatever_the_links_do(run: FakeRun, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_wait, "DRY_GRACE_S", 60.0)
    seen: dict[str, list[int]] = {}
    links: list[SlowLink] = []

    def make(learner: Any, batch_size: int) -> atoll.data.Loader:
        given: dict[str, Any] = {"batch_size": batch_size, "ahead_s": 0.02}
        if kind == "map":
            return atoll.data.loader(learner, Numbers(800), chunk_size=10, epochs=2, **given)
        return atoll.data.stream(learner, Files((7, 0, 12, 3, 1)), chunks=120, **given)

    def work(name: str, batch_size: int, leaves_after: int | None) -> None:
        plain = run.learner(name)
        learner = SlowLink(run, name, plain.generation, seed=batch_size)
        links.append(learner)
        seen[name] = train(learner, iter(make(learner, batch_size)), steps=leaves_after)
        learner.leave()

    threads = [
        threading.Thread(target=work, args=arguments)
        for arguments in (("a", 4, None), ("b", 7, 20), ("c", 3, 30), ("d", 16, None))
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        run.restart()
        threads[0].join(0.05)
        threads[3].join(0.05)
    late = run.learner("late")
    rest = train(late, iter(make(late, 4)))
    expected = list(range(800)) * 2 if kind == "map" else Files((7, 0, 12, 3, 1)).all(120)
    assert sorted(sum(seen.values(), rest)) == sorted(expected)
    chunks = 160 if kind == "map" else 120
    assert run.status() | {"done": chunks, "in_hand": 0, "repeated": 0} == run.status()
    assert sum(link.lost for link in links) > 0
