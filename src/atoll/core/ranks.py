"""Which part of the data is whose, where nobody says it: a number for each learner that no other one has.

A script that shares its data out by rank must find another number in every learner. `atoll run` gives them by
environment; learners that are started by hand on several machines get theirs from the syncer, which knows them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from atoll.core.membership import Member, MemberState

GONE = (MemberState.LEFT, MemberState.LOST)
"""Those who may come back under the same id, but whose number may be given away meanwhile."""
_NUMBER = re.compile(r"(\d{1,9})$", re.ASCII)


def rank_of(member: Member, before: Member | None, members: Iterable[Member], expected: int) -> int:
    """The number of a learner that joins: the one that it has or had, else the one that its id ends with (learner-3,
    node07) if that is one of the expected learners', else the smallest; always one that nobody who is there has."""
    taken = {one.rank for one in members if one.learner != member.learner and one.state not in GONE}
    had = [one.rank for one in (member, before) if one is not None and one.rank >= 0]
    named = [number for number in numbers(member.learner) if number < expected]
    return next(number for number in had + named + list(range(len(taken) + 1)) if number not in taken)


def numbers(learner: str) -> list[int]:
    """The number that an id ends with, if it does."""
    found = _NUMBER.search(learner)
    return [int(found[1])] if found else []
