"""Storms on real processes: `atoll chaos storm`, `--chaos` of `atoll train` and `atoll run`, and the scorecard.

StormFaults stands behind the launcher's seam for faults; the rest is imported when it is used.
"""

from atoll.storms.injection import StormFaults

__all__ = ["StormFaults"]
