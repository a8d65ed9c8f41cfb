"""Makes tests/cluster.py and tests/core/world.py importable, and cleans up what a failing test leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "core")]
