"""Fused, deterministic loops over flat float32 arrays, and the threads that run them.

The results have the same bits for any number of threads. numba is imported by the first call, not by this module.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
