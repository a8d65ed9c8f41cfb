"""Makes this folder's helpers importable, also for the syncers that are attacked."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
