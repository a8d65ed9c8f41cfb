"""The protocol and its policies: pure data and pure functions. No IO, clock, thread, randomness, log or array."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
