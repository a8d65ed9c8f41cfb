from .job import IslandSpec, LaunchJob, job_from, read_job
from .parts import JobPart, Places, parts_of
from .protocol import ENGINES, Engine, PartState, engine_of, ignored_by, parse_counts

__all__ = [
    "ENGINES",
    "Engine",
    "IslandSpec",
    "JobPart",
    "LaunchJob",
    "PartState",
    "Places",
    "engine_of",
    "ignored_by",
    "job_from",
    "parse_counts",
    "parts_of",
    "read_job",
]
