"""A rolling upgrade: one run under load in which every process is replaced by the next release, one after the other."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import WAIT_S, TrainingThread, last_json
from compat_old import OldCode
from ports import quiet_port
from test_compat_runs import OLD_LEARNER, TOKENS, OldSyncer, parts, running, wait_until  # noqa: F401

from atoll.core import PROTOCOL_VERSION
from atoll.launch import compare_builds
from atoll.wire import ClientOptions, fetch_status


class CurrentSyncer:
    """Of this build, in a folder that the old one has left behind."""

    def __init__(self, folder: Path, listen: str) -> None:
        words = [sys.executable, "-m", "atoll", "syncer", "--listen", listen, "--run-folder", str(folder)]
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def status(address: str) -> dict[str, Any]:
    try:
        return asyncio.run(fetch_status(ClientOptions(address)))
    except Exception:  # between two syncers there is none
        return {}


def merged(address: str) -> int:
    return int(status(address).get("tokens_merged", 0))


@pytest.mark.parametrize("old_code", [2], indirect=True)
@pytest.mark.parametrize("order", [("syncer", "a", "b"), ("a", "b", "syncer")], ids=["syncer first", "learners first"])
def test_every_process_is_upgraded_under_load_and_nothing_is_lost(
    order: tuple[str, ...],
    old_code: OldCode,
    parts: list[Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    folder, listen = tmp_path / "run", f"127.0.0.1:{quiet_port()}"
    syncer: Any = OldSyncer(old_code, folder, listen)
    parts.append(syncer)
    stops = {name: tmp_path / f"stop-{name}" for name in "ab"}
    old = {name: old_code.start(OLD_LEARNER, listen, name, "32", str(stops[name])) for name in "ab"}
    taken = 0
    current: dict[str, TrainingThread] = {}

    def goes_on(what: str) -> None:
        before = merged(listen)
        wait_until(lambda: merged(listen) > before + 20 * TOKENS, f"progress after {what}")

    def all_active() -> bool:
        members = {m["learner"]: m["state"] for m in status(listen).get("members", [])}
        return members == {"a": "active", "b": "active"}

    with running(old["a"]), running(old["b"]):
        wait_until(all_active, "both old learners to train", old["a"])
        goes_on("the start")
        for part in order:
            if part == "syncer":
                syncer.process.send_signal(signal.SIGKILL)
                syncer.process.wait()
                syncer = CurrentSyncer(folder, listen)
                parts.insert(0, syncer)
            else:
                stops[part].touch()
                taken += last_json(old[part])["taken"]
                current[part] = TrainingThread(listen, part, step_s=0.02)
                parts.append(current[part])
            wait_until(all_active, f"everybody to train after the upgrade of {part}")
            goes_on(f"the upgrade of {part}")
        told = status(listen)
    text, fits = compare_builds(told)
    assert fits and f"both speak protocol {PROTOCOL_VERSION}" in text
    assert {m["protocol"] for m in told["members"]} == {PROTOCOL_VERSION}
    for learner in current.values():
        learner.stop()
        assert learner.error is None
    finished: Callable[[], bool] = lambda: status(listen)["tokens_pending"] == 0  # noqa: E731
    wait_until(finished, "everything to be merged")
    end = status(listen)
    assert end["tokens_processed"] == (taken + sum(one.taken for one in current.values())) * TOKENS
    assert end["tokens_merged"] == end["tokens_processed"] and not any(end["tokens_discarded"].values())
    syncer.process.send_signal(signal.SIGTERM)
    assert syncer.process.wait(WAIT_S) == 0 and (folder / "model.safetensors").exists()
