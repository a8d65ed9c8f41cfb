"""Storms: learners that come and go under the supervisor, the reckoning of a scorecard, and one small real storm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch_fakes import command, folder_in, supervisor
from safetensors.numpy import save_file

from atoll.errors import ConfigError, LaunchError
from atoll.instruments.chaos import Fault, dump_plan
from atoll.instruments.storms.checks import RunFacts, check_run
from atoll.instruments.storms.files import FaultFiles
from atoll.instruments.storms.injection import ChaosOptions, PlannedFaults, StormFaults
from atoll.instruments.storms.plans import faults_by_share, faults_in_time, planned_faults
from atoll.instruments.storms.recovery_times import recovery_times
from atoll.instruments.storms.scorecard import measure_pace
from atoll.instruments.storms.storm import StormConfig, run_storm
from atoll.launch.config import run_config, train_config
from atoll.launch.faults import NoFaults
from atoll.launch.plan import LaunchPlan, RestartPolicy
from atoll.launch.slot import LearnerSlot
from atoll.launch.train import run_train
from atoll.observe import events as ev
from atoll.observe import read_events
from atoll.observe.lines import encode
from atoll.store import open_store

SECOND_NS = 1_000_000_000
QUICK = RestartPolicy(delay_s=0.05, early_delay_s=0.05, restarts_max=1)


# ---------------------------------------------------------------- restarts


def test_a_learner_that_trained_well_for_a_while_begins_anew(tmp_path: Path) -> None:
    slot = LearnerSlot(command(folder_in(tmp_path), "learner-0", ""))
    policy = RestartPolicy(delay_s=1.0, restarts_max=3, calm_s=60.0)
    for expected_s in (0.0, 1.0, 2.0):
        slot.died(policy, joined=True, lived_s=10.0)
        assert not slot.spent(policy) and slot.pause_s(policy) == expected_s
        slot.row += 1
    slot.died(policy, joined=True, lived_s=59.0)
    assert slot.spent(policy)
    slot.died(policy, joined=True, lived_s=61.0)
    assert not slot.spent(policy) and slot.pause_s(policy) == 0.0
    slot.died(policy, joined=False, lived_s=61.0)
    assert slot.pause_s(policy) == policy.early_delay_s


@pytest.mark.parametrize(("calm_s", "given_up"), [(0.0, ()), (60.0, ("learner-1",))])
def test_deaths_far_apart_do_not_add_up(tmp_path: Path, calm_s: float, given_up: tuple[str, ...]) -> None:
    folder = folder_in(tmp_path)
    dies = "joined(); n = count('deaths'); stepped(10, steps=n, step=n)\nif n < 4: os._exit(1)\n"
    waits = "joined()\nuntil(lambda: exists('deaths') and (run / 'deaths').stat().st_size >= int(sys.argv[1]))"
    needed = "4" if calm_s == 0.0 else "2"
    learners = [command(folder, "learner-0", waits + "\ntime.sleep(0.5)", needed), command(folder, "learner-1", dies)]
    policy = RestartPolicy(delay_s=0.05, early_delay_s=0.05, restarts_max=1, calm_s=calm_s)
    assert supervisor(folder, LaunchPlan(learners, restarts=policy)).run().given_up == given_up


# ---------------------------------------------------------------- learners that come and go


def events_of(path: Path, *kinds: type) -> list[object]:
    return [event for _, _, event in read_events(path) if isinstance(event, kinds)]


def test_an_absent_learner_comes_back_and_a_guest_comes_and_goes(tmp_path: Path) -> None:
    folder, said = folder_in(tmp_path), list[str]()
    politely = "leaves_politely(); joined()\n"
    until_end = "while not exists('end'): stepped(10); time.sleep(0.02)\n"
    learners = [
        # Both others have been there, the one that was away a second time, and the guest has gone again.
        command(
            folder,
            "learner-0",
            "joined(); stepped(10)\nuntil(lambda: exists('second') and exists('guest-left'))\n(run / 'end').touch()",
        ),
        command(folder, "learner-1", "if not first_time(): (run / 'second').touch()\n" + politely + until_end),
    ]
    guest = politely + "try:\n    time.sleep(600)\nfinally:\n    (run / 'guest-left').touch()\n"
    plan = LaunchPlan(
        learners,
        syncer=command(folder, "syncer", "serve()"),
        restarts=QUICK,
        faults=PlannedFaults(
            (Fault("away", "learner-1", at_s=0.3, lasts_s=0.3), Fault("join", "guest-0", at_s=0.3, lasts_s=0.5)),
            folder,
            ChaosOptions(guest=lambda id: command(folder, id, guest)),
        ),
    )
    supervised = supervisor(folder, plan, said)
    outcome = supervised.run()
    supervised._writer.close()
    assert (outcome.reason, outcome.given_up, outcome.left, outcome.silent) == ("finished", (), (), ())
    assert [(one.fault, one.target) for one in outcome.faults] == [("away", "learner-1"), ("join", "guest-0")]
    assert outcome.skipped == () and outcome.restarts == 0
    started = [event.id for event in events_of(folder.path, ev.ProcessStarted)]  # type: ignore[attr-defined]
    assert sorted(started) == ["guest-0", "learner-0", "learner-1", "learner-1", "syncer"]
    assert any("learner-1 left as it was asked to (finished), and will come back" in line for line in said)


def test_faults_reach_only_the_processes_of_a_run_with_chaos(tmp_path: Path) -> None:
    told = "joined(); (run / f'told-{me}').write_text(os.environ.get('ATOLL_POISON_FILE', '-'))"
    for name in ("calm", "chaos"):
        folder = folder_in(tmp_path / name)
        faults = PlannedFaults((), folder) if name == "chaos" else NoFaults()
        supervisor(folder, LaunchPlan([command(folder, "learner-0", told)], faults=faults)).run()
        expected = "-" if name == "calm" else str(FaultFiles(folder.path).poison("learner-0"))
        assert (folder.path / "told-learner-0").read_text() == expected


def test_learners_go_through_a_port_of_their_own(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    told = "joined(); (run / f'address-{me}').write_text(os.environ['ATOLL_SYNCER'])"
    learners = [command(folder, f"learner-{number}", told) for number in range(2)]
    faults = PlannedFaults((), folder, ChaosOptions(proxied=True))
    plan = LaunchPlan(learners, syncer=command(folder, "syncer", "serve()"), faults=faults)
    supervisor(folder, plan).run()
    addresses = {(folder.path / f"address-learner-{number}").read_text() for number in range(2)}
    assert len(addresses) == 2 and "127.0.0.1:1" not in addresses


# ---------------------------------------------------------------- plans


def test_a_storm_of_a_run_with_a_budget_goes_by_shares() -> None:
    timed = faults_in_time("storm", learners=4, seconds=600.0, seed=7)
    shares = faults_by_share("storm", learners=4, seconds=600.0, seed=7)
    assert [(f.kind, f.target) for f in shares] == [(f.kind, f.target) for f in timed]
    assert all(0.0 < fault.at_progress < 1.0 and fault.at_s < 0.0 for fault in shares)
    for fault, share in zip(timed, shares, strict=True):
        assert share.at_progress == pytest.approx(fault.at_s / 600.0)
        assert share.until_progress == pytest.approx(fault.end_s / 600.0 if fault.lasts_s else 0.0)


def test_calm_is_no_faults() -> None:
    assert faults_by_share("calm", learners=1, seconds=60.0, seed=0) == ()
    assert faults_in_time("calm", learners=1, seconds=60.0, seed=0) == ()


def test_a_file_of_faults_is_checked_with_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(dump_plan([Fault("kill", "learner-1", at_s=90.0)]))
    config, _ = train_config({"chaos": "mine.toml", "learners": 2})
    assert Path(config.chaos).is_absolute() and [fault.at_s for fault in planned_faults(config)] == [90.0]
    assert planned_faults(run_config({"chaos": "mine.toml"})) == planned_faults(config)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"chaos": "mine.toml", "steps": 100, "step_ms": 300.0}, "outside this run of 30 s"),
        ({"chaos": "hurricane"}, "chaos must be one of none, demo, storm, calm, or a"),
        ({"chaos": "demo", "learners": 1}, "at least 2 learners"),
        ({"chaos": "calm", "method": "dp"}, "does not survive the loss of a learner"),
        ({"chaos": "demo", "durability": "none"}, r"kills the syncer.*--durability commit"),
    ],
)
def test_settings_that_cannot_be_carried_out_are_refused(
    values: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(dump_plan([Fault("kill", "learner-1", at_s=90.0)]))
    config, _ = train_config(values)
    with pytest.raises(ConfigError, match=words):
        StormFaults().check(config)
    with pytest.raises(ConfigError, match="carries out no faults"):
        run_train(config)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"chaos": "storm", "durability": "none"}, "kills the syncer or fills its disk"),
        ({"chaos": "demo"}, "use --chaos storm"),
        ({"chaos": "storm", "storm_minutes": 0.0}, "storm_minutes must be above 0"),
    ],
)
def test_a_script_refuses_what_cannot_be_carried_out_either(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StormFaults().check(run_config(values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"minutes": 0.0}, "minutes must be from"),
        ({"minutes": float("nan")}, "minutes must be from"),
        ({"learners": 1}, "at least 2"),
        ({"step_ms": 0.0}, "step_ms must be above 0"),
        ({"faults": -1}, "faults must be 0 or more"),
        ({"faults": 3, "plan": "storm.toml"}, "the number in the file counts"),
    ],
)
def test_storms_that_cannot_work_are_refused(values: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StormConfig(**values)  # type: ignore[arg-type]


def test_a_storm_needs_a_twin_of_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match="holds no run"):
        run_storm(StormConfig(minutes=1.0, twin="nowhere"))
    other = StormConfig(minutes=2.0).train(chaos="calm", out=str(tmp_path / "twin"))
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "config.json").write_text(json.dumps(other.options()))
    with pytest.raises(LaunchError, match=r"no twin of this storm .steps 400 instead of 200"):
        run_storm(StormConfig(minutes=1.0, twin="twin"))
    with pytest.raises(LaunchError, match="did not come to its end"):
        run_storm(StormConfig(minutes=2.0, twin="twin"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["twin"]


# ---------------------------------------------------------------- the reckoning


def steps(learner: str, count: int, seconds: float) -> ev.LearnerSteps:
    return ev.LearnerSteps(
        learner=learner,
        generation=1,
        step=count,
        steps=count,
        tokens=10 * count,
        tokens_total=10 * count,
        loss=1.0,
        compute_ns=int(seconds * SECOND_NS),
        stall_ns=0,
        adopt_ns=0,
        snapshot_ns=0,
        overhead_ns=0,
        fragments_behind=0,
    )


def stamped(*timed: tuple[float, ev.Event]) -> list[tuple[int, str, ev.Event]]:
    return [(int((1000 + second) * SECOND_NS), "file", event) for second, event in timed]


def test_what_the_plan_takes_on_purpose_is_accounted_for_and_a_kill_is_not() -> None:
    run = stamped(
        (20.0, ev.FaultInjected("freeze", "learner-0", lasts_s=10.0)),
        (30.0, ev.FaultEnded("freeze", "learner-0")),
        (40.0, ev.FaultInjected("slow", "learner-1", lasts_s=20.0, amount=4.0)),
        (45.0, ev.FaultInjected("freeze", "learner-1", lasts_s=5.0)),
        (50.0, ev.FaultEnded("freeze", "learner-1")),
        (60.0, ev.FaultEnded("slow", "learner-1")),
        (61.0, ev.FaultInjected("kill", "learner-0")),
        (62.0, ev.FaultInjected("partition", "learner-0", lasts_s=10.0)),
        (72.0, ev.FaultEnded("partition", "learner-0")),
        (73.0, ev.FaultInjected("freeze", "syncer", lasts_s=10.0)),
        (75.0, ev.FaultInjected("join", "guest-0", lasts_s=12.0)),
        (83.0, ev.FaultEnded("freeze", "syncer")),
        (87.0, ev.FaultEnded("join", "guest-0")),
        (90.0, ev.FaultInjected("away", "learner-1", lasts_s=5.0)),
        (99.0, ev.FaultEnded("away", "learner-1")),  # late by 4 s: that is our cost
        (100.0, steps("learner-0", 300, 100.0)),
        (100.0, steps("learner-1", 200, 90.0)),
    )
    pace = measure_pace(run, learners=2)
    # 10 of the freeze, 15 x 3/4 of the slow one and 5 of the freeze inside of it, 5 of the absence.
    assert pace.taken_s == pytest.approx(10 + 11.25 + 5 + 5)
    assert pace.added_s == pytest.approx(12.0)
    assert pace.window_s == pytest.approx(100.0)
    assert pace.raw == pytest.approx(5.0)
    assert pace.fair == pytest.approx(500 / (200 - 31.25 + 12))


def committed(version: int, *contributors: str) -> ev.Committed:
    return ev.Committed(
        fragment=0,
        version=version,
        round=version,
        contributors=list(contributors),
        tokens=10,
        merge_ns=1,
        update_bytes=1,
        gradient_norm=1.0,
        rho=0.0,
        checksum=version,
        store_bytes=1,
    )


def test_recovery_is_the_time_to_the_next_commit_with_what_was_hit() -> None:
    run = stamped(
        (1.0, ev.FaultInjected("kill", "learner-0")),
        (1.5, committed(1, "learner-0")),  # of the process that is dead
        (4.0, ev.LearnerJoined("learner-0", 2, 5, 1)),
        (5.0, committed(2, "learner-1")),
        (6.0, committed(3, "learner-0")),
        (7.0, ev.FaultInjected("partition", "learner-1", lasts_s=3.0)),
        (10.0, ev.FaultEnded("partition", "learner-1")),
        (12.0, committed(4, "learner-1")),
        (13.0, ev.FaultInjected("kill", "syncer")),
        (13.1, committed(5, "learner-1")),
        (14.0, ev.SyncerStarted("run", "", 1, 2)),
        (15.0, committed(6, "learner-0")),
        (16.0, ev.FaultInjected("disk_full", "syncer", lasts_s=2.0)),
        (16.5, ev.DurabilityChanged("degraded", "commit", "full")),
        (18.0, ev.FaultEnded("disk_full", "syncer")),
        (21.0, ev.DurabilityChanged("commit", "commit", "mended")),
        (22.0, ev.FaultInjected("kill", "learner-1")),
    )
    times = recovery_times(run)
    assert list(times) == ["kill", "kill syncer", "partition", "disk_full"]
    assert times["kill"] == {"median": 5.0, "max": 5.0, "count": 2, "open": 1}
    assert times["partition"] == {"median": 2.0, "max": 2.0, "count": 1, "open": 0}
    assert times["kill syncer"]["median"] == 2.0
    assert times["disk_full"]["median"] == 3.0


# ---------------------------------------------------------------- the checks


class RecordedRun:
    """A run folder made by hand: two syncers, of which the first was killed after version 2."""

    facts = RunFacts(learners=["learner-0"], fragments=1, sync_every=4, step_s=0.1, tokens_per_step=10)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "events").mkdir(parents=True)
        with open_store(folder / "state") as store:
            for version in (1, 2):
                self._note(store, version, seq=version)
        save_file({"weight": np.ones(3, np.float32)}, folder / "model.safetensors")
        self.first = [ev.SyncerStarted("run", "", 1, 1), committed(1, "learner-0"), committed(2, "learner-0")]
        self.second: list[ev.Event] = [
            ev.SyncerRecovered("slots", True, [2], 20, 1),
            ev.SyncerStarted("run", "", 2, 2),
            committed(3, "learner-0"),
        ]
        self.learner: list[ev.Event] = [steps("learner-0", 3, 1.0), self.adopted(1), self.adopted(2)]
        self.learner += [ev.LearnerFinished("learner-0", 3, 30, "finished")]
        self.stats = ev.SyncerStats(3, 1, 3, 0, 3, 0, 0, 0, 30, 30, 0, {})

    @staticmethod
    def _note(store: object, version: int, *, seq: int) -> None:
        note = {"merge": 0, "version": version, "round": version, "checksum": version}
        store.note({**note, "contributions": [["learner-0", 1, seq]], "weights": [1.0]})  # type: ignore[attr-defined]

    @staticmethod
    def adopted(version: int) -> ev.LearnerAdopted:
        return ev.LearnerAdopted("learner-0", 0, version, True, 1)

    def later_merge(self, seq: int) -> None:
        with open_store(self.folder / "state") as store:
            self._note(store, 3, seq=seq)

    def problems(self) -> list[str]:
        files = {"syncer-1": self.first, "syncer-2": [*self.second, self.stats], "learner-learner-0-1": self.learner}
        for offset, (name, events) in enumerate(files.items()):
            lines = [encode(1000 * (offset + 1) + number, event) for number, event in enumerate(events)]
            (self.folder / "events" / f"{name}.jsonl").write_bytes(b"".join(lines))
        return [str(violation) for violation in check_run(self.folder, self.facts).violations]


def test_a_good_run_has_no_violation(tmp_path: Path) -> None:
    assert RecordedRun(tmp_path).problems() == []


def test_last_words_that_were_lost_with_a_killed_syncer_are_no_violation(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.second[0] = ev.SyncerRecovered("slots", True, [3], 30, 1)
    run.second[2] = committed(4, "learner-0")
    assert run.problems() == []


def test_a_version_that_is_left_out_is_found(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.second[2] = committed(4, "learner-0")
    assert [text for text in run.problems() if text.startswith("I1")]


def test_a_published_version_that_is_lost_is_found(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.second[0] = ev.SyncerRecovered("slots", True, [1], 10, 1)
    run.second[2] = committed(2, "learner-0")
    assert [text for text in run.problems() if text.startswith("I4")]


def test_a_contribution_that_is_merged_twice_is_found(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.later_merge(seq=2)
    assert [text for text in run.problems() if text.startswith("I2")]


def test_a_learner_that_goes_back_is_found(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.learner.append(run.adopted(1))
    assert [text for text in run.problems() if text.startswith("I1")]


@pytest.mark.parametrize(("processed", "merged"), [(30, 20), (40, 40), (20, 20)])
def test_a_wrong_ledger_is_found(tmp_path: Path, processed: int, merged: int) -> None:
    run = RecordedRun(tmp_path)
    run.stats = ev.SyncerStats(3, 1, 3, 0, 3, 0, 0, 0, processed, merged, 0, {})
    assert [text for text in run.problems() if text.startswith("I3")]


def test_a_refusal_without_a_known_code_is_found(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.second.append(ev.ContributionRefused(0, "learner-0", 1, 5, 10, "because", ""))
    assert [text for text in run.problems() if text.startswith("I13")]


def test_a_model_that_is_not_finite_is_found(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    save_file({"weight": np.array([1.0, np.nan], np.float32)}, tmp_path / "model.safetensors")
    assert run.problems() == ["I7: the published model holds NaN or Inf in weight"]


# ---------------------------------------------------------------- for real


def made_twin(folder: Path, config: StormConfig) -> Path:
    """What a twin leaves behind, made by hand: running one would double the time of this test."""
    (folder / "events").mkdir(parents=True)
    options = config.train(chaos="calm", out=str(folder)).options()
    (folder / "config.json").write_text(json.dumps(options))
    (folder / "result.json").write_text(json.dumps({"eval_loss": 2.5, "goodput": 1.0}))
    lines = [encode(SECOND_NS * (1000 + second), steps("learner-0", 30, 1.0)) for second in range(6)]
    (folder / "events" / "learner-learner-0-1.jsonl").write_bytes(b"".join(lines))
    return folder


def test_a_small_storm_from_the_command_line(tmp_path: Path) -> None:
    plan = tmp_path / "storm.toml"
    faults = [
        Fault("cut", "learner-0", at_s=1.0),
        Fault("poison", "learner-1", at_s=1.0, lasts_s=4.0, variant="nan"),
        Fault("freeze", "learner-0", at_s=2.0, lasts_s=1.0),
        Fault("disk_full", "syncer", at_s=2.0, lasts_s=1.0),
    ]
    plan.write_text(dump_plan(faults))
    config = StormConfig(minutes=0.1, learners=2, model="nano", step_ms=60.0, plan=str(plan))
    twin = made_twin(tmp_path / "twin", config)
    argv = [sys.executable, "-m", "atoll", "chaos", "storm", "--minutes", "0.1", "--learners", "2", "--model", "nano"]
    argv += ["--step-ms", "60", "--plan", str(plan), "--twin", str(twin), "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    card = json.loads(done.stdout.splitlines()[-1])
    assert card["fault_kinds"] == {"cut": 1, "disk_full": 1, "freeze": 1, "poison": 1}
    assert (card["faults"], card["violations"], card["ledger_exact"]) == (4, [], True)
    assert card["steps_twin"] == 180 and card["steps"] >= 200
    assert card["loss_ratio"] == pytest.approx(card["loss"] / 2.5)
    assert card["refused"].get("not_finite", 0) > 0
    assert Path(card["run"]).name == "storm" and Path(card["twin"]) == twin
    assert (Path(card["run"]) / "plan.toml").read_text() == (tmp_path / "out" / "plan.toml").read_text()
    assert "every promise held" in done.stderr
    assert json.loads((tmp_path / "out" / "scorecard.json").read_text()) == card
