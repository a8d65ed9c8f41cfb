from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cluster import TrainingThread

from atoll.errors import ConfigError
from atoll.metrics import Tracker, make_writer, metered
from atoll.metrics.endpoint import MeteredWriter
from atoll.metrics.families import LEARNERS_MAX, Families
from atoll.metrics.of_learner import LearnerMetrics
from atoll.metrics.of_parts import RelayMetrics, ShardMetrics
from atoll.metrics.of_syncer import SyncerMetrics
from atoll.observe import EventWriter, NullWriter, read_events
from atoll.observe import events as ev

sys.path.insert(0, str(Path(__file__).parent.parent / "observe"))
from synthetic_run import SyntheticRun

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
WAIT_S = 120.0


def until(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.2)
    return found


def read(address: str, path: str = "metrics") -> str:
    with urllib.request.urlopen(f"http://{address}/{path}", timeout=30) as answer:
        return str(answer.read().decode())


def steps(learner: str, tokens: int = 100) -> ev.LearnerSteps:
    return ev.LearnerSteps(learner, 1, 7, 2, tokens, tokens, 2.5, 10**9, 0, 0, 0, 0, 3)


# ---------------------------------------------------------------- counting


def test_a_thousand_learners_make_a_bounded_number_of_series() -> None:
    families = Families()
    families.counter("atoll_x", "x", "learner")
    families.gauge("atoll_y", "y", "learner")
    for i in range(1000):
        families.add("atoll_x", 1.0, f"learner-{i}")
        families.set("atoll_y", 1.0, f"learner-{i}")
    assert len(families._values["atoll_x"]) == LEARNERS_MAX + 1
    assert families.get("atoll_x", "other") == 1000 - LEARNERS_MAX, "nothing is lost in the sum"
    assert len(families._values["atoll_y"]) == LEARNERS_MAX, "the last of many says nothing of them all"


def test_what_a_syncer_counts() -> None:
    metrics, f = SyncerMetrics(), None
    f = metrics.families
    for event in (
        ev.SyncerStarted("r", "a:1", 1, 3, "commit"),
        ev.MemberChanged("a", 1, "active", ""),
        ev.MemberChanged("b", 1, "active", ""),
        ev.MemberChanged("b", 1, "away", "silent"),
        ev.RoundLaunched(1, 1, 0, 8, ["a"], 2),
        ev.ContributionReceived(1, 0, "a", 1, 1, 50, 8, 800, 1.0, late=False),
        ev.ContributionRefused(0, "b", 1, 1, 800, "outlier", ""),
        ev.Committed(0, 1, 1, ["a"], 800, 1, 50, 1.0, 0.5, 1, store_ns=2 * 10**9),
        ev.DurabilityChanged("degraded", "commit", "disk full"),
        ev.SyncerStats(8, 1, 1, 0, 1, 0, 50, 60, 1000, 800, 100, {"lost": 100}),
    ):
        metrics.take(event)
    assert f.get("atoll_syncer_epoch") == 3 and f.get("atoll_quorum") == 2
    assert f.get("atoll_learners", "active") == 1 and f.get("atoll_learners", "away") == 1
    assert f.get("atoll_learner_up", "b") == 0 and f.get("atoll_learner_up", "a") == 1
    assert f.get("atoll_contributions", "a", "in time") == 1 and f.get("atoll_contributions", "b", "refused") == 1
    assert f.get("atoll_commits") == 1 and f.get("atoll_store_seconds") == 2
    assert f.get("atoll_durability_degraded") == 1 and f.get("atoll_ledger_exact") == 1
    assert f.get("atoll_tokens_discarded", "lost") == 100 and f.get("atoll_transfer_bytes", "down") == 60
    metrics.take(ev.SyncerStats(8, 1, 1, 0, 1, 0, 50, 60, 1000, 800, 99, {"lost": 100}))
    assert f.get("atoll_ledger_exact") == 0


def test_what_a_learner_counts() -> None:
    metrics = LearnerMetrics()
    for event in (
        steps("a"),
        steps("a"),
        ev.LearnerLink("a", up=False),
        ev.LearnerPushed("a", 0, 1, 1, 50, 8, 80, 1, 10**9, "late"),
    ):
        metrics.take(event)
    f = metrics.families
    assert f.get("atoll_learner_tokens", "a") == 200 and f.get("atoll_learner_steps", "a") == 4
    assert f.get("atoll_learner_time_seconds", "a", "compute") == 2.0
    assert f.get("atoll_learner_link_up", "a") == 0 and f.get("atoll_learner_pushes", "a", "late") == 1


