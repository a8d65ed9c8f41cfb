"""The synthetic run is shared with tests/observe, which has no package of its own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "observe"))
