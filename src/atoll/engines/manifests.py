"""A job as Kubernetes objects, as plain data: `k8s` hands them to kubectl, `--dry-run` prints them.

The syncer is a StatefulSet with a volume, as shards are; a relay is one without. Each kind of islands is an Indexed Job
(elastic: it scales), an island of several nodes a JobSet. Containers run a small shell that makes the two ends of a run
right. An island that is told to go leaves in order and then *fails*, or Kubernetes would count it as done. A syncer
that is told to go is killed, because SIGTERM would end the run; only after `stop` it hears it. When the run is over it
stays, so that the model can be fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.engines.job import LaunchJob
from atoll.engines.parts import HEAD, INDEX, JobPart, Places, filled, parts_of, settings_text
from atoll.engines.shell import RUN_CHILD, command_line

RUN = "/run/atoll"
KEYS = "/etc/atoll/keys"
SETTINGS = "/etc/atoll/settings"
FILES = "/workspace"
TOKEN = "/etc/atoll/token"
STOPPING, ENDED, BUSY = f"{RUN}/stopping", f"{RUN}/ended", "/tmp/atoll-busy"
RETRIES_PER_INDEX = 20
"""How often one island may fail; being taken away does not count."""
JOBSET_RESTARTS = 20
SPOT_TAINTS = ("cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority", "karpenter.sh/capacity-type")
"""Taints that clouds put on machines that they may take back."""
INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
POD_INDEX_FIELD = "metadata.labels['apps.kubernetes.io/pod-index']"
LEAVE = ["sh", "-c", f"kill -TERM 1; while [ -e {BUSY} ]; do sleep 0.5; done"]
"""preStop: leaving begins at once, and the time that it takes is inside terminationGracePeriodSeconds."""
CONNECT = 'import socket, sys; socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5)'
"""Alive means that somebody takes connections, or that the run is over."""
Object = dict[str, Any]


def places_of(job: LaunchJob, tls_name: str) -> Places:
    return Places(
        run=RUN,
        keys=KEYS if job.syncer.has_keys else "",
        settings=f"{SETTINGS}/settings.json",
        syncer=job.syncer.address or f"{job.name}-syncer:{job.syncer.port}",
        tls_name=tls_name,
        shards=tuple(f"{job.name}-shard-{i}.{job.name}-shard:{job.shards.port}" for i in range(job.shards.count)),
        relays=job.relays.addresses
        or tuple(f"{job.name}-relay-{i}:{job.relays.port}" for i in range(len(job.relays.sites))),
    )


def manifests(job: LaunchJob, files: Mapping[str, str], keys: Mapping[str, str], *, tls_name: str) -> list[Object]:
    """`files` by name; `keys` the content of key files by their path in the keys' folder."""
    parts = parts_of(job, places_of(job, tls_name))
    found = [_config(job, files), *(_secret(job, part, keys) for part in parts if part.keys)]
    for part in parts:
        if part.role != "island":
            found += [_service(job, part), _stateful_set(job, part)]
        elif uses_jobset(job, part):
            found += [_jobset(job, part, index) for index in range(part.count)]
        else:
            found.append(_indexed_job(job, part))
        if part.role == "island" and part.count > 1:
            found.append(_budget(job, part))
    served = [part for part in parts if part.role != "island"]
    return found + ([_monitor(job, part) for part in served] + [_scraped_only(job, served)] if job.k8s.monitor else [])


def uses_jobset(job: LaunchJob, part: JobPart) -> bool:
    return job.k8s.jobset or part.nodes > 1


# ---------------------------------------------------------------- small objects


def _meta(job: LaunchJob, part: str, component: str = "") -> Object:
    return {"name": f"{job.name}-{part}", "namespace": job.k8s.namespace, "labels": labels(job, component or part)}


def labels(job: LaunchJob, component: str = "") -> dict[str, str]:
    own = {"app.kubernetes.io/name": "atoll", "app.kubernetes.io/instance": job.name}
    return {**own, **({"app.kubernetes.io/component": component} if component else {})}


