"""Faults: a plan is data (`plan`), and an executor carries it out on real processes (`real`) or in the simulator."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
