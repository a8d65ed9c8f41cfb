"""What scripts/lines counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "lines"
MODULE = '''"""Says what.

Two lines more.
"""

A = 1
"""Of a constant: code."""


def one() -> int:
    """Says what."""
    # Says why.
    return 1
'''


def test_product_instruments_and_tests_are_counted_apart_and_generated_code_is_not(tmp_path: Path) -> None:
    package = tmp_path / "src" / "atoll"
    for name in ("room/a.py", "room/__init__.pyi", "instruments/b.py", "wire/generated/c.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(MODULE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("assert True\n")
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, timeout=60, check=True)
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["product", "26", "(8)"],
        ["instruments", "13", "(4)"],
        ["tests", "1", "(1)"],
    ]