def _config(job: LaunchJob, files: Mapping[str, str]) -> Object:
    data = {"settings.json": settings_text(job), **files}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(job, "files"), "data": data}


def secret_name(job: LaunchJob, part: JobPart) -> str:
    return f"{job.name}-{part.name}-keys"


def _secret(job: LaunchJob, part: JobPart, keys: Mapping[str, str]) -> Object:
    """Only what this part may know. An island's container sees its own token alone (`_mounts`)."""
    names = [filled(name, index) for name in part.keys for index in range(max(1, part.count))]
    data = {name.rpartition("/")[2]: keys.get(name, "") for name in dict.fromkeys(names)}
    meta = _meta(job, f"{part.name}-keys", part.name)
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "stringData": data}


def _service(job: LaunchJob, part: JobPart) -> Object:
    ports: list[Object] = [{"name": "grpc", "port": _port(job, part), "targetPort": "grpc"}]
    if job.k8s.monitor:
        ports.append({"name": "metrics", "port": job.k8s.metrics_port, "targetPort": "metrics"})
    # Learners wait for a syncer that is not ready yet anyhow, and a name that always leads somewhere is quicker.
    spec: Object = {"selector": labels(job, part.name), "ports": ports, "publishNotReadyAddresses": True}
    if part.role == "shard":
        spec["clusterIP"] = "None"  # each has a name of its own
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(job, part.name), "spec": spec}


def _port(job: LaunchJob, part: JobPart) -> int:
    return {"syncer": job.syncer.port, "shard": job.shards.port, "relay": job.relays.port}[part.role]


