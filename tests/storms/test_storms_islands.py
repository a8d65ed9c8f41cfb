"""A storm on islands: a rank is frozen, one is killed, an island is killed, and the books add up to the token."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.instruments.chaos import Fault, dump_plan
from atoll.instruments.storms.checks import RunFacts, check_run
from atoll.instruments.storms.injection import StormFaults
from atoll.instruments.storms.plans import planned_faults
from atoll.launch.config import RunConfig, run_config
from atoll.launch.run import run_command
from atoll.observe import events as ev
from atoll.observe import read_events

SCRIPT = str(Path(__file__).parent / "island_script.py")
STEP_S, TOKENS, RANKS = 0.05, 4, 2
PLAN = (
    Fault("freeze", "learner-1", at_s=2.0, lasts_s=4.0, rank=0),
    Fault("kill", "learner-0", at_s=8.0, rank=1),
    Fault("kill", "learner-1", at_s=25.0),
)
MINUTES = 1.0
LIVENESS = "I5"
"""That a learner is merged again within 20 s of the last fault. Starting torchrun with two ranks takes as long on a
busy machine, so how soon an island comes back is not asserted; that it does, is."""


def settings(tmp_path: Path, plan: tuple[Fault, ...] = PLAN, **changes: object) -> RunConfig:
    file = tmp_path / "plan.toml"
    file.write_text(dump_plan(plan))
    return run_config(
        {
            "learners": 2,
            "ranks": RANKS,
            "minutes": MINUTES,
            "storm_minutes": MINUTES,
            "chaos": str(file),
            "sync_every": 8,
            "fragments": 2,
            "threads": 1,
            "record": True,
            "out": str(tmp_path / "run"),
            **changes,
        }
    )


def test_two_islands_of_two_ranks_live_through_their_faults_and_the_ledger_is_exact(tmp_path: Path) -> None:
    config = settings(tmp_path)
    run = run_command(config, [sys.executable, SCRIPT, str(STEP_S), str(TOKENS)], faults=StormFaults())
    logs = "\n".join(path.read_text()[-2000:] for path in sorted((run.folder / "logs").glob("*.log")))
    seen = [event for _, _, event in read_events(run.folder)]
    injected = [(one.fault, one.target, one.detail) for one in seen if isinstance(one, ev.FaultInjected)]
    doc = "SIGKILL; the supervisor restarts the process"
    assert [(fault, target) for fault, target, _ in injected] == [(one.kind, one.target) for one in PLAN], logs
    assert [detail.split(":")[0] for _, _, detail in injected] == ["rank 0", "rank 1", doc.split(":")[0]]
    generations = {
        name: max(one.generation for one in seen if isinstance(one, ev.LearnerJoined) and one.learner == name)
        for name in ("learner-0", "learner-1")
    }
    assert generations == {"learner-0": 2, "learner-1": 2}, f"each island came back once\n{logs}"
    result = json.loads((run.folder / "result.json").read_text())
    ledger = result["ledger"]
    parts = ledger["merged"] + ledger["pending"] + sum(ledger["discarded"].values())
    assert ledger["processed"] == parts and ledger["merged"] > 0 and ledger["processed"] % (RANKS * TOKENS) == 0
    facts = RunFacts(["learner-0", "learner-1"], config.sync.fragments, config.sync.sync_every, STEP_S, RANKS * TOKENS)
    checked = check_run(run.folder, facts)
    broken = [one for one in checked.violations if one.invariant != LIVENESS]
    assert not broken and checked.replay.startswith("identical"), (checked, logs)


def test_faults_of_ranks_that_a_run_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"freeze learner-1 rank 0: the learners of this run have 1 rank each; leave"):
        StormFaults().check(settings(tmp_path, ranks=1))
    with pytest.raises(ConfigError, match="have 2 ranks each"):
        StormFaults().check(settings(tmp_path, (Fault("kill", "learner-0", at_s=1.0, rank=2),)))
    with pytest.raises(ConfigError, match="it cannot hit rank 0; ranks count from 0, and learners have them: use one"):
        Fault("cut", "learner-0", at_s=1.0, rank=0)
    with pytest.raises(ConfigError, match="cannot hit rank 0"):
        Fault("kill", "syncer", at_s=1.0, rank=0)


def test_a_storm_that_is_drawn_for_islands_hits_ranks_and_islands(tmp_path: Path) -> None:
    config = settings(tmp_path, chaos="storm", storm_minutes=20.0, minutes=0.0)
    drawn = [one for one in planned_faults(config) if one.kind in ("kill", "freeze") and one.target != "syncer"]
    assert {one.rank for one in drawn} == {-1, 0, 1}
    alone = planned_faults(settings(tmp_path, chaos="storm", storm_minutes=20.0, minutes=0.0, ranks=1))
    assert all(one.rank == -1 for one in alone), "where learners are one process a seed means what it meant"
