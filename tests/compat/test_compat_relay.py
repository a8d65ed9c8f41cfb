"""A relay of this release between parties of the previous one: shards and relays are new, learners and syncers are not.

An old learner knows nothing of relays, and an old syncer lets none merge: the relay then passes everything on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import TrainingThread, last_json
from compat_old import OldCode
from test_compat_runs import OLD_LEARNER, SETTINGS, TOKENS, OldSyncer, parts, running, wait_until  # noqa: F401

sys.path.append(str(Path(__file__).parent.parent / "fabric"))

from cluster import SyncerThread
from test_relay import RelayProcess

from atoll.core import SyncConfig


class Relay(RelayProcess):
    def stop(self) -> None:
        self.kill()


@pytest.mark.parametrize("old_code", [2], indirect=True)
def test_an_old_learner_trains_through_a_relay_beside_a_current_one(
    old_code: OldCode,
    parts: list[Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    syncer = SyncerThread(SyncConfig.from_dict(SETTINGS))
    parts.append(syncer)
    relay = Relay(syncer.address, tmp_path / "relay.log")
    parts.append(relay)
    places, stop = f"{relay.address},{syncer.address}", tmp_path / "stop"
    current = TrainingThread(places, "current", step_s=0.02)
    parts.append(current)
    with running(old_code.start(OLD_LEARNER, places, "older", "32", str(stop))) as older:
        wait_until(lambda: relay.status()["learners"] == ["current", "older"], "both at the relay", older)
        wait_until(lambda: tokens_of(syncer, "older") > 20 * TOKENS, "steps of the old one", older)
        stop.touch()
        taken = last_json(older)["taken"]
    current.stop()
    assert current.error is None
    totals = syncer.check_ledger()
    assert totals["tokens_processed"] == (taken + current.taken) * TOKENS


def tokens_of(syncer: SyncerThread, learner: str) -> int:
    return int(syncer.ask(lambda shell: sum(m.tokens for n, m in shell.machine.members.items() if n == learner)))


@pytest.mark.parametrize("old_code", [2], indirect=True)
def test_current_learners_train_through_a_relay_under_an_old_syncer(
    old_code: OldCode,
    parts: list[Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    syncer = OldSyncer(old_code, tmp_path / "old")
    parts.append(syncer)
    relay = Relay(syncer.address, tmp_path / "relay.log")
    parts.append(relay)
    learners = [TrainingThread(relay.address, f"l{i}", seed=i, steps=60) for i in range(2)]
    parts += learners
    wait_until(lambda: relay.status()["learners"] == ["l0", "l1"], "both at the relay")
    assert not relay.status()["merges"]  # an old syncer takes single contributions only
    for learner in learners:
        learner.thread.join(120)
        assert not learner.thread.is_alive() and learner.error is None
    status = syncer.wait_for(lambda s: s["tokens_pending"] == 0, "everything merged")
    assert status["tokens_merged"] == status["tokens_processed"] == 2 * 60 * TOKENS
    syncer.finish()
