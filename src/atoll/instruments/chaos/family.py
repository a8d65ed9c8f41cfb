"""What a process has started, by the kernel's own tables: the ranks of an island have sessions of their own."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """All processes below this one, parents first; none where the kernel does not tell."""
    below: dict[int, list[int]] = defaultdict(list)
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            name, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):  # it has ended meanwhile
            continue
        below[parent].append(name)
    found = [pid]
    for one in found:
        found += below[one]
    return found[1:]


def rank_pid(pid: int, rank: int) -> int | None:
    """The process below this one to which torchrun has given that rank; None if there is none now."""
    wanted = f"RANK={rank}".encode()
    for below in descendants(pid):
        try:
            if wanted in (PROC / str(below) / "environ").read_bytes().split(b"\0"):
                return below  # what a rank has started itself comes behind it
        except OSError:
            continue
    return None
