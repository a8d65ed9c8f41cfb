"""What else belongs to a run, on its page: shards, relays and a standby, as the syncer sees them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import WAIT_S

sys.path.append(str(Path(__file__).parent.parent / "fabric"))

from shards import sharded_syncer

from atoll.page.status_feed import parts_in


def test_shards_are_shown_and_one_that_dies_is_away(
    tmp_path: Path, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.page.status_feed.PLACES_S", 0.2)
    syncer, shards = sharded_syncer(tmp_path, 2, "--fragments", "2", "--learners", "1")
    try:
        page = serve(syncer.folder)

        def states() -> list[str]:
            return [part[3] for part in httpx.get(f"{page.address}api/run/{syncer.folder.name}/whole").json()["parts"]]

        until(lambda: states() == ["serves", "serves"], states)
        shards[1].kill()
        until(lambda: states()[:1] == ["serves"] and states()[1].startswith("away: "), states)
    finally:
        syncer.stop()
        for shard in shards:
            shard.kill()


def until(condition: Callable[[], bool], seen: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, seen()
        time.sleep(0.2)


def test_relays_and_a_standby_have_a_line_each() -> None:
    learners = [f"l{number}" for number in range(20)]
    found = parts_in(
        {
            "relays": [{"from": "10.0.0.9:4242", "learners": learners, "held": 1}],
            "standby": {"address": "b:7077", "away": "the link is down", "commits": 1200, "bytes": 3_000_000},
        }
    )
    relay, standby = found
    assert relay[:2] == ["relay", "10.0.0.9:4242"] and relay[2].endswith("l11 and 8 more")
    assert standby == ["standby", "b:7077", "1,200 commits, 3 MB sent", "away: the link is down"]
    assert parts_in({"standby": {}}) == []
