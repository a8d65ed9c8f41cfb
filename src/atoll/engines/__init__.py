"""Runs on machines that others hand out: Slurm, Kubernetes, Ray, or a list of hosts with ssh.

A job file says what is to run (`job`). It becomes processes once (`parts`), and each engine starts those in its own
words: one file each behind one protocol (`protocol`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
