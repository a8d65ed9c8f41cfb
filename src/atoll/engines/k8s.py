"""Kubernetes, by kubectl: what `manifests` makes is applied, looked at, patched and deleted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from atoll.engines.files import job_files
from atoll.engines.job import LaunchJob
from atoll.engines.keyring import keys_folder, make_keys, tls_name
from atoll.engines.manifests import STOPPING, labels, manifests, places_of, uses_jobset
from atoll.engines.parts import filled, parts_of
from atoll.engines.protocol import LOG_LINES, PartState, Say, checked_part, learners_of, names_of, syncer_must_run
from atoll.engines.tools import TOOL_S_MAX, run_tool
from atoll.errors import ConfigError, LaunchError

REMEDY = "check `kubectl get pods` with the same context and namespace"
CONFIG_MAP_BYTES_MAX = 900_000
"""Kubernetes takes 1 MiB, with names and all."""
KINDS = "job,statefulset,service,configmap,secret,poddisruptionbudget"
_PHASES = {"Pending": "waiting", "Running": "running", "Succeeded": "ended", "Failed": "failed"}
HIDDEN = "(made when the job is submitted)"


class KubernetesEngine:
    def __init__(self, job: LaunchJob, say: Say) -> None:
        self._job = job
        self._say = say

    def plan(self) -> str:
        return to_yaml(self.objects(secrets=False))

    def objects(self, *, secrets: bool) -> list[dict[str, Any]]:
        """Everything that is applied. Without `secrets` they are named, and what is in them is not."""
        found = job_files(self._job)
        if sum(map(len, found.values())) > CONFIG_MAP_BYTES_MAX:
            raise ConfigError("the job's files do not fit into a ConfigMap; put them into the image")
        try:
            files = {name: data.decode() for name, data in found.items()}
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"the job's files must be text on Kubernetes ({error}); put others into the image"
            ) from None
        name = tls_name(self._job)
        parts = parts_of(self._job, places_of(self._job, name))
        wanted = {filled(key, index) for part in parts for key in part.keys for index in range(max(1, part.count))}
        folder = keys_folder(self._job)
        keys = dict.fromkeys(wanted, HIDDEN)
        if secrets and folder is not None:
            keys = {key: (folder / key).read_text() for key in wanted}
        return manifests(self._job, files, keys, tls_name=name)

    def submit(self) -> None:
        if any(one.state in ("waiting", "running") for one in self.status()):
            raise LaunchError(f"job {self._job.name} is in the cluster already; stop it before it is submitted again")
        places = places_of(self._job, "")
        hosts = [address.rpartition(":")[0] for address in (*places.shards, *places.relays)]
        hosts = [f"{self._job.name}-syncer", *hosts]
        make_keys(self._job, learners_of(self._job), hosts)
        self._apply(self.objects(secrets=True))

    def status(self) -> list[PartState]:
        found: dict[str, PartState] = {}
        for pod in self._pods():
            one = _state(pod)
            if one.name not in found or one.state == "running":
                found[one.name] = one
        names = names_of(self._job)
        missing = [PartState(name, "missing") for name in names if name not in found]
        order = {name: number for number, name in enumerate(names)}
        return sorted([*found.values(), *missing], key=lambda one: (order.get(one.name, len(order)), one.name))

    def scale(self, counts: Mapping[str, int]) -> None:
        """An Indexed Job is elastic: its number of completions and of pods change together, the highest go first."""
        syncer_must_run(self.status(), self._job)
        job = self._job.scaled(counts)
        wanted = KubernetesEngine(job, self._say)
        make_keys(job, [f"{name}-{index}" for name, count in counts.items() for index in range(count)])
        objects = wanted.objects(secrets=True)
        self._apply([one for one in objects if one["kind"] == "Secret"])
        for name, count in counts.items():
            kind = next(part for part in parts_of(job, _anywhere(job)) if part.name == name)
            if uses_jobset(job, kind):
                self._apply([one for one in objects if one["kind"] == "JobSet" and _component(one) == name])
                self._delete_jobsets(name, count)
            else:
                patch = json.dumps({"spec": {"completions": count, "parallelism": count}})
                self._kubectl("patch", "job", f"{job.name}-{name}", "--type=merge", "--patch", patch)
            budget = [one for one in objects if one["kind"] == "PodDisruptionBudget" and _component(one) == name]
            if budget:  # one that is as large as before would let nobody go
                self._apply(budget)
            else:
                self._kubectl("delete", "poddisruptionbudget", f"{job.name}-{name}", "--ignore-not-found")

    def stop(self) -> None:
        """Islands first, each within its grace; then the syncer, which hears that this is the end. Volumes stay: the
        model is in the syncer's."""
        selector = ",".join(f"{name}={value}" for name, value in labels(self._job).items())
        grace = f"--timeout={2 * self._job.k8s.grace_s}s"
        jobset = any(uses_jobset(self._job, part) for part in parts_of(self._job, _anywhere(self._job)))
        kinds = "job,jobset" if jobset else "job"
        orders = ("--selector", selector, "--cascade=foreground", grace, "--ignore-not-found")
        self._kubectl("delete", kinds, *orders, timeout_s=2 * self._job.k8s.grace_s + TOOL_S_MAX)
        with contextlib.suppress(LaunchError):  # there may be no syncer any more
            self._kubectl("exec", f"{self._job.name}-syncer-0", "--", "touch", STOPPING)
        for kinds, which in (("statefulset", f"{selector},app.kubernetes.io/component=syncer"), (KINDS, selector)):
            # The syncer before its shards: it fetches the model from them.
            words = ("delete", kinds, "--selector", which, *orders[2:])
            self._kubectl(*words, timeout_s=2 * self._job.k8s.grace_s + TOOL_S_MAX)
        if self._job.k8s.monitor:
            self._kubectl("delete", "servicemonitor,networkpolicy", "--selector", selector, "--ignore-not-found")
        self._say(f"the volume run-{self._job.name}-syncer-0 is kept: the model is in it")

    def logs(self, name: str, lines: int = LOG_LINES) -> str:
        checked_part(self._job, name)
        pods = [pod["metadata"]["name"] for pod in self._pods() if _state(pod).name == name]
        if not pods:
            raise LaunchError(f"{name} has no pod; `atoll launch k8s status` shows what there is")
        return "\n".join(self._kubectl("logs", pod, f"--tail={lines}") for pod in pods)

    # ------------------------------------------------------------ inside

    def _pods(self) -> list[dict[str, Any]]:
        selector = ",".join(f"{name}={value}" for name, value in labels(self._job).items())
        items: list[dict[str, Any]] = json.loads(self._kubectl("get", "pods", "--selector", selector, "-o", "json"))[
            "items"
        ]
        return items

    def _delete_jobsets(self, name: str, count: int) -> None:
        running = [one.name for one in self.status() if one.name.rpartition("-")[0] == name]
        beyond = [one for one in running if int(one.rpartition("-")[2]) >= count]
        if beyond:
            self._kubectl("delete", "jobset", *(f"{self._job.name}-{one}" for one in beyond), "--ignore-not-found")

    def _apply(self, objects: list[dict[str, Any]]) -> None:
        if said := self._kubectl("apply", "-f", "-", stdin=to_yaml(objects)).strip():
            self._say(said)

    def _kubectl(self, *words: str, stdin: str = "", timeout_s: float = TOOL_S_MAX) -> str:
        own = self._job.k8s
        context = [f"--context={own.context}"] if own.context else []
        argv = ["kubectl", *context, f"--namespace={own.namespace}", *words]
        return run_tool(argv, stdin=stdin, remedy=REMEDY, timeout_s=timeout_s)


