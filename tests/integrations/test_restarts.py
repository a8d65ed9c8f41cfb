"""A trainer that is killed goes on where the run is when `atoll run` starts it again; libraries that are missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "dying_trainer.py"
STEPS = 60


@pytest.mark.parametrize(("kind", "library"), [("hf", "transformers"), ("lightning", "lightning")])
def test_a_killed_trainer_resumes_at_the_runs_step_with_its_rate(kind: str, library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    command = ["-m", "atoll", "run", "--learners", "1", "--sync-every", "4", "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [sys.executable, *command, "--", sys.executable, str(SCRIPT), kind, str(tmp_path), str(STEPS)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    begun = [json.loads(line) for line in (tmp_path / "begun-learner-0.jsonl").read_text().splitlines()]
    assert len(begun) == 2 and begun[0]["step"] == 0
    again = begun[1]
    assert 0 < again["step"] <= STEPS, "it does not begin again"
    assert again["rate"] == pytest.approx(0.01 * (1 - again["step"] / STEPS), rel=1e-3)
    assert (tmp_path / "ended-learner-0").read_text() == str(STEPS)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["ledger"]["merged"] > 0


@pytest.mark.parametrize(
    ("library", "module", "extra"),
    [
        ("transformers", "atoll.integrations.hf", "atoll[integrations]"),
        ("lightning", "atoll.integrations.lightning", "atoll[integrations]"),
        ("torchtitan", "atoll.integrations.titan", "atoll[titan]"),
        ("jax", "atoll.jax", "atoll[jax]"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(library: str, module: str, extra: str) -> None:
    missing = f"import sys; sys.modules[{library!r}] = None; sys.modules['pytorch_lightning'] = None; import {module}"
    ended = subprocess.run([sys.executable, "-c", missing], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("atoll.errors.ConfigError") and library in last.lower() and f"pip install '{extra}'" in last
