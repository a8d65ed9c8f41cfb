"""Which CPUs are near which GPUs, as the kernel tells it. A learner whose threads and memory are on the other socket
than its GPU copies through the link between the sockets, and shares that with everybody else who does."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

PCI = Path("/sys/bus/pci/devices")
DRIVER = Path("/proc/driver/nvidia/gpus")


def cpus_near(gpus: Sequence[str]) -> frozenset[int]:
    """The CPUs near these GPUs (as CUDA_VISIBLE_DEVICES names them) that this process may use; none where it is not
    known, and where it would be all of them."""
    known = _gpus_by_name()
    if not gpus or any(gpu not in known for gpu in gpus):
        return frozenset()
    allowed = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    near = allowed & frozenset(cpu for gpu in gpus for cpu in _local_cpus(known[gpu]))
    return near if near != allowed else frozenset()


def _gpus_by_name() -> dict[str, str]:
    """PCI addresses by number, in the order of the bus, and by UUID. Where GPUs differ, CUDA may number them in another
    order; then a learner is bound to CPUs that are further away, and as many."""
    try:
        places = sorted(place.name for place in DRIVER.iterdir())
        named = {str(number): place for number, place in enumerate(places)}
        for place in places:
            uuid = re.search(r"GPU UUID:\s*(\S+)", (DRIVER / place / "information").read_text())
            named |= {uuid[1]: place} if uuid else {}
    except OSError:
        return {}
    return named


def _local_cpus(place: str) -> frozenset[int]:
    try:
        return parse_cpus((PCI / place.lower() / "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """'0-3,8' -> 0, 1, 2, 3, 8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
