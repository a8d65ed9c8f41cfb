"""Who takes part, how each is started, with whose settings, and what it cannot do."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
"""Atoll itself, which need not be installed."""
UNPACKED = HERE / ".unpacked"
"""Where `wheels unpack` puts the peers on a machine that has no environments of theirs."""
DILOCO = ("--overlap", "0", "--fragments", "1", "--quorum", "all", "--grace-cap", "0", "--merge", "mean")
NO_COORDINATOR = "not possible: it has no coordinator"
DIES = "not possible: the group ends with any of its ranks"
FIXED = "not possible: the number of ranks is fixed when it starts"
ONE_GPU = "not measured: its exchange is of arrays in the CPU's memory, and nobody's example puts it on one shared GPU"


@dataclass(frozen=True)
class System:
    title: str
    script: str
    venv: str = ""
    """Empty: the environment that runs this."""
    period: int = 24
    outer: str = ""
    """Outer learning rate and momentum, as its authors have them; empty: it has none."""
    form: str = ""
    coordinator: str = ""
    """none: nobody; rank: the address of worker 0; else how it is started."""
    cannot: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    kept: str = "steps"
    """How steps that are in the model are told: ledger (Atoll's events), steps (what each worker has recorded)."""
    listens: bool = False
    """Workers are started when the coordinator listens: who asks earlier gives up, or waits longer and longer."""
    source: str = ""
    """Where its settings come from."""
    whole: bool = True
    """Each worker has the whole model, and can look at it alone."""

    @property
    def python(self) -> str:
        environment = HERE / ".venvs" / self.venv / "bin" / "python"
        return str(environment) if self.venv and not self.unpacked else sys.executable

    @property
    def unpacked(self) -> bool:
        return bool(self.venv) and (UNPACKED / self.venv).is_dir()

    @property
    def python_path(self) -> str:
        """Its own packages first, then the workload's folder and Atoll's, then what this process was given."""
        own = [str(UNPACKED / (self.venv or "atoll"))] if self.unpacked or not self.venv else []
        given = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
        return ":".join([*own, str(HERE), str(SOURCE), *given])

    @functools.cached_property
    def versions(self) -> str:
        """As its environment has them; its own packages come first there."""
        folders = [str(UNPACKED / (self.venv or "atoll"))] if self.unpacked or not self.venv else []
        folders += map(str, (HERE / ".venvs" / self.venv).glob("lib/python*/site-packages")) if self.venv else []
        found: dict[str, str] = {}
        for one in importlib.metadata.distributions(path=[*folders, *sys.path]):
            found.setdefault(str(one.metadata["Name"]).lower(), one.version)
        name = {"": "", "flower": "flwr"}.get(self.venv, self.venv)
        if self.script == "atoll_learner.py":
            name = "atoll"
            found[name] = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]["version"]
        return ", ".join(f"{one} {found[one]}" for one in (name, "torch", "numpy") if one in found)

    @property
    def there(self) -> bool:
        return Path(self.python).exists()

    @property
    def code_lines(self) -> int:
        """Lines of code that the system's script has and the bare one has not; see `added_lines`."""
        return added_lines(HERE / "systems" / self.script)


def added_lines(script: Path) -> int:
    """Without blank lines, comments, docstrings, and what only this benchmark needs (`# bench`)."""
    rest = _code(script.with_name("bare.py"))
    added = 0
    for line in _code(script):
        if line in rest:
            rest.remove(line)
        else:
            added += 1
    return added


def _code(script: Path) -> list[str]:
    text = script.read_text()
    first = ast.parse(text).body[0]  # every script begins with its docstring
    lines = [line.strip() for line in text.splitlines()[first.end_lineno :]]
    return [line for line in lines if line and not line.startswith("#") and not line.endswith("# bench")]


@functools.cache
def machine() -> str:
    """In words: what a reader would have to get."""
    words = [f"{os.cpu_count()} cores", f"{os.uname().sysname} {os.uname().release.split('-')[0]}"]
    words.append(f"Python {sys.version.split()[0]}")
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        words.append(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0])
    return ", ".join(words)


