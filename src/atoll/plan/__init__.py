"""A planning calculator: what a job needs of its links, what it loses to failures, and which settings follow.

Job, Region, job_from    the job that is planned
make_plan                settings, needs, limits and the comparison with other methods
compare, agreement       our model beside the published compute-utilisation tables
"""

from atoll.plan.job import Job, Region, job_from
from atoll.plan.planner import Plan, make_plan
from atoll.plan.published import agreement, compare

__all__ = ["Job", "Plan", "Region", "agreement", "compare", "job_from", "make_plan"]
