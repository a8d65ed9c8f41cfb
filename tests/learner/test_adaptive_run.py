"""Real learners over real sockets, one behind a thin link: what it is asked to send follows the link."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Proxy, SyncerThread, TrainingThread, small_model

from atoll.core.config import SyncConfig
from atoll.observe import adapted_text, events, read_events, summarize


@pytest.fixture
def parts() -> Iterator[list[Any]]:
    started: list[Any] = []
    yield started
    for part in reversed(started):
        part.stop()


def of_kind(folder: Path, kind: type) -> list[Any]:
    return [event for _, _, event in read_events(folder) if isinstance(event, kind)]


def test_a_thin_link_is_asked_for_fewer_bits_and_the_others_are_not(parts: list[Any], tmp_path: Path) -> None:
    """36 kB of int4 each 0.4 s do not fit into 10 kB/s, nor do 18 kB of int2 or 9 kB of topk:10%; 3 kB of topk:3% do.
    All of them are merged, with those of learners whose links are wide."""
    settings = {"fragments": 1, "sync_every": 8, "learners_expected": 2, "adaptive": "network"}
    syncer = SyncerThread(SyncConfig(**settings), folder=tmp_path)  # type: ignore[arg-type]
    proxy = Proxy(syncer.address, bytes_per_s=10_000, ways=("up",))
    parts += [syncer, proxy]
    fat = [TrainingThread(syncer.address, f"fat-{i}", model=small_model(1000), step_s=0.05, seed=i) for i in range(2)]
    thin = TrainingThread(proxy.address, "thin", model=small_model(1000), step_s=0.05, seed=7)
    parts += [*fat, thin]

    def sparse_merged(shell: Any) -> bool:
        return shell.machine.book.adaptive.codec("thin") == "topk:3%" and thin_is_in(tmp_path) >= 2

    syncer.wait_for(sparse_merged, "contributions of the thin link are sparse, and merged")
    for learner in (*fat, thin):
        learner.stop()
        assert learner.error is None
    syncer.check_ledger()
    syncer.stop()
    changes = of_kind(tmp_path, events.Adapted)
    mine = [c for c in changes if c.subject == "thin"]
    assert mine[0].before == "int4" and [c.after for c in mine][-1] == "topk:3%"
    assert not [c for c in mine if "did not help" in c.reason] and {c.what for c in mine} == {"codec_up"}
    assert not [c for c in changes if c.what == "period"], "a quorum is there in milliseconds"
    assert "for each answer" in mine[0].reason or "no answer for" in mine[0].reason
    told = [adapted_text(event) for _, event in summarize(tmp_path).notices.adapted]
    assert any(text.startswith("thin int4 -> ") for text in told)


def test_a_link_that_recovers_gets_its_bits_back(parts: list[Any], tmp_path: Path) -> None:
    """The one learner's link carries 10 kB/s and then 10 MB/s: first fewer bits, then those of the settings again."""
    settings = {"fragments": 1, "sync_every": 8, "adaptive": "network"}
    syncer = SyncerThread(SyncConfig(**settings), folder=tmp_path)  # type: ignore[arg-type]
    proxy = Proxy(syncer.address, bytes_per_s=10_000, ways=("up",))
    parts += [syncer, proxy]
    learner = TrainingThread(proxy.address, "one", model=small_model(1000), step_s=0.05, seed=7)
    parts.append(learner)

    def sends_less(shell: Any) -> bool:
        return shell.machine.book.adaptive.codec("one") not in ("", "int4")

    def as_set(shell: Any) -> bool:
        made = shell.machine.book.adaptive
        return bool(made.codec("one") == "int4" and made.period == 8)

    syncer.wait_for(sends_less, "fewer bits")
    proxy.bytes_per_s = 10_000_000
    syncer.wait_for(as_set, "the settings' again")
    learner.stop()
    assert learner.error is None
    syncer.stop()
    changes = of_kind(tmp_path, events.Adapted)
    assert [c.what for c in changes[:2]] == ["codec_up", "codec_down"], "it is the only one, and so its link is most"
    assert changes[0].after == "int2" and "has room" in [c for c in changes if c.what == "codec_up"][-1].reason
    assert not [c for c in changes if "did not help" in c.reason]


def test_updates_follow_a_thin_downlink(parts: list[Any], tmp_path: Path) -> None:
    """36 kB of int4 each 0.4 s do not fit into 70 kB/s; 18 kB of int2 do."""
    settings = {"fragments": 1, "sync_every": 8, "adaptive": "network"}
    syncer = SyncerThread(SyncConfig(**settings), folder=tmp_path)  # type: ignore[arg-type]
    proxy = Proxy(syncer.address, bytes_per_s=70_000, ways=("down",))
    parts += [syncer, proxy]
    learner = TrainingThread(proxy.address, "one", model=small_model(1000), step_s=0.05, seed=7)
    parts.append(learner)
    merged_before = list[int]()

    def read_in_int2(shell: Any) -> bool:
        if shell.machine.book.adaptive.codec_down != "int2":
            return False
        merged_before.append(shell.machine.versions[0])
        return bool(shell.machine.versions[0] > merged_before[0] + 3)

    syncer.wait_for(read_in_int2, "updates in int2, and merges of what came of them")
    learner.stop()
    assert learner.error is None
    syncer.check_ledger()
    syncer.stop()
    changes = of_kind(tmp_path, events.Adapted)
    (down, *_) = [c for c in changes if c.what == "codec_down"]
    assert (down.subject, down.before, down.after) == ("run", "int4", "int2") and "fetching a version" in down.reason
    assert "updates int4 -> int2" in adapted_text(down)


def thin_is_in(folder: Path) -> int:
    """Merges with the thin learner since it was last asked for fewer bits."""
    count = 0
    for _, _, event in read_events(folder):
        if isinstance(event, events.Adapted) and event.subject == "thin":
            count = 0
        elif isinstance(event, events.Committed) and "thin" in event.contributors:
            count += 1
    return count


def test_off_asks_for_nothing_else(parts: list[Any], tmp_path: Path) -> None:
    syncer = SyncerThread(SyncConfig(fragments=1, sync_every=4), folder=tmp_path)
    learner = TrainingThread(syncer.address, "one", step_s=0.02)
    parts += [syncer, learner]
    syncer.wait_for(lambda shell: shell.machine.book.commits >= 3, "three versions")
    assert not of_kind(tmp_path, events.Adapted)
