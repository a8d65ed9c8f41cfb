"""A real Slurm on loopback: munged, slurmctld and some slurmd, all on this machine, as root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from cluster import WAIT_S
from ports import quiet_port

WIDE = socket.gethostname()
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
CONF = """
ClusterName=atoll
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmdTimeout=60
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,bf_interval=1
{nodes}
PartitionName=main Nodes={small} Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes={small} State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=wide Nodes={wide} State=UP PriorityTier=1 PreemptMode=REQUEUE
"""


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (scripts/debian)"
    return "" if os.geteuid() == 0 else "needs root"


class SlurmCluster:
    """Nodes n0, n1 ... of two CPUs each, and one in a partition of its own, called wide, that says it has
    16. It has this machine's name, so that others find what listens there."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        small = [f"n{index}" for index in range(nodes)]
        for name in ("state", *(f"spool/{node}" for node in (*small, WIDE))):
            (folder / name).mkdir(parents=True)
        lines = [
            f"NodeName={node} NodeHostName=localhost NodeAddr=127.0.0.1 Port={quiet_port()} CPUs={cpus} "
            "Features=here State=UNKNOWN"
            for node, cpus in (*((node, 2) for node in small), (WIDE, 16))
        ]
        conf = folder / "slurm.conf"
        places = {"port": quiet_port(), "folder": folder, "small": ",".join(small), "wide": WIDE}
        conf.write_text(CONF.format(nodes="\n".join(lines), **places))
        self.environment = {"SLURM_CONF": str(conf)}
        self._daemons = [self._start("munged", "--foreground", "--force", *self._munge_files())]
        wait_until((folder / "munge.socket").exists, "munged to listen")
        self._daemons += [self._start("slurmctld", "-D", "-c")]
        self._daemons += [self._start("slurmd", "-D", "-N", node) for node in (*small, WIDE)]
        ready = {f"idle {node}" for node in (*small, WIDE)}
        wait_until(lambda: set(self.ask("sinfo", "-hN", "-o", "%T %N").splitlines()) == ready, "idle nodes", self.logs)

    def _munge_files(self) -> list[str]:
        """Of its own, so that it meets no munged of this machine."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        names = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        return [f"--key-file={key}", *(f"--{option}={self.folder / name}" for option, name in names.items())]

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self.environment}
        quiet = subprocess.DEVNULL
        return subprocess.Popen(words, env=environment, stdin=quiet, stdout=quiet, stderr=quiet)

    def ask(self, *words: str) -> str:
        environment = {**os.environ, **self.environment}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=WAIT_S)
        return done.stdout.strip()

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in self.folder.glob("*.log"))

    def close(self) -> None:
        self.ask("scancel", "--user=root")
        self.ask("scancel", "--full", "--signal=KILL", "--user=root")
        deadline_s = time.monotonic() + 20  # a slurmd that ends leaves its steps running
        while self.ask("squeue", "--noheader") and time.monotonic() < deadline_s:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def wait_until(condition: Callable[[], bool], what: str, logs: Callable[[], str] = str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}\n{logs()}"
        time.sleep(0.2)
