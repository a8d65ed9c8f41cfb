"""An operator at the page of a real run: what a key lets him do, and a snapshot when he asks for one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import said
from cluster import WAIT_S, SyncerProcess, TrainingThread

from atoll.core import Role
from atoll.errors import RefusedError
from atoll.keys import KEYS_FILE, issue
from atoll.keys.registry import write_keys
from atoll.store import SnapshotTarget
from atoll.wire import ClientOptions, take_snapshot

TOKEN = "a-token-of-more-than-16-letters"
KEYS = {"a": Role.LEARNER, "eye": Role.OBSERVER, "boss": Role.OPERATOR}


class KeyedRun:
    def __init__(self, folder: Path) -> None:
        self.folder, keys = folder / "run", folder / "keys"
        for path in (self.folder, keys):
            path.mkdir()
        write_keys(keys / KEYS_FILE, {})
        tokens = {name: issue(keys, name, role) for name, role in KEYS.items()}
        self.syncer = SyncerProcess(self.folder, "--keys", str(keys), "--fragments", "2", "--sync-every", "2")
        self.options = {name: ClientOptions(self.syncer.address, token=token) for name, token in tokens.items()}
        self.learner = TrainingThread(self.syncer.address, "a", token=tokens["a"], step_s=0.02)

    def close(self) -> None:
        self.learner.stop()
        self.syncer.stop()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[KeyedRun]:
    run = KeyedRun(tmp_path)
    run.learner.wait_steps(10)
    yield run
    run.close()


def act(page: Any, action: str, learner: str = "") -> httpx.Response:
    own = {"Origin": page.address.rstrip("/"), "Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    name = httpx.get(f"{page.address}api/runs", headers=own).json()["runs"][0]
    httpx.get(f"{page.address}api/run/{name}/whole", headers=own)
    body = json.dumps({"action": action, "learner": learner})
    return httpx.post(f"{page.address}api/run/{name}/control", content=body, headers=own, timeout=60)


def test_only_an_operators_key_acts_and_a_snapshot_is_written_when_it_asks(
    run: KeyedRun, serve: Callable[..., Any]
) -> None:
    for name in ("eye", "a"):
        page = serve(run.folder, token=TOKEN, control=True, syncer=run.options[name])
        for action in ("snapshot", "drain", "kill", "add", "stop"):
            answer = act(page, action, "a")
            assert answer.status_code == 409 and "is no operator's" in answer.json()["error"], (name, action)
        with pytest.raises(RefusedError, match="--role operator"):
            asyncio.run(take_snapshot(run.options[name]))
    page = serve(run.folder, token=TOKEN, control=True, syncer=run.options["boss"])
    first, second = act(page, "snapshot"), act(page, "snapshot")
    assert first.status_code == second.status_code == 200, first.text
    assert "is written to" in first.json()["said"] and first.json() != second.json()
    loaded, problems = SnapshotTarget(str(run.folder / "snapshots")).load_newest()
    assert loaded is not None and problems == [] and len(loaded.fragments) == 2
    wanted = ('"snapshot_written"', "the operator asked for a snapshot")
    deadline_s = time.monotonic() + WAIT_S
    while not all(text in written(run.folder) for text in wanted):
        assert time.monotonic() < deadline_s, written(run.folder)[-2000:]
        time.sleep(0.2)


def written(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("events/*.jsonl"))


def test_a_page_that_knows_only_an_address_offers_what_the_syncer_can_do(
    run: KeyedRun, serve: Callable[..., Any]
) -> None:
    page = serve(run.syncer.address, token=TOKEN, control=True, syncer=run.options["boss"])
    told = httpx.get(f"{page.address}api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    assert told["control"] == ["drain", "snapshot"]
    assert "is written to" in act(page, "snapshot").json()["said"]
    assert "with the run folder, where it runs" in act(page, "stop").json()["error"]


def test_a_snapshot_by_hand_and_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = said.command("snapshot", monkeypatch=monkeypatch, capsys=capsys)
    syncer = SyncerProcess(tmp_path, "--fragments", "2", "--sync-every", "2")
    learner = None
    try:
        early = ask(tmp_path)
        assert early.code == 2 and "no parameters yet" in early.stderr
        learner = TrainingThread(syncer.address, "a", step_s=0.02)
        learner.wait_steps(10)
        done = ask(tmp_path)
        assert done.code == 0 and f"is written to {tmp_path}/snapshots" in done.stdout, done
    finally:
        if learner is not None:
            learner.stop()
        syncer.stop()
    assert len(list((tmp_path / "snapshots").iterdir())) == 1  # asked for once, and none by itself
