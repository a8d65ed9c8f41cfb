from .cell import EVENTS_MAX, Aim, Cell, simulate_cell
from .estimate import expected_goodput
from .mechanics import METHODS, MTBI_YEARS, YEAR_S, Mechanics, is_hopeless
from .parts import DAY_S, Parts
from .published import CHIPS
from .scavenging import Scavenged, simulate_scavenging
from .table import Table, published_grid, simulate_table
from .unequal import Unequal, simulate_unequal

__all__ = [
    "CHIPS",
    "DAY_S",
    "EVENTS_MAX",
    "METHODS",
    "MTBI_YEARS",
    "YEAR_S",
    "Aim",
    "Cell",
    "Mechanics",
    "Parts",
    "Scavenged",
    "Table",
    "Unequal",
    "expected_goodput",
    "is_hopeless",
    "published_grid",
    "simulate_cell",
    "simulate_scavenging",
    "simulate_table",
    "simulate_unequal",
]
