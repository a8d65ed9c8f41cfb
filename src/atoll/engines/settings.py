"""What only one engine knows: the tables [slurm], [k8s], [ray] and [ssh] of a job file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """[slurm]"""

    partition: str = ""
    spot_partition: str = ""
    """For islands that are spot; empty: the same as the others."""
    syncer_partition: str = ""
    """One that is not preempted; empty: the same as the islands."""
    account: str = ""
    qos: str = ""
    time: str = ""
    """Time limit of one job, as Slurm writes it: 1-00:00:00. Islands leave in order before it and come back."""
    leave_s: int = 120
    """Seconds before the time limit at which an island is told to leave."""
    options: tuple[str, ...] = ()
    """More options of sbatch, such as --reservation=x."""


@dataclass(frozen=True, slots=True)
class K8sSettings:
    """[k8s]"""

    image: str = "atoll:latest"
    namespace: str = "default"
    storage_class: str = ""
    """For the syncer's volume; empty: the cluster's default."""
    pull_secret: str = ""
    service_account: str = ""
    jobset: bool = False
    """JobSet (jobset.x-k8s.io) for islands, also for those of one node; those of several nodes always use it."""
    monitor: bool = False
    """A ServiceMonitor for the Prometheus operator; syncer and shards serve metrics at `metrics_port`. They have
    neither token nor TLS, so that a NetworkPolicy lets only `metrics_namespace` ask."""
    metrics_port: int = 9477
    metrics_namespace: Mapping[str, str] = field(default_factory=lambda: {"kubernetes.io/metadata.name": "monitoring"})
    """Labels of the namespace that Prometheus is in."""
    user: int = 1000
    """Whom the containers run as; 0: whomever the image says."""
    gpu_label: str = "nvidia.com/gpu.product"
    """The node label that an island's `hardware` is looked up in."""
    grace_s: int = 60
    """How long a pod may take to leave: a learner hands over within 20 s."""
    context: str = ""
    """Of kubectl; empty: the current one."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Secrets of yours whose entries the syncer gets as environment, such as AWS credentials for snapshots."""


@dataclass(frozen=True, slots=True)
class RaySettings:
    """[ray]"""

    address: str = "auto"
    namespace: str = "atoll"
    folder: str = ""
    """Run folder on the nodes; empty: that of [run]. On a shared file system a syncer that is moved keeps its state;
    without one it goes on from `snapshots` and from what learners hold."""
    wait_s: float = 3600.0
    """How long an island that has a node waits for its syncer, which may wait for the autoscaler; then it fails."""


@dataclass(frozen=True, slots=True)
class SshSettings:
    """[ssh]"""

    hosts: tuple[str, ...] = ()
    """Names as `ssh NAME` takes them."""
    hosts_file: str = ""
    """A file with one such name per line, in addition."""
    config: str = ""
    """A configuration file for ssh (-F)."""
    folder: str = ""
    """On the hosts; empty: atoll/NAME in the home."""
    restarts: int = 10
    """How often in a row a process that fails is started again."""
