from .claims import claims
from .job import Job, Region, job_from, job_names
from .planner import Plan, make_plan
from .published import (
    GRID_GBIT_S,
    MODELS,
    ROWS,
    STREAMING_TABLE,
    UTILISATIONS,
    ComparedCell,
    agreement,
    compare,
    exchange_of,
)
from .settings import OWN
from .show import headline, print_plan
from .show_published import print_published
from .utilisation import compute_utilisation

__all__ = [
    "GRID_GBIT_S",
    "MODELS",
    "OWN",
    "ROWS",
    "STREAMING_TABLE",
    "UTILISATIONS",
    "ComparedCell",
    "Job",
    "Plan",
    "Region",
    "agreement",
    "claims",
    "compare",
    "compute_utilisation",
    "exchange_of",
    "headline",
    "job_from",
    "job_names",
    "make_plan",
    "print_plan",
    "print_published",
]
