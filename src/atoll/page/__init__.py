"""The live page: a small web server that shows runs while they go on (`atoll dash`, `--dash`), and those that are over.

It reads event files, or one stream of status that all viewers share, so no viewer costs the syncer anything. Starlette
and uvicorn are needed here and nowhere else: pip install 'atoll[dash]'.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
