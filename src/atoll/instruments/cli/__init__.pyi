from . import chaos, demo, lab, plan, replay, sim
from .storm_options import STORM

__all__ = ["STORM", "chaos", "demo", "lab", "plan", "replay", "sim"]
