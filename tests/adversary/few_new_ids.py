"""Preloaded by a syncer that takes in few new ids, so that a test need not make up ten thousand."""

from __future__ import annotations

import os

from atoll.core import identity

identity.NEW_IDS_AT_ONCE, identity.NEW_IDS_PER_MINUTE = map(int, os.environ["TEST_NEW_IDS"].split(","))
