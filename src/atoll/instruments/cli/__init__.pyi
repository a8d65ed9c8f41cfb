from . import chaos, conform, demo, lab, plan, replay, sim
from .storm_options import STORM

__all__ = ["STORM", "chaos", "conform", "demo", "lab", "plan", "replay", "sim"]
