"""Fused, deterministic loops over flat float32 arrays, and the threads that run them.

The results have the same bits for any number of threads. They are compiled by numba, once on a machine (`stored`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
