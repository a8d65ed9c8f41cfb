"""The syncer: a CPU process that merges what a quorum has sent, takes an outer step and publishes. No torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
