"""`atoll conform` without the terminal: peers of other makers, held to the wire contract clause by clause."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