def test_a_port_that_is_taken_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    first = metered(NullWriter(), "127.0.0.1:0", role="learner", name="a", folder=None)
    assert isinstance(first, MeteredWriter)
    with EventWriter(tmp_path / "events" / "x.jsonl") as plain:
        second = metered(plain, first.address, role="learner", name="b", folder=None)
        second.emit(steps("b"))
        second.close()
    first.close()
    kinds = [event for _, _, event in read_events(tmp_path)]
    assert isinstance(kinds[0], ev.Warned) and "--metrics" in kinds[0].text and kinds[1] == steps("b")


def test_without_an_address_nothing_stands_in_front_of_the_writer() -> None:
    writer = NullWriter()
    assert metered(writer, "", role="learner", name="a", folder=None) is writer


def test_names_follow_the_convention(tmp_path: Path) -> None:
    """promtool's linter finds names without a unit, counters without _total and texts that are missing."""
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool (apt-get install prometheus)")
    for role in ("syncer", "learner", "shard", "relay"):
        writer = metered(NullWriter(), "127.0.0.1:0", role=role, name="a", folder=tmp_path)
        assert isinstance(writer, MeteredWriter)
        writer.emit(steps('evil"\n\\'))
        text = read(writer.address)
        writer.close()
        assert not list((tmp_path / "metrics").glob("*.json")), "who has ended is not asked any more"
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr + checked.stdout
        assert re.findall(r"^(atoll_\S+?)(?:\{.*)? nan$", text, re.MULTILINE | re.IGNORECASE) == []


