"""`atoll replay` without the terminal: the merges of a recorded run made again, and the tapes of two runs compared."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
