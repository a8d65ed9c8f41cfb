"""The examples of islands, run as their reader would, and what holds for every example."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.observe import events, read_events

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, BATCH, RANKS = 40, 64, 2


@pytest.mark.parametrize(
    ("script", "tokens"),
    [("train_fsdp.py", RANKS * BATCH), ("train_ddp.py", RANKS * BATCH), ("train_jax_ranks.py", 512)],
)
def test_an_example_trains_under_atoll_run_with_ranks(script: str, tokens: int, tmp_path: Path) -> None:
    if "jax" in script:
        pytest.importorskip("optax")
    run = tmp_path / "run"
    # The command that the script's first lines show: with other fragments an island hung, and this test had others.
    argv = [sys.executable, "-m", "atoll", "run", "--learners", "2", "--ranks", str(RANKS), "--out", str(run)]
    argv += ["--", "python", str(EXAMPLES / script), "--steps", str(STEPS)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"learner-0.*: held-out loss [0-9.]+", done.stdout), done.stdout
    result = json.loads((run / "result.json").read_text())
    assert result["tokens"] == 2 * STEPS * tokens
    assert (run / "model.safetensors").exists()


def test_four_kinds_of_learners_train_one_model(tmp_path: Path) -> None:
    """FSDP2 and DDP with two ranks each, one process, and JAX."""
    pytest.importorskip("optax")
    run = tmp_path / "run"
    argv = [sys.executable, "-m", "atoll", "run", "--learners", "4", "--out", str(run)]
    argv += ["--", "python", str(EXAMPLES / "train_mixed.py"), "--steps", str(STEPS)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [event for _, _, event in read_events(run)]
    merged = {name for event in seen if isinstance(event, events.Committed) for name in event.contributors}
    assert merged == {f"learner-{number}" for number in range(4)}, "contributions of all four are in the model"
    ledger = json.loads((run / "result.json").read_text())["ledger"]
    assert ledger["processed"] == ledger["merged"] + ledger["pending"] + sum(ledger["discarded"].values())


def test_every_example_is_short_and_some_test_runs_it() -> None:
    tests = "\n".join(path.read_text() for path in Path(__file__).parents[1].glob("*/test_*.py"))
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) >= 11
    for script in scripts:
        assert len(script.read_text().splitlines()) < 60, f"{script.name} has 60 lines or more"
        kind = script.stem.removeprefix("train_")
        named = script.name in tests or f'("{kind}", "' in tests
        assert named, f"no test runs {script.name}"
