from .injection import StormFaults
from .storm import StormConfig, run_storm

__all__ = ["StormConfig", "StormFaults", "run_storm"]
