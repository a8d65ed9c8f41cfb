from .draw import draw_faults, learner_names
from .fault import Fault
from .hosts import HostNet
from .injector import ProcessControl
from .kinds import DIRECTIONS, GUEST_PREFIX, KINDS, SYNCER, Kind
from .namespaces import NamespaceNet, namespaces_available
from .plan import CHAOS_PLANS, STORM_MINUTES_MAX, chaos_plan, storm_plan
from .planfile import StormPlan, dump_plan, listed_faults, load_plan, seconds_of
from .poison import encode_poisoned
from .proxy import ChaosProxy, ProxyStats
from .real import ChaosExecutor, InjectedFault
from .weather import LINK_FAULTS, PERFECT, Way, Weather

__all__ = [
    "CHAOS_PLANS",
    "DIRECTIONS",
    "GUEST_PREFIX",
    "KINDS",
    "LINK_FAULTS",
    "PERFECT",
    "STORM_MINUTES_MAX",
    "SYNCER",
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
    "encode_poisoned",
    "learner_names",
    "listed_faults",
    "load_plan",
    "namespaces_available",
    "seconds_of",
    "storm_plan",
]