IN_STEP = {"kill": DIES, "kills": DIES, "join": FIXED, "all": DIES, "coordinator": NO_COORDINATOR}
CPU_ONLY = {"gpu": ONE_GPU}
OWN = "its defaults"
TORCHFT = "its train_diloco.py: outer SGD 0.7, Nesterov 0.9, use_async_quorum=False; lighthouse: min_replicas 2"
FLOWER = "its guides: fraction_fit 1, min_fit_clients and min_available_clients 2, checkpoint in aggregate_fit; "
HIVEMIND = (
    "its guide: use_local_updates; delay_state_averaging; matchmaking 1 s and averaging 5 s (its guide: 3 and 10, for "
    "epochs of minutes), requests 0.5 s"
)
SYSTEMS = {
    "atoll": System(
        "Atoll", "atoll_learner.py", period=8, outer="0.7,0.3", coordinator="syncer", kept="ledger", source=OWN
    ),
    "atoll-24": System(
        "Atoll, H=24", "atoll_learner.py", outer="0.7,0.3", coordinator="syncer", kept="ledger", source="defaults, H=24"
    ),
    "atoll-diloco": System(
        "Atoll, diloco",
        "atoll_learner.py",
        outer="0.7,0.9",
        coordinator="syncer",
        settings=DILOCO,
        kept="ledger",
        source="DiLoCo's paper: H=24 here, outer 0.7 and 0.9, nobody is left behind",
    ),
    "atoll-adaptive": System(
        "Atoll, adaptive",
        "atoll_learner.py",
        period=8,
        outer="0.7,0.3",
        coordinator="syncer",
        settings=("--adaptive", "on"),
        kept="ledger",
        source="defaults, --adaptive on",
    ),
    "torchft": System(
        "torchft DiLoCo", "torchft_diloco.py", "torchft", outer="0.7,0.9", coordinator="lighthouse", source=TORCHFT
    ),
    "torchft-retries": System(
        "torchft, 20 retries",
        "torchft_diloco.py",
        "torchft",
        outer="0.7,0.9",
        form="retries",
        coordinator="lighthouse",
        source=TORCHFT + "; TORCHFT_QUORUM_RETRIES=20",
    ),
    "torchft-streaming": System(
        "torchft streaming",
        "torchft_diloco.py",
        "torchft",
        outer="0.7,0.9",
        form="streaming",
        coordinator="lighthouse",
        source=TORCHFT + "; a fragment for each block, fragment_sync_delay=1",
    ),
    "hivemind": System(
        "hivemind", "hivemind_local.py", "hivemind", coordinator="dht", cannot=CPU_ONLY, source=HIVEMIND
    ),
    "flower": System(
        "Flower FedAvg",
        "flower.py",
        "flower",
        outer="1.0,0.0",
        coordinator="server",
        kept="rounds",
        listens=True,
        cannot=CPU_ONLY,
        source=FLOWER + "FedAvgM's defaults, which make it FedAvg",
    ),
    "flower-adam": System(
        "Flower FedAdam",
        "flower.py",
        "flower",
        form="adam",
        coordinator="server",
        kept="rounds",
        listens=True,
        cannot=CPU_ONLY,
        source=FLOWER + "FedAdam with eta 0.01 and tau 1e-3, of its paper's grid",
    ),
    "nvflare": System(
        "NVIDIA FLARE FedAvg",
        "nvflare_job.py",
        "nvflare",
        coordinator="server",
        listens=True,
        cannot=CPU_ONLY,
        source="its FedAvg recipe's defaults, all sites in each round; task_request_interval 0.1 s (2 s unless told)",
    ),
    "ddp": System("DDP gloo", "ddp.py", period=1, coordinator="rank", cannot=IN_STEP, source=OWN),
    "fsdp": System(
        "FSDP2 gloo", "fsdp.py", period=1, coordinator="rank", cannot={**IN_STEP, **CPU_ONLY}, source=OWN, whole=False
    ),
    "bare": System(
        "no system", "bare.py", period=0, coordinator="none", cannot={"coordinator": NO_COORDINATOR}, source="-"
    ),
}
QUICK = ("atoll", "torchft", "hivemind", "flower", "ddp")
DEVICE = (
    "atoll", "atoll-24", "atoll-diloco", "torchft", "torchft-streaming", "hivemind", "flower", "nvflare", "ddp", "fsdp",
)  # fmt: skip
