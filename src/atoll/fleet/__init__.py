"""Chips by the million that fail, stall and come back, and the goodput of what runs on them.

Mechanics             what a failure costs: detection, resize, return and restart times, each documented
expected_goodput      a quick estimate on paper
is_hopeless           whether a fleet fails faster than it can come back
simulate_cell         one cell: a method, so many chips, so many learners around the real machines
simulate_table        many cells, by default the published table
simulate_unequal      learners of different speed
simulate_scavenging   extra learners for part of a run
"""

from atoll.fleet.cell import Aim, Cell, simulate_cell
from atoll.fleet.estimate import expected_goodput
from atoll.fleet.mechanics import METHODS, MTBI_YEARS, YEAR_S, Mechanics, is_hopeless
from atoll.fleet.scavenging import Scavenged, simulate_scavenging
from atoll.fleet.table import Table, published_grid, simulate_table
from atoll.fleet.unequal import Unequal, simulate_unequal

__all__ = [
    "METHODS",
    "MTBI_YEARS",
    "YEAR_S",
    "Aim",
    "Cell",
    "Mechanics",
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
