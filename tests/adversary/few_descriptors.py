"""Preloaded by a syncer that is to have few descriptors, as on a machine where nobody raised the limit."""

from __future__ import annotations

import os
import resource

_soft, _hard = map(int, os.environ["TEST_DESCRIPTORS"].split(","))
resource.setrlimit(resource.RLIMIT_NOFILE, (_soft, _hard))
