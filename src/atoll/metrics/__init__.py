"""What a process tells a Prometheus that asks it: counted from its own events as they are written.

`metered` puts the counting in front of a process's event writer and answers HTTP on a thread. `Tracker` hands the same
events' curves to TensorBoard, Weights & Biases or MLflow. What each needs is imported when it is used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
