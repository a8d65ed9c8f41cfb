"""The learner: Atoll inside a training loop, in three lines.

`Learner` is for PyTorch. `ParametersLearner` takes any model that comes as `Parameters`, and needs no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
