"""Storms on real processes: `atoll chaos storm`, `--chaos` of `atoll train` and `atoll run`, and the scorecard.

StormFaults stands behind the launcher's seam for faults; the rest is imported when it is used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
