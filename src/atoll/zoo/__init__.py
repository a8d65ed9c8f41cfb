"""The zoo: the small reference GPT and the corpora that the demo, the lab and the benchmarks share.

This front door imports neither torch nor numpy: names are loaded from their module when first used, so that the command
line can list presets and build a `WorkerConfig` at once.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
