"""Kubernetes: manifests against the published schemas, the shells inside, and what kubectl is asked to do.

There is no cluster here. kubectl itself runs for what it does on this side alone (kustomize, and a client-side dry run,
for which it must be told which kinds there are); for apply and the other verbs a program of that name on PATH writes
down its words, so only the words are tested.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import said
import yaml
from discovery import discovery

from atoll.engines import engine_of, job_from

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERSION = "1.35"
JOB: dict[str, Any] = {
    "run": {"name": "big", "command": "python train.py", "environment": {"X": "y z"}},
    "islands": [
        {"name": "east", "count": 3, "gpus": 8, "ranks": 8, "hardware": "H100", "spot": True, "site": "eu-west1-b"},
        {"name": "west", "count": 1, "gpus": 8, "ranks": 16, "nodes": 2, "memory_gb": 64},
    ],
    "syncer": {"snapshots": "s3://b/r"},
    "k8s": {"monitor": True, "image": "registry.example/atoll:1", "secrets": ["aws"], "storage_class": "fast"},
}


def objects(values: dict[str, Any] = JOB) -> dict[tuple[str, str], dict[str, Any]]:
    found = yaml.safe_load_all(engine_of("k8s", job_from(values)).plan())
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def check(text: str, folder: Path) -> None:
    """Against the schemas of Kubernetes; what it does not know (custom resources) against the facts in schemas/."""
    import kubernetes_validate

    for one in yaml.safe_load_all(text):
        known = HERE / "schemas" / f"{one['kind'].lower()}.json"
        if known.exists():
            jsonschema.validate(one, json.loads(known.read_text()))
            inner = one["spec"].get("replicatedJobs", [])
            for job in inner:
                whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job["template"]}
                kubernetes_validate.validate(whole, VERSION, strict=True)
        elif one["kind"] != "Kustomization":
            kubernetes_validate.validate(one, VERSION, strict=True)


def test_every_manifest_is_what_kubernetes_publishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = engine_of("k8s", job_from(JOB)).plan()
    check(text, tmp_path)
    sharded = {**JOB, "shards": {"count": 2}}
    check(engine_of("k8s", job_from(sharded)).plan(), tmp_path)
    found = objects(sharded)
    command = found["StatefulSet", "big-syncer"]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert "--shards big-shard-0.big-shard:7177,big-shard-1.big-shard:7177" in command
    assert found["Service", "big-shard"]["spec"]["clusterIP"] == "None"
    assert found["StatefulSet", "big-shard"]["spec"]["replicas"] == 2
    shown = found["Secret", "big-syncer-keys"]["stringData"]  # a coordinator is an operator to its shards
    assert "operator.token" in shown and "operator.token" not in found["Secret", "big-shard-keys"]["stringData"]
    kinds = {kind for kind, _ in objects()}
    assert kinds == {
        *("ConfigMap", "Secret", "Service", "StatefulSet", "Job", "JobSet", "PodDisruptionBudget", "ServiceMonitor"),
        "NetworkPolicy",
    }


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here (scripts/debian)")
def test_kubectl_takes_every_object_in_a_client_side_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = engine_of("k8s", job_from({**JOB, "shards": {"count": 2}})).plan()
    (tmp_path / "all.yaml").write_text(text)
    rule = ROOT / "deploy" / "k8s" / "prometheus-rule.yaml"
    with discovery() as server:
        argv = ["kubectl", f"--server={server}", f"--cache-dir={tmp_path / 'cache'}", "create", "--dry-run=client"]
        argv += ["--validate=false", "-o", "yaml", "-f", "all.yaml", "-f", str(rule)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**os.environ, "KUBECONFIG": ""})
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load_all(done.stdout)
    wanted = [*yaml.safe_load_all(text), yaml.safe_load(rule.read_text())]
    assert [(one["kind"], one["metadata"]["name"]) for one in found] == [
        (one["kind"], one["metadata"]["name"]) for one in wanted
    ]


def test_the_rules_for_the_prometheus_operator_are_the_alerts() -> None:
    rule = yaml.safe_load((ROOT / "deploy" / "k8s" / "prometheus-rule.yaml").read_text())
    alerts = yaml.safe_load((ROOT / "deploy" / "monitoring" / "alerts.yml").read_text())
    assert rule["kind"] == "PrometheusRule" and rule["spec"] == alerts


def test_metrics_have_the_role_that_alerts_ask_by_and_only_prometheus_may_ask(tmp_path: Path) -> None:
    found = objects({**JOB, "shards": {"count": 2}})
    for role in ("syncer", "shard"):
        [endpoint] = found["ServiceMonitor", f"big-{role}"]["spec"]["endpoints"]
        assert {"targetLabel": "role", "replacement": role} in endpoint["relabelings"]
        container = found["StatefulSet", f"big-{role}"]["spec"]["template"]["spec"]["containers"][0]
        assert {"name": "ATOLL_METRICS", "value": "0.0.0.0:9477"} in container["env"]
    policy = found["NetworkPolicy", "big-metrics"]["spec"]
    [open_rule, asked] = policy["ingress"]
    assert open_rule == {"ports": [{"port": "grpc"}]} and asked["ports"] == [{"port": "metrics"}] and asked["from"]
    assert 'up{role="syncer"}' in (ROOT / "deploy" / "monitoring" / "alerts.yml").read_text()


def test_nobody_runs_as_root_unless_the_job_says_so() -> None:
    pods = [one["spec"]["template"]["spec"] for (kind, _), one in objects().items() if kind in ("Job", "StatefulSet")]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["fsGroup"] == 1000
        assert pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False
    own = objects({**JOB, "k8s": {"user": 0}})["StatefulSet", "big-syncer"]["spec"]["template"]["spec"]
    assert own["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}


def test_a_relay_stands_in_the_zone_of_its_islands_and_keeps_nothing(tmp_path: Path) -> None:
    values = {**JOB, "relays": {"sites": ["eu-west1-b"]}, "shards": {"count": 1}}
    check(engine_of("k8s", job_from(values)).plan(), tmp_path)
    found = objects(values)
    relay = found["StatefulSet", "big-relay-0"]["spec"]
    pod = relay["template"]["spec"]
    assert "volumeClaimTemplates" not in relay and pod["nodeSelector"]["topology.kubernetes.io/zone"] == "eu-west1-b"
    assert found["Service", "big-relay-0"]["spec"]["ports"][0]["port"] == 7079
    assert ("ServiceMonitor", "big-relay-0") in found
    environment = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert environment["ATOLL_TOKEN_FILE"] == "/etc/atoll/keys/run.token" and "ATOLL_INDEX" not in environment
    east = found["Job", "big-east"]["spec"]["template"]["spec"]["containers"][0]
    assert {one["name"]: one.get("value") for one in east["env"]}["ATOLL_SYNCER"] == "big-relay-0:7079,big-syncer:7077"
    mounts = {one["mountPath"]: one for one in east["volumeMounts"]}
    assert mounts["/etc/atoll/token"]["subPathExpr"] == "run.token"
    assert set(found["Secret", "big-east-keys"]["stringData"]) == {"ca.pem", "run.token"}


def test_a_misspelt_field_would_be_found(tmp_path: Path) -> None:
    import kubernetes_validate

    job = objects()["Job", "big-east"]
    job["spec"]["completion"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        check(yaml.safe_dump(job), tmp_path)


def test_what_a_run_needs_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = objects()
    syncer = found["StatefulSet", "big-syncer"]["spec"]
    assert syncer["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "fast"
    pod = syncer["template"]["spec"]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "aws"}}]
    assert {"livenessProbe", "readinessProbe", "startupProbe"} <= pod["containers"][0].keys()
    east = found["Job", "big-east"]["spec"]
    assert (east["completions"], east["parallelism"], east["completionMode"]) == (3, 3, "Indexed")
    pod = east["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 30 and "preStop" in pod["containers"][0]["lifecycle"]
    assert {one["key"] for one in pod["tolerations"]} >= {"cloud.google.com/gke-spot", "nvidia.com/gpu"}
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "H100", "topology.kubernetes.io/zone": "eu-west1-b"}
    # One island sees its own token and no other's, and nobody but the syncer its key.
    mounts = {one["mountPath"]: one for one in pod["containers"][0]["volumeMounts"]}
    assert mounts["/etc/atoll/token"]["subPathExpr"] == "east-$(ATOLL_INDEX).token"
    assert set(found["Secret", "big-east-keys"]["stringData"]) == {"ca.pem", *(f"east-{i}.token" for i in range(3))}
    names = [one["name"] for one in pod["containers"][0]["env"]]
    assert names[0] == "ATOLL_INDEX" and "ATOLL_TOKEN" not in names
    west = found["JobSet", "big-west-0"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert west["completions"] == 2
    script = west["template"]["spec"]["containers"][0]["command"][2]
    assert "--rdzv-endpoint=" in script and "big-west-0-island-0-0.big-west-0" in script
    assert found["PodDisruptionBudget", "big-east"]["spec"]["minAvailable"] == 2
    assert list(tmp_path.iterdir()) == []  # a dry run makes nothing, keys among it


def shell_of(kind: str, name: str, command: str, tmp_path: Path) -> str:
    """The script of a container with paths of this machine, around another command."""
    found = objects()[kind, name]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    lines = found.replace("/run/atoll", str(tmp_path)).replace("/tmp/atoll-busy", str(tmp_path / "busy")).splitlines()
    lines = [
        line[: line.index("run_child ")] + f"run_child {command}" if "run_child p" in line else line for line in lines
    ]
    return "\n".join(lines)


CHILD = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(0)); "
    "print('up', flush=True); time.sleep(60)"
)


def started(script: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def test_an_island_that_is_taken_away_leaves_and_is_not_done(tmp_path: Path) -> None:
    """Its learner ends with status 0; a pod that succeeded would not come back."""
    process = started(shell_of("Job", "big-east", f'{sys.executable} -c "{CHILD}"', tmp_path))
    assert (tmp_path / "busy").exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143 and not (tmp_path / "busy").exists()
    done = subprocess.run(["sh", "-c", shell_of("Job", "big-east", "true", tmp_path)], timeout=60)
    assert done.returncode == 0
    done = subprocess.run(["sh", "-c", shell_of("Job", "big-east", "false", tmp_path)], timeout=60)
    assert done.returncode == 1


def test_a_syncer_hears_sigterm_only_when_the_job_is_stopped(tmp_path: Path) -> None:
    script = shell_of("StatefulSet", "big-syncer", f'{sys.executable} -c "{CHILD}"', tmp_path)
    process = started(script)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 137  # killed: the run goes on from its last commit in another pod
    process = started(script)
    (tmp_path / "stopping").touch()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0 and (tmp_path / "ended").exists()
    process = subprocess.Popen(["sh", "-c", script])  # the run is over: it stays, so that the model can be fetched
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes down its words and its input; says what a cluster without pods would."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/words\ncase "$*" in *apply*) cat >> {tmp_path}/applied ;; '
        f"*get*) cat {tmp_path}/pods ;; esac\n"
    )
    program.chmod(0o755)
    (tmp_path / "pods").write_text('{"items": []}')
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SYNCER_POD = {
    "metadata": {"name": "big-syncer-0", "labels": {"app.kubernetes.io/component": "syncer"}},
    "spec": {"nodeName": "n1"},
    "status": {"phase": "Running"},
}


def test_what_kubectl_is_asked_to_do(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (kubectl / "job.toml").write_text(
        '[run]\nname = "big"\ncommand = "python t.py"\n[[islands]]\nname = "east"\ncount = 2\n[k8s]\nnamespace = "ml"\n'
    )
    launch = said.command("launch", "k8s", monkeypatch=monkeypatch, capsys=capsys)
    done = launch("job.toml")
    assert done.code == 0, done.stderr
    applied = list(yaml.safe_load_all((kubectl / "applied").read_text()))
    secrets = {one["metadata"]["name"]: one["stringData"] for one in applied if one["kind"] == "Secret"}
    token = (kubectl / "keys" / "tokens" / "east-1.token").read_text()
    assert secrets["big-east-keys"]["east-1.token"] == token and "PRIVATE KEY" in secrets["big-syncer-keys"]["key.pem"]
    early = launch("scale", "job.toml", "3")
    assert early.code == 2 and "the syncer of job big does not run (missing)" in early.stderr
    (kubectl / "pods").write_text(json.dumps({"items": [SYNCER_POD]}))
    assert launch("scale", "job.toml", "3").code == 0 and launch("stop", "job.toml").code == 0
    words = (kubectl / "words").read_text().splitlines()
    assert all(line.startswith("--namespace=ml ") for line in words)
    asked = [line.removeprefix("--namespace=ml ") for line in words]
    assert asked[1] == "apply -f -"
    assert 'patch job big-east --type=merge --patch {"spec": {"completions": 3, "parallelism": 3}}' in asked
    budgets = [one for one in yaml.safe_load_all((kubectl / "applied").read_text()) if one["kind"][:3] == "Pod"]
    assert [one["spec"]["minAvailable"] for one in budgets] == [1, 2]  # two islands, then three
    assert launch("scale", "job.toml", "1").code == 0
    assert "delete poddisruptionbudget big-east --ignore-not-found" in (kubectl / "words").read_text()
    assert "exec big-syncer-0 -- touch /run/atoll/stopping" in asked
    assert asked[-1].startswith("delete job,statefulset,service")
    assert not any(token.strip() in line for line in words)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here (scripts/debian)")
def test_the_kustomize_base_builds_and_is_what_the_example_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "deploy" / "k8s")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout, tmp_path)
    monkeypatch.chdir(ROOT)
    from atoll.engines import read_job

    made = engine_of("k8s", read_job(ROOT / "examples" / "jobs" / "two-islands.toml")).plan()
    base = (ROOT / "deploy" / "k8s" / "two-islands.yaml").read_text()
    assert base == made, "atoll launch k8s examples/jobs/two-islands.toml --dry-run > deploy/k8s/two-islands.yaml"
