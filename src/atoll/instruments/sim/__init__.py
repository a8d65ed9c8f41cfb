"""The virtual world: the same machines as in production, a simulated clock, network and disk, and one seed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