# ---------------------------------------------------------------- a real Prometheus


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[str], list[Any]]]:
    if shutil.which("prometheus") is None:
        pytest.skip("needs prometheus (apt-get install prometheus)")
    from ports import quiet_port

    config = tmp_path / "prometheus.yml"
    text = (
        (MONITORING / "prometheus.yml")
        .read_text()
        .replace("15s", "1s")
        .replace("refresh_interval: 10s", "refresh_interval: 1s")
    )
    config.write_text(text.replace("runs/my-run", str(tmp_path / "run")))
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    address = f"127.0.0.1:{quiet_port()}"
    argv = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    process = subprocess.Popen([*argv, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL)

    def ask(query: str) -> list[Any]:
        try:
            answer = json.loads(read(address, f"api/v1/query?query={urllib.parse.quote(query)}"))
        except OSError:
            return []
        return list(answer["data"]["result"])

    yield ask
    process.terminate()
    process.wait(30)


def test_a_real_prometheus_finds_and_scrapes_one_process_of_each_kind(
    tmp_path: Path, prometheus: Callable[[str], list[Any]]
) -> None:
    from ports import quiet_port

    folder = tmp_path / "run"
    places = {role: f"127.0.0.1:{quiet_port()}" for role in ("shard", "syncer", "relay")}
    told = ["--metrics", "127.0.0.1:0", "--metrics-folder", str(folder / "metrics")]

    def start(role: str, *more: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "atoll", role, "--listen", places[role], *more]
        return subprocess.Popen(argv, stdout=subprocess.DEVNULL)

    shard = start("shard", "--run-folder", str(tmp_path / "shard"), *told)
    own = ["--run-folder", str(folder), "--metrics", "127.0.0.1:0", "--plain", "--learners", "1"]
    syncer = start("syncer", *own, "--shards", places["shard"])
    until(lambda: [folder / "syncer.json"] if (folder / "syncer.json").exists() else [])
    relay = start("relay", "--upstream", places["syncer"], *told)
    until(lambda: list((folder / "metrics").glob("relay-*.json")))
    trains = TrainingThread(f"{places['relay']},{places['syncer']}", "paris", step_s=0.02)
    learner = metered(NullWriter(), "127.0.0.1:0", role="learner", name="paris", folder=folder)
    learner.emit(steps("paris", tokens=4096))
    try:
        [found] = until(lambda: prometheus('atoll_build_info{role="syncer"}'))
        assert found["metric"]["job"] == "atoll"
        [tokens] = until(lambda: prometheus('atoll_learner_tokens_total{learner="paris"}'))
        assert float(tokens["value"][1]) == 4096
        until(lambda: prometheus("atoll_disk_free_bytes") and prometheus("atoll_syncer_epoch == 1"))
        until(lambda: prometheus('atoll_shard_led{role="shard"} == 1') and prometheus("atoll_shard_versions_total > 3"))
        until(lambda: prometheus('atoll_relay_learners{role="relay"} == 1'))
        until(lambda: prometheus("atoll_relay_passed_up_bytes_total > 0"))
        syncer.send_signal(signal.SIGKILL)
        until(lambda: prometheus('ALERTS{alertname="AtollSyncerGone"}'))
    finally:
        trains.stop()
        for process in (syncer, shard, relay):
            process.kill()
            process.wait(30)
        learner.close()


def test_rules_and_dashboard_ask_for_metrics_that_exist() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool (apt-get install prometheus)")
    for argv in (
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
        ["check", "config", "prometheus.yml"],
    ):
        done = subprocess.run(["promtool", *argv], cwd=MONITORING, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    known = {
        f"{name}{'_total' if kind == 'counter' else ''}"
        for metrics in (SyncerMetrics(), LearnerMetrics(), ShardMetrics(), RelayMetrics())
        for name, (kind, _, _) in metrics.families._kinds.items()
    }
    known |= {"atoll_disk_free_bytes", "atoll_disk_size_bytes"}
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    asked = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    asked += (MONITORING / "alerts.yml").read_text()
    assert set(re.findall(r"\batoll_\w+", asked)) <= known
    alerts = set(re.findall(r"alert: (\w+)", (MONITORING / "alerts.yml").read_text()))
    assert alerts == set(re.findall(r"alertname: (\w+)", (MONITORING / "alerts_test.yml").read_text()))


# ---------------------------------------------------------------- trackers


def test_the_curves_of_a_run_reach_tensorboard(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = SyntheticRun(seconds=40.0)
    tracker = Tracker(run.write(tmp_path / "run"), make_writer(f"tensorboard:{tmp_path / 'tb'}", "run", {}))
    tracker.poll()
    assert tracker.over
    tracker.close()
    found = event_accumulator.EventAccumulator(str(tmp_path / "tb" / "run"))
    found.Reload()
    published = found.Scalars("loss/published")
    assert published[-1].value < published[0].value and published[-1].step == run.tokens
    assert len(found.Scalars("speed/tokens_per_second")) >= 5


class FakeWandb(ModuleType):
    """wandb's documented init, define_metric, log and finish; it is not installed here."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.logged: list[dict[str, float]] = []
        self.begun: dict[str, Any] = {}
        self.finished = False

    def init(self, *, project: str, name: str, id: str, resume: str, config: dict[str, Any]) -> FakeWandb:
        self.begun = {"project": project, "name": name, "config": config}
        return self

    def define_metric(self, name: str, *, step_metric: str | None = None) -> None:
        assert name == "tokens" or step_metric == "tokens"

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


def test_the_curves_of_a_run_reach_wandb_by_its_documented_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tracker = Tracker(SyntheticRun(seconds=30.0).write(tmp_path), make_writer("wandb:mine", "run", {"seed": 1}))
    tracker.poll()
    tracker.close()
    assert wandb.begun == {"project": "mine", "name": "run", "config": {"seed": 1}} and wandb.finished
    assert "goodput/share" in wandb.logged[-1] and all("tokens" in point for point in wandb.logged)


class FakeMlflow:
    """The documented MlflowClient; MLflow is not installed here."""

    made: FakeMlflow

    def __init__(self) -> None:
        FakeMlflow.made = self
        self.params: dict[str, str] = {}
        self.points: list[tuple[str, float, int, int]] = []
        self.ended = ""
        self.info = type("Info", (), {"run_id": "run-7"})

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return f"id of {name}"

    def create_run(self, experiment_id: str, *, run_name: str) -> FakeMlflow:
        assert experiment_id == "id of mine"
        return self

    def log_param(self, run_id: str, key: str, value: str) -> None:
        self.params[key] = value

    def log_batch(self, run_id: str, *, metrics: list[tuple[str, float, int, int]]) -> None:
        assert run_id == "run-7"
        self.points += metrics

    def set_terminated(self, run_id: str) -> None:
        self.ended = run_id


def test_the_curves_of_a_run_reach_mlflow_by_its_documented_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
    entities.Metric = lambda *values: values  # type: ignore[attr-defined]
    tracking.MlflowClient = FakeMlflow  # type: ignore[attr-defined]
    for name, module in (
        ("mlflow", ModuleType("mlflow")),
        ("mlflow.entities", entities),
        ("mlflow.tracking", tracking),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    tracker = Tracker(SyntheticRun(seconds=30.0).write(tmp_path), make_writer("mlflow:mine", "run", {"seed": 1}))
    tracker.poll()
    tracker.close()
    made = FakeMlflow.made
    assert made.params == {"seed": "1"} and made.ended == "run-7"
    assert {"loss.training", "goodput.share"} <= {point[0] for point in made.points}


def test_a_tracker_that_is_missing_or_unknown_is_said_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        make_writer("wandb", "run", {})
    with pytest.raises(ConfigError, match="give one of"):
        make_writer("comet", "run", {})
