"""Ray: a real cluster of several nodes (ray.cluster_utils) in a network namespace of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.instruments.chaos import HostNet, namespaces_available

pytest.importorskip("ray", reason="pip install 'atoll[ray]'")
ROOT = sys.platform.startswith("linux") and os.geteuid() == 0
USABLE, WHY_NOT = namespaces_available() if ROOT else (False, "needs root on Linux")
HERE = Path(__file__).parent
STORY_S_MAX = 400.0


@pytest.mark.heavy
@pytest.mark.skipif(not USABLE, reason=f"no network namespaces here: {WHY_NOT}")
def test_a_node_is_lost_and_another_comes_and_the_run_goes_on(tmp_path: Path) -> None:
    """Ray binds the network card's address, so that it gets a network of its own."""
    source = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1] / "src"), source])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_DISABLE_IMPORT_WARNING": "1"}
    with HostNet() as net:
        net.add("ray.example")
        command = net.wrap("ray.example", [sys.executable, str(HERE / "ray_story.py"), str(tmp_path)])
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STORY_S_MAX,
            cwd=tmp_path,
        )
    assert done.returncode == 0 and done.stdout.rstrip().endswith("all of it happened"), done.stdout[-6000:]
