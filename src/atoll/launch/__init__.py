"""Starts the processes of a run on this machine and keeps them going: `atoll train`, `run`, `resume`, `join`, `leave`
and `export` without the terminal.

This front door imports nothing heavy: modules are loaded when their names are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
