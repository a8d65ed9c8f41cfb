"""A Ray cluster of several nodes in this network namespace: a run, a lost node, a new node, more islands, the end.

Run by test_engine_ray.py; the last line of output says that all of it happened.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray
from engine_runs import SCRIPT, changes, commits, contributors, processes
from ray.cluster_utils import Cluster
from slurm_cluster import wait_until

from atoll.engines import Engine, engine_of, job_from

QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 2000}
MEMORY = 100 << 20


def parents(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def states(engine: Engine) -> dict[str, str]:
    return {one.name: one.state for one in engine.status()}


def main(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT)
    config = {**QUICK, "health_check_failure_threshold": 5}
    head = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False, "_system_config": config}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=MEMORY) for _ in range(2)]
    ray.init(address=cluster.address, namespace="atoll", log_to_driver=False, logging_level="ERROR")
    job = job_from(
        {
            "run": {
                "name": "tale",
                "command": f"python train.py {folder}/finish",
                "files": [str(folder / "train.py")],
                "folder": str(folder / "run"),
                "sync_every": 4,
                "fragments": 2,
            },
            "islands": [{"name": "east", "count": 2}],
            "syncer": {"listen": "127.0.0.1:0", "keys": str(folder / "keys"), "cpus": 1},
            "ray": {"address": cluster.address},
        }
    )
    run = folder / "run"

    def logs() -> str:
        return f"{engine.status()}" + "".join(f"\n== {p.name}\n{p.read_text()[-1500:]}" for p in run.glob("logs/*.log"))

    engine = engine_of("ray", job, print)
    engine.submit()
    wait_until(lambda: contributors(run) == {"east-0", "east-1"}, "both islands in commits", logs)
    assert set(states(engine).values()) == {"running"}

    # A node with an island is lost. There is no room for it elsewhere, so it waits for the next node.
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in nodes}
    pids = {one.name: int(one.detail.split()[1].rstrip(",")) for one in engine.status() if one.name != "syncer"}
    lost, node = next((n, raylets[p]) for n, pid in pids.items() for p in parents(pid) if p in raylets)
    cluster.remove_node(node, allow_graceful=False)
    nodes.remove(node)
    wait_until(lambda: states(engine)[lost] == "waiting", f"{lost} to wait for a node", logs)
    seen = commits(run)
    wait_until(lambda: commits(run) > seen + 4, "the others to go on without it", logs)
    nodes.append(cluster.add_node(num_cpus=2, object_store_memory=MEMORY))
    seen = commits(run)
    wait_until(lambda: contributors(run, seen) == {"east-0", "east-1"}, f"{lost} to come back", logs)

    engine.scale({"east": 3})
    wait_until(lambda: "east-2" in contributors(run), "a third island", logs)
    engine.scale({"east": 2})
    assert ("left", "SIGTERM") in changes(run, "east-2"), changes(run, "east-2")
    assert "east-2" not in states(engine)

    engine.stop()
    assert set(states(engine).values()) == {"missing"}
    assert (run / "model.safetensors").exists() and ("left", "SIGTERM") in changes(run, "east-0")
    wait_until(lambda: processes("tale") == [], "no process to stay", lambda: str(processes("tale")))
    ray.shutdown()
    cluster.shutdown()
    print("all of it happened")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