def _budget(job: LaunchJob, part: JobPart) -> Object:
    """Drains and upgrades of nodes take at most half of the islands at a time. (For Jobs it must be a number.)"""
    spec = {"minAvailable": (part.count + 1) // 2, "selector": {"matchLabels": labels(job, part.name)}}
    meta = _meta(job, part.name)
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": meta, "spec": spec}


def _monitor(job: LaunchJob, part: JobPart) -> Object:
    """The label `role` is what the alerts ask by."""
    endpoint: Object = {"port": "metrics", "interval": "15s"}
    endpoint["relabelings"] = [{"targetLabel": "role", "replacement": part.role}]
    spec = {"selector": {"matchLabels": labels(job, part.name)}, "endpoints": [endpoint]}
    meta = _meta(job, part.name)
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor", "metadata": meta, "spec": spec}


def _scraped_only(job: LaunchJob, parts: Sequence[JobPart]) -> Object:
    """Metrics have neither token nor TLS: pods of the namespaces that are labelled for it may ask, and nobody else.
    Everything that may speak to the other ports may do so as before: those have both."""
    asked: Object = {"ports": [{"port": "metrics"}]}
    asked["from"] = [{"namespaceSelector": {"matchLabels": dict(job.k8s.metrics_namespace)}}]
    names = {"key": "app.kubernetes.io/component", "operator": "In", "values": [part.name for part in parts]}
    spec = {
        "podSelector": {"matchLabels": labels(job), "matchExpressions": [names]},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": "grpc"}]}, asked],
    }
    meta = _meta(job, "metrics")
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": spec}


# ---------------------------------------------------------------- what runs


def _stateful_set(job: LaunchJob, part: JobPart) -> Object:
    claim: Object = {"accessModes": ["ReadWriteOnce"]}
    claim["resources"] = {"requests": {"storage": f"{job.syncer.disk_gb}Gi"}}
    claim |= {"storageClassName": job.k8s.storage_class} if job.k8s.storage_class else {}
    container = _container(job, part, _syncer_shell(job, part) if part.role == "syncer" else _plain_shell(job, part))
    container["ports"] = [{"name": "grpc", "containerPort": _port(job, part)}]
    if job.k8s.monitor:
        container["ports"].append({"name": "metrics", "containerPort": job.k8s.metrics_port})
    container["readinessProbe"] = {"tcpSocket": {"port": "grpc"}, "periodSeconds": 5}
    look = {"exec": {"command": ["sh", "-c", f"[ -e {ENDED} ] || {job.run.python} -c '{CONNECT}' {_port(job, part)}"]}}
    container["livenessProbe"] = {**look, "periodSeconds": 60, "timeoutSeconds": 30}
    container["startupProbe"] = {**look, "periodSeconds": 5, "timeoutSeconds": 30, "failureThreshold": 120}
    if job.k8s.secrets and part.role == "syncer":
        container["envFrom"] = [{"secretRef": {"name": name}} for name in job.k8s.secrets]
    spec: Object = {
        "serviceName": f"{job.name}-{part.name}",
        "replicas": part.count,
        "selector": {"matchLabels": labels(job, part.name)},
        "template": _pod(job, part, container, restart="Always"),
    }
    if part.role != "relay":  # which keeps nothing
        spec["volumeClaimTemplates"] = [{"metadata": {"name": "run"}, "spec": claim}]
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": _meta(job, part.name), "spec": spec}


def _indexed_job(job: LaunchJob, part: JobPart) -> Object:
    template = _pod(job, part, _container(job, part, _island_shell(job, part, "$ATOLL_INDEX")), restart="Never")
    spec = {
        "completionMode": "Indexed",
        "completions": part.count,
        "parallelism": part.count,
        "backoffLimitPerIndex": RETRIES_PER_INDEX,
        "podFailurePolicy": {
            "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": template,
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _meta(job, part.name), "spec": spec}


def _jobset(job: LaunchJob, part: JobPart, index: int) -> Object:
    """One island as a whole: if one of its pods fails, all begin again."""
    name = f"{part.name}-{index}"
    head = f"{job.name}-{name}-island-0-0.{job.name}-{name}"
    container = _container(job, part, _island_shell(job, part, str(index), head), index=str(index))
    inner = {
        "completionMode": "Indexed",
        "completions": part.nodes,
        "parallelism": part.nodes,
        "backoffLimit": 0,
        "template": _pod(job, part, container, restart="Never"),
    }
    spec = {
        "network": {"enableDNSHostnames": True},
        "failurePolicy": {"maxRestarts": JOBSET_RESTARTS},
        "replicatedJobs": [{"name": "island", "replicas": 1, "template": {"spec": inner}}],
    }
    meta = _meta(job, name, part.name)
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": meta, "spec": spec}


def _pod(job: LaunchJob, part: JobPart, container: Object, *, restart: str) -> Object:
    own = job.k8s
    spec: Object = {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": own.grace_s,
        "automountServiceAccountToken": False,
        "securityContext": _security(job),
        "containers": [container],
        "volumes": _volumes(job, part),
    }
    selector = {**own.node_selector, **({own.gpu_label: part.hardware} if part.hardware else {})}
    selector |= {"topology.kubernetes.io/zone": part.site} if part.site else {}
    spec |= {"nodeSelector": selector} if selector else {}
    spec |= {"serviceAccountName": own.service_account} if own.service_account else {}
    spec |= {"imagePullSecrets": [{"name": own.pull_secret}]} if own.pull_secret else {}
    taints = [*(SPOT_TAINTS if part.spot else ()), *(["nvidia.com/gpu"] if part.gpus else [])]
    spec |= {"tolerations": [{"key": key, "operator": "Exists"} for key in taints]} if taints else {}
    return {"metadata": {"labels": labels(job, part.name)}, "spec": spec}


def _security(job: LaunchJob) -> Object:
    """Nobody needs to be root. The group owns the volumes, so that whoever the image runs as can write there."""
    user = job.k8s.user
    own = {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user} if user else {}
    return {**own, "seccompProfile": {"type": "RuntimeDefault"}}


def _container(job: LaunchJob, part: JobPart, script: str, index: str = "") -> Object:
    size: Object = {"cpu": str(part.cpus), **({"memory": f"{part.memory_gb:g}Gi"} if part.memory_gb else {})}
    return {
        "name": part.role,
        "image": job.k8s.image,
        "command": ["sh", "-c", script],
        "workingDir": job.run.workdir or FILES,
        "env": _environment(job, part, index),
        "resources": {"requests": size, **({"limits": {"nvidia.com/gpu": str(part.gpus)}} if part.gpus else {})},
        "volumeMounts": _mounts(part, index),
        "lifecycle": {"preStop": {"exec": {"command": LEAVE}}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _environment(job: LaunchJob, part: JobPart, index: str) -> list[Object]:
    """Kubernetes puts $(ATOLL_INDEX) in, which it must have heard of before."""
    field = POD_INDEX_FIELD if part.role == "shard" else INDEX_FIELD
    number: Object = {"value": index} if index else {"valueFrom": {"fieldRef": {"fieldPath": field}}}
    values = dict(part.environment)
    if "ATOLL_TOKEN_FILE" in values:  # a Secret has no folders
        name = values["ATOLL_TOKEN_FILE"].rpartition("/")[2]
        values["ATOLL_TOKEN_FILE"] = TOKEN if part.role == "island" else f"{KEYS}/{name}"
    if job.k8s.monitor and part.role != "island":
        values["ATOLL_METRICS"] = f"0.0.0.0:{job.k8s.metrics_port}"
    rest = [{"name": name, "value": filled(value, index or "$(ATOLL_INDEX)")} for name, value in values.items()]
    return [*([{"name": "ATOLL_INDEX", **number}] if not part.is_alone else []), *rest]


def _volumes(job: LaunchJob, part: JobPart) -> list[Object]:
    volumes: list[Object] = [{"name": "files", "configMap": {"name": f"{job.name}-files"}}]
    volumes.append({"name": "tmp", "emptyDir": {}})
    if part.role in ("island", "relay"):
        volumes.append({"name": "run", "emptyDir": {}})
    if part.keys:
        volumes.append({"name": "keys", "secret": {"secretName": secret_name(job, part), "defaultMode": 0o440}})
    return volumes


def _mounts(part: JobPart, index: str) -> list[Object]:
    mounts: list[Object] = [{"name": "files", "mountPath": FILES}, {"name": "files", "mountPath": SETTINGS}]
    mounts += [{"name": "run", "mountPath": RUN}, {"name": "tmp", "mountPath": "/tmp"}]
    if part.keys and part.role != "island":
        mounts.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
    elif part.keys:
        own = filled(part.keys[-1].rpartition("/")[2], index or "$(ATOLL_INDEX)")
        mounts.append({"name": "keys", "mountPath": f"{KEYS}/ca.pem", "subPath": "ca.pem", "readOnly": True})
        mounts.append({"name": "keys", "mountPath": TOKEN, "subPathExpr": own, "readOnly": True})
    return mounts


# ---------------------------------------------------------------- shells inside the containers


def _island_shell(job: LaunchJob, part: JobPart, index: str, head: str = "") -> str:
    command = command_line(part.argv, {INDEX: index, HEAD: head})
    return (
        f"{job.run.setup}\n{RUN_CHILD}touch {BUSY}\nrun_child {command}\nrm -f {BUSY}\n"
        'if [ -n "$told" ]; then exit 143; fi\nexit "$code"\n'
    ).lstrip()


def _plain_shell(job: LaunchJob, part: JobPart) -> str:
    command = command_line(part.argv, {INDEX: "$ATOLL_INDEX"})
    return f'{job.run.setup}\n{RUN_CHILD}touch {BUSY}\nrun_child {command}\nrm -f {BUSY}\nexit "$code"\n'.lstrip()


def _syncer_shell(job: LaunchJob, part: JobPart) -> str:
    return (
        f"{job.run.setup}\n{RUN_CHILD}"
        f'pass_on() {{ told=1; how=KILL; [ ! -e {STOPPING} ] || how=TERM; [ -z "$child" ] || kill -$how "$child"; }}\n'
        f"if [ ! -e {ENDED} ]; then\n  rm -f {STOPPING}; touch {BUSY}\n  run_child {command_line(part.argv, {})}\n"
        f'  rm -f {BUSY}\n  [ "$code" -eq 0 ] || exit "$code"\n  touch {ENDED}\nfi\n'
        'while [ -z "$told" ]; do sleep 1; done\n'  # the run is over: the model is there until the job is stopped
    ).lstrip()
