"""A study in several worlds as one table: how far each arm is behind the quickest fixed one in each of them.

A setting that is the best somewhere and far behind elsewhere is no setting for a network that nobody knows: what counts
is the last column, the worst of all worlds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.instruments.lab.study import Study
from atoll.instruments.lab.tables import StudyLine, TextTable

UNKNOWN, NEVER = "", "not reached"


def worlds_table(study: Study, lines: Sequence[StudyLine]) -> TextTable | None:
    """Of the time to the study's loss; None where there is none, or but one world."""
    worlds = list(dict.fromkeys(str(line.settings["world"]) for line in lines if "world" in line.settings))
    if not study.time_to or len(worlds) < 2:
        return None
    by_arm: dict[str, dict[str, StudyLine]] = {}
    for line in lines:
        others = [f"{name.rpartition('.')[2]}={value}" for name, value in line.settings.items() if name != "world"]
        by_arm.setdefault(", ".join([line.label, *others]), {})[str(line.settings.get("world"))] = line
    header = (f"time to {study.time_to:g}", *worlds, "worst")
    return TextTable(header, tuple(_row(arm, [found.get(world) for world in worlds]) for arm, found in by_arm.items()))


def _row(arm: str, found: Sequence[StudyLine | None]) -> tuple[str, ...]:
    behind = [_behind(line) for line in found]
    known = [value for value in behind if value is not None]
    return (arm, *map(_text, behind), _text(max(known, default=None)))


def _behind(line: StudyLine | None) -> float | None:
    """In shares of the quickest fixed setting's time; infinite: some seed never came down to it."""
    if line is None or not line.runs:
        return None
    return math.inf if line.reached_s is None else line.reached_ratio and line.reached_ratio - 1.0


def _text(behind: float | None) -> str:
    if behind is None:
        return UNKNOWN
    return NEVER if math.isinf(behind) else f"{behind:+.1%}"