def to_yaml(objects: list[dict[str, Any]]) -> str:
    """Documents for kubectl. JSON is YAML too, for whoever has no PyYAML."""
    try:
        import yaml
    except ModuleNotFoundError:
        return "".join(f"---\n{json.dumps(one, indent=2)}\n" for one in objects)
    yaml.add_representer(str, _readable, Dumper=yaml.SafeDumper)
    text: str = yaml.safe_dump_all(objects, sort_keys=False, explicit_start=True, width=200)
    return text


def _readable(dumper: Any, text: str) -> Any:
    """Scripts as blocks."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _state(pod: Mapping[str, Any]) -> PartState:
    meta, status = pod["metadata"], pod.get("status", {})
    component = meta["labels"]["app.kubernetes.io/component"]
    index = meta.get("annotations", {}).get("batch.kubernetes.io/job-completion-index", "")
    if jobset := meta["labels"].get("jobset.sigs.k8s.io/jobset-name"):
        index = jobset.rpartition("-")[2]
    if component == "shard":
        index = meta["name"].rpartition("-")[2]
    name = f"{component}-{index}" if index != "" else component
    waiting = [
        one["state"]["waiting"].get("reason", "")
        for one in status.get("containerStatuses", [])
        if "waiting" in one["state"]
    ]
    detail = " ".join([meta["name"], *waiting])
    return PartState(name, _PHASES.get(status.get("phase", ""), "failed"), pod["spec"].get("nodeName", ""), detail)


def _component(one: Mapping[str, Any]) -> str:
    return str(one["metadata"]["labels"]["app.kubernetes.io/component"])


def _anywhere(job: LaunchJob) -> Any:
    return places_of(job, "")
