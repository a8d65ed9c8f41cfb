"""examples/nanogpt.diff against a script of nanoGPT's shape. (nanoGPT itself cannot be had here.)"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DIFF = (ROOT / "examples" / "nanogpt.diff").read_text()
PAGE = (ROOT / "docs" / "howto" / "frameworks.md").read_text()


def patched(script: str, diff: str) -> str:
    """Each hunk is put where its lines are, wherever that is: every one must be there exactly once."""
    for hunk in diff.split("\n@@")[1:]:
        lines = hunk.split("\n", 1)[1].rstrip("\n").split("\n")
        before = "\n".join(line[1:] for line in lines if line[0] != "+")
        after = "\n".join(line[1:] for line in lines if line[0] != "-")
        assert f"\n{script}".count(f"\n{before}\n") == 1, before
        script = f"\n{script}".replace(f"\n{before}\n", f"\n{after}\n")[1:]
    return script


def test_the_diff_has_five_lines_and_is_on_the_page() -> None:
    added = [line for line in DIFF.splitlines() if line.startswith("+") and not line.startswith("+++")]
    removed = [line for line in DIFF.splitlines() if line.startswith("-") and not line.startswith("---")]
    assert len(added) - len(removed) == 5 and len(removed) == 1
    assert all(line in PAGE for line in (*added, *removed))


def test_two_learners_train_with_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(patched((Path(__file__).parent / "nano_train.py").read_text(), DIFF))
    command = ["-m", "atoll", "run", "--learners", "2", "--sync-every", "4", "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [sys.executable, *command, "--", sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["ledger"]["merged"] > 0, result
    # Whoever comes late on a busy machine begins at the run's step.
    assert re.search(r"step \d+: train loss .* val loss", ended.stdout), ended.stdout
    assert (tmp_path / "run" / "model.safetensors").is_file()
