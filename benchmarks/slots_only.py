"""ATOLL_PRELOAD=slots_only: every commit goes into a slot, as before there was a log. For benchmarks/rounds.py."""

from __future__ import annotations

from atoll.syncer import logged_since

logged_since.SLOT_EVERY = 1
