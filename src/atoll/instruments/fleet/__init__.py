"""Chips by the million that fail, stall and come back, and the goodput of what runs on them.

Mechanics             what a failure costs: detection, resize, return and restart times, each documented
Parts                 the coordinator, shards and relays, how often their hosts fail and for how long
expected_goodput      a quick estimate on paper
is_hopeless           whether a fleet fails faster than it can come back
simulate_cell         one cell: a method, so many chips, so many learners around the real machines
simulate_table        many cells, by default the published table
simulate_unequal      learners of different speed
simulate_scavenging   extra learners for part of a run
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
