from .learner import Learner
from .parameters import JaxParameters, Transposed
from .ranks import initialize

__all__ = ["JaxParameters", "Learner", "Transposed", "initialize"]
