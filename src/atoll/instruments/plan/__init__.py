"""A planning calculator: what a job needs of its links, what it loses to failures, and which settings follow.

Job, Region, job_from    the job that is planned
make_plan                settings, needs, limits and the comparison with other methods
compare, agreement       our model beside the published compute-utilisation tables
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
