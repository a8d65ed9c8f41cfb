"""The lab: real training of many learners on one device in virtual time, driven by the machines of production."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
