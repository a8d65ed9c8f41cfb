"""Every parser of bytes that come from outside a process, with valid samples of what it reads."""

from __future__ import annotations

import functools

from fuzz_arrays import array_targets
from fuzz_engine import Target
from fuzz_files import file_targets
from fuzz_store import store_targets
from fuzz_wire import wire_targets

ROOMS = {
    "wire": ("wire.",),
    "store": ("store.",),
    "codec": ("codec.", "vault.", "inner.", "checkpoint."),
    "files": ("launch.", "observe."),
}
"""Which parsers belong to which test file, by the beginnings of their names."""


@functools.cache
def targets() -> dict[str, Target]:
    """By name."""
    found = [*wire_targets(), *store_targets(), *array_targets(), *file_targets()]
    assert len({target.name for target in found}) == len(found)
    return {target.name: target for target in found}


def targets_of(room: str) -> list[Target]:
    return [target for target in targets().values() if target.name.startswith(ROOMS[room])]
