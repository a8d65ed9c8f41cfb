"""What must always be true: one checker per invariant of RELIABILITY, fed with plain facts.

The simulator and the storms on real processes use the same checkers; where the facts come from is theirs to say.
I12 (quality) is a comparison of two runs' losses, which the storm's scorecard makes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
