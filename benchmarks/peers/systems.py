"""Who takes part, how each is started, and what it cannot do."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
DILOCO = ("--overlap", "0", "--fragments", "1", "--quorum", "all", "--grace-cap", "0", "--merge", "mean")
NO_COORDINATOR = "it has none"
DIES = "not possible: the group ends with any of its ranks"
FIXED = "not possible: the number of ranks is fixed when it starts"


@dataclass(frozen=True)
class System:
    title: str
    script: str
    venv: str = ""
    """Empty: the environment that runs this."""
    period: int = 8
    outer: str = "0.7,0.9"
    form: str = ""
    coordinator: str = ""
    """none: nobody; rank: the address of worker 0; else how it is started."""
    cannot: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()

    @property
    def python(self) -> str:
        return str(HERE / ".venvs" / self.venv / "bin" / "python") if self.venv else sys.executable

    @property
    def there(self) -> bool:
        return Path(self.python).exists()

    @property
    def code_lines(self) -> int:
        """Lines of a user's script that are there for this system."""
        return sum(line.rstrip().endswith("# +") for line in (HERE / "systems" / self.script).read_text().splitlines())


IN_STEP = {"kill": DIES, "kills": DIES, "join": FIXED, "all": DIES, "coordinator": NO_COORDINATOR}
SYSTEMS = {
    "atoll": System("Atoll", "atoll_learner.py", coordinator="syncer"),
    "atoll-24": System("Atoll, H=24", "atoll_learner.py", coordinator="syncer", period=24),
    "atoll-diloco": System("Atoll, diloco", "atoll_learner.py", coordinator="syncer", period=24, settings=DILOCO),
    "torchft": System("torchft DiLoCo", "torchft_diloco.py", "torchft", period=24, coordinator="lighthouse"),
    "torchft-retries": System(
        "torchft, 20 retries", "torchft_diloco.py", "torchft", period=24, form="retries", coordinator="lighthouse"
    ),
    "torchft-streaming": System(
        "torchft streaming", "torchft_diloco.py", "torchft", period=24, form="streaming", coordinator="lighthouse"
    ),
    "hivemind": System("hivemind", "hivemind_local.py", "hivemind", coordinator="dht"),
    "flower": System("Flower FedAvgM", "flower.py", "flower", outer="1.0,0.0", coordinator="server"),
    "ddp": System("DDP gloo", "ddp.py", coordinator="rank", cannot=IN_STEP),
    "fsdp": System("FSDP2 gloo", "ddp.py", form="fsdp", coordinator="rank", cannot=IN_STEP),
    "bare": System("no system", "bare.py", coordinator="none", cannot={"coordinator": NO_COORDINATOR}),
}
QUICK = ("bare", "atoll", "torchft", "hivemind", "flower", "ddp")
