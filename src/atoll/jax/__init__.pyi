from .learner import Learner
from .parameters import JaxParameters, Transposed

__all__ = ["JaxParameters", "Learner", "Transposed"]
