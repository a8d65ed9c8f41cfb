"""Arrays to bytes and back: the codecs, the merge of encoded contributions, and the outer step."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
