"""What the machine gives this process: file descriptors and memory.

Every connection takes a descriptor, and so does every file of the store. Without any left nothing can be written, so
connections get all but a reserve.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from atoll.wire.limits import CONNECTIONS_MAX, DESCRIPTORS_RESERVED

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def room_for_connections() -> int:
    """Raise this process's limit of descriptors as far as it may be and is of use; returns how many connections that
    leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + DESCRIPTORS_RESERVED
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        limit = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)
    else:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError):  # macOS says infinity and means less
            limit = soft
    return max(limit - DESCRIPTORS_RESERVED, limit // 2)


def memory_bytes() -> int:
    """Of this machine, or of the container that this process is in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return machine
