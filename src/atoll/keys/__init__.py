"""Keys: a token for each learner, observer and operator of a run, and certificates for its syncer.

`registry` is what the operator writes down (no secret is in it), `book` is how a syncer reads it while it runs, and
`authority` makes certificates.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
