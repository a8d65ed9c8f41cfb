"""Processes that run the code of an older protocol: see README.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROCESS_S_MAX = 120.0


class OldCode:
    def __init__(self, folder: Path, protocol: int) -> None:
        self.protocol = protocol
        with zipfile.ZipFile(HERE / f"atoll-protocol-{protocol}.zip") as archive:
            archive.extractall(folder)
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder / "src"), str(HERE)]),
            "NUMBA_CACHE_DIR": str(folder / "numba"),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        """A process whose `atoll` is the old one; it checks that first."""
        check = f"from atoll.core.messages import PROTOCOL_VERSION\nassert PROTOCOL_VERSION == {self.protocol}\n"
        return subprocess.Popen(
            [sys.executable, "-c", check + script, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
        )

    def report(self, given: dict[str, str]) -> dict[str, Any]:
        """What the old code makes of these messages, and what it would have sent: see compat_samples.py."""
        command = [sys.executable, str(HERE / "compat_samples.py")]
        done = subprocess.run(
            command,
            input=json.dumps(given),
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=PROCESS_S_MAX,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]
