"""Faults: a plan is data (`plan`), and an executor carries it out on real processes (`real`) or in the simulator."""

from atoll.chaos.hosts import HostNet
from atoll.chaos.namespaces import NamespaceNet
from atoll.chaos.namespaces import available as namespaces_available
from atoll.chaos.plan import (
    CHAOS_PLANS,
    DIRECTIONS,
    KINDS,
    Fault,
    Kind,
    StormPlan,
    chaos_plan,
    draw_faults,
    dump_plan,
    learner_names,
    load_plan,
    storm_plan,
)
from atoll.chaos.proxy import ChaosProxy, ProxyStats
from atoll.chaos.real import ChaosExecutor, InjectedFault, ProcessControl
from atoll.chaos.weather import LINK_FAULTS, PERFECT, Way, Weather

__all__ = [
    "CHAOS_PLANS",
    "DIRECTIONS",
    "KINDS",
    "LINK_FAULTS",
    "PERFECT",
    "ChaosExecutor",
    "ChaosProxy",
    "Fault",
    "HostNet",
    "InjectedFault",
    "Kind",
    "NamespaceNet",
    "ProcessControl",
    "ProxyStats",
    "StormPlan",
    "Way",
    "Weather",
    "chaos_plan",
    "draw_faults",
    "dump_plan",
    "learner_names",
    "load_plan",
    "namespaces_available",
    "storm_plan",
]
