from .draw import draw_faults, learner_names
from .fault import Fault
from .hosts import HostNet
from .injector import ProcessControl
from .kinds import DIRECTIONS, GUEST_PREFIX, KINDS, STANDBY, SYNCER, Kind, role_of
from .lies import LIES, NUMBERS_APART, VALUES, falsified, renumbered
from .namespaces import NamespaceNet, namespaces_available
from .plan import CHAOS_PLANS, STORM_MINUTES_MAX, chaos_plan, storm_plan
from .planfile import StormPlan, dump_plan, listed_faults, load_plan, seconds_of
from .poison import encode_poisoned, encode_scaled
from .proxy import ChaosProxy
from .real import ChaosExecutor, InjectedFault
from .weather import PERFECT, Way, Weather

__all__ = [
    "CHAOS_PLANS",
    "DIRECTIONS",
    "GUEST_PREFIX",
    "KINDS",
    "LIES",
    "NUMBERS_APART",
    "PERFECT",
    "STANDBY",
    "STORM_MINUTES_MAX",
    "SYNCER",
    "VALUES",
    "ChaosExecutor",
    "ChaosProxy",
    "Fault",
    "HostNet",
    "InjectedFault",
    "Kind",
    "NamespaceNet",
    "ProcessControl",
    "StormPlan",
    "Way",
    "Weather",
    "chaos_plan",
    "draw_faults",
    "dump_plan",
    "encode_poisoned",
    "encode_scaled",
    "falsified",
    "learner_names",
    "listed_faults",
    "load_plan",
    "namespaces_available",
    "renumbered",
    "role_of",
    "seconds_of",
    "storm_plan",
]
