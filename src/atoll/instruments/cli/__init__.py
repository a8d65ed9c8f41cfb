"""The commands of the instruments. `atoll.app` puts them together with those of the product."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
