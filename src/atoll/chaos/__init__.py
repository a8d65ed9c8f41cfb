"""Faults on real processes: a plan is data (`plan`), and an executor carries it out as the run progresses (`real`)."""

from atoll.chaos.plan import CHAOS_PLANS, Fault, chaos_plan
from atoll.chaos.real import ChaosExecutor, InjectedFault, ProcessControl

__all__ = ["CHAOS_PLANS", "ChaosExecutor", "Fault", "InjectedFault", "ProcessControl", "chaos_plan"]
